"""What notebooks show: of everything something true, small, and styled for nothing but itself."""

import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import IPython
import numpy as np
import pytest
import torch
from watch_support import Stack, randn

import levelhead as lh
import levelhead.torch
from levelhead import Health
from levelhead._health.verdicts import VERDICTS
from levelhead._records import StepRecord
from levelhead.report import _notebook
from levelhead.store import Run, Store, read_run

COLUMNS = len(Health.COLUMNS)


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal((3, *shape), dtype=np.float32)


def attended(*shape, grow=None, **options):
    """The result of attention, one of whose heads may have large scores."""
    q, k, v = inputs(*shape)
    if grow is not None:
        q[..., grow, :, :] *= 60
    return lh.attention(q, k, v, return_health=True, **options)


class Reader(HTMLParser):
    """Text and cells of a fragment; complains about what is not closed."""

    def __init__(self, html):
        super().__init__()
        self.open, self.words, self.titles, self.tags = [], [], [], set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in ("circle", "line", "path"):  # those of an SVG close themselves
            self.open.append(tag)
        self.titles += [value for name, value in attrs if name == "title" and tag == "td"]

    def handle_endtag(self, tag):
        if tag not in ("circle", "line", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read(what):
    return Reader(what._repr_html_())


# ---------------------------------------------------------------- what is said


def test_a_health_says_its_verdict_and_its_worst_head():
    drawn = read(attended(4, 64, 32, grow=2).health)
    assert "1 of 4 heads needs attention: 1 saturated." in drawn.text
    assert "4 heads · 256 rows" in drawn.text
    assert [title[: title.index(":")] for title in drawn.titles] == [f"head {i}" for i in range(4)]
    assert "head 2: saturated (warning); " in drawn.titles[2]
    assert "What to do: check the scale" in drawn.text
    assert (
        f"{VERDICTS['saturated'].letter} saturated: {VERDICTS['saturated'].meaning}" in drawn.text
    )


def test_every_batch_entry_counts():
    health = attended(2, 3, 4, 64, 32).health
    drawn = read(health)
    assert "batch (2, 3) taken together" in drawn.text and len(drawn.titles) == 4
    assert drawn.titles == read(health.over_batch()).titles


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_result_lists_its_arrays(kind):
    if kind == "numpy":
        result = attended(2, 16, 8, return_lse=True)
    else:
        tensors = map(torch.from_numpy, inputs(2, 16, 8))
        result = levelhead.torch.attention(*tensors, return_lse=True, return_health=True)
    drawn = read(result)
    assert re.search(
        r"output (torch\.)?float32 \(2, 16, 8\) lse (torch\.)?float32 \(2, 16\)", drawn.text
    )
    assert "No problems found in 2 heads." in drawn.text


def test_a_result_without_health_says_how_to_get_it():
    drawn = read(lh.attention(*inputs(2, 16, 8), return_lse=True))
    assert "return_health=True" in drawn.text and "(2, 16, 8)" in drawn.text
    assert drawn.titles == []


def test_a_watch_shows_the_course_of_loss_and_scores():
    model = Stack(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with levelhead.torch.watch(model) as watch:
        for loss in (4.0, 2.0, float("nan"), 1.0):
            model(randn(2, 16, 32)).square().mean().backward()
            watch.log(loss=loss)
            optimizer.step()
        assert "the watch is on" in read(watch).text
    drawn = read(watch)
    assert "Watch · Stack · 4 steps recorded, 0 to 3" in drawn.text
    assert "the watch is off" in drawn.text
    assert "loss 4 → 1, not finite at 1 step" in drawn.text
    assert re.search(r"largest \|score\| [\d.]+ → [\d.]+", drawn.text)
    assert "svg" in drawn.tags and "At step 3: no problems found in 8 heads." in drawn.text


def test_a_run_reads_as_its_watch(tmp_path):
    model = Stack(layers=1)
    with levelhead.torch.watch(model, store=tmp_path / "run.db") as watch:
        model(randn(2, 16, 32))
    run = read(read_run(tmp_path / "run.db"))
    assert run.titles == read(watch).titles
    assert "At step 0: no problems found in 4 heads." in run.text


# ---------------------------------------------------------------- odd states


def records(layers, steps=3, names="layers.{}.attention", **scalars):
    return [
        StepRecord(step, time.time(), {names.format(i): h for i, h in enumerate(layers)}, **scalars)
        for step in range(steps)
    ]


ODD = {
    "one head": (lambda: attended(16, 8).health, "No problems found in 1 head."),
    "few keys": (lambda: attended(2, 4, 8).health, "None of the 2 heads could be judged"),
    "no rows": (
        lambda: lh.attention(*inputs(2, 0, 8), return_health=True),
        "no numbers to judge by",
    ),
    "no heads": (lambda: Health.from_sums(np.zeros((0, COLUMNS))), "no numbers to judge by"),
    "no batch": (lambda: Health.from_sums(np.zeros((0, 3, COLUMNS))), "no numbers to judge by"),
    "nothing but NaN": (
        lambda: Health.from_sums(np.full((3, COLUMNS), np.nan)),
        "no numbers to judge by",
    ),
    "NaN inputs": (
        lambda: lh.attention(*(np.nan * inputs(2, 16, 8)), return_health=True),
        "2 of 2 heads need attention: 2 nonfinite.",
    ),
    "no step": (lambda: Run.from_records([]), _notebook.NO_STEP),
    "no layer": (lambda: Run.from_records(records([])), _notebook.NO_STEP),
    "NaN loss": (
        lambda: Run.from_records(
            records([attended(16, 8).health], scalars={"loss": float("nan")}), model="M"
        ),
        "No problems found in 1 head.".lower(),
    ),
    "never on": (lambda: levelhead.torch.watch(Stack()), _notebook.NO_CALL),
}


@pytest.mark.parametrize("state", ODD)
def test_odd_states_are_told_as_they_are(state):
    make, said = ODD[state]
    drawn = read(make())
    assert said in drawn.text
    if "numbers" in said:
        assert "healthy" not in drawn.text


def test_a_watch_that_saw_nothing_says_so():
    model = Stack()
    with pytest.warns(RuntimeWarning), levelhead.torch.watch(model) as watch:
        assert _notebook.NO_CALL in read(watch).text
    assert _notebook.NO_CALL in read(watch).text


def test_a_store_that_is_gone_is_told_of(tmp_path):
    path = tmp_path / "run.db"
    with Store(path) as store:
        store(StepRecord(0, time.time(), {"attn": attended(16, 8).health}))
    run = read_run(path)
    path.unlink()
    assert "This cannot be shown: StoreError: there is no store" in read(run).text


# ---------------------------------------------------------------- small, safe, alone


def large():
    """200 layers × 64 heads, with names that would be markup."""
    health = attended(64, 32, 16, grow=5).health
    names = "model.<b>&\"'" + "x" * 90 + ".{}.attention"
    return Run.from_records(records([health] * 200, names=names), model="<script>alert(1)</script>")


def test_large_models_are_thinned_and_that_is_told():
    html = large()._repr_html_()
    drawn = Reader(html)
    assert len(html.encode()) < 300_000
    assert "Each cell is the worst of 7 layers × 2 heads." in drawn.text
    assert "200 of 12,800 heads need attention: 200 saturated." in drawn.text
    rows = html.count('scope="row"')
    assert rows == 29 and len(drawn.titles) == 29 * 32
    ill = [place % 32 for place, title in enumerate(drawn.titles) if "head 5: saturated" in title]
    assert ill == [2] * 29  # heads 4 and 5, in every row


def test_layers_may_have_different_heads():
    parts = [attended(heads, 16, 8).health for heads in (1, 4, 2)]
    assert len(read(Run.from_records(records(parts))).titles) == 7


def test_names_are_text():
    html = large()._repr_html_()
    assert "<script" not in html and "<b>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>alert(1)</script>" in Reader(html).text


def test_a_fragment_needs_nothing_and_styles_nothing_else():
    html = attended(4, 64, 32, grow=2)._repr_html_()
    assert not re.search(r"<script|<link|<img|https?:|url\(|@import|\son\w+=", html)
    style = re.sub(
        r"/\*.*?\*/", "", re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1], flags=re.DOTALL
    )
    selectors = [
        part.strip() for rule in re.findall(r"([^{}]+){", style) for part in rule.split(",")
    ]
    assert len(selectors) > 20
    assert all(re.search(r"(^|\s)\.levelhead-fragment(\s|$)", each) for each in selectors)
    for verdict, rule in VERDICTS.items():  # one source of colours
        if rule.colour is not None:
            assert f".lh-{verdict} " in style and rule.colour.dark[0] in style


@pytest.mark.parametrize(
    ("around", "scheme"),
    [
        ('data-jp-theme-light="true"', "light"),
        ('data-jp-theme-light="false"', "dark"),
        ('class="vscode-light"', "light"),
        ('class="vscode-dark"', "dark"),
    ],
)
def test_the_notebooks_theme_counts(browser, around, scheme):
    html = attended(4, 64, 32, grow=2)._repr_html_()
    other = "dark" if scheme == "light" else "light"  # what the system likes is not asked
    context = browser.new_context(color_scheme=other, viewport={"width": 390, "height": 800})
    page = context.new_page()
    outside = "<table><tr><td id=outside>x</td></tr></table>"
    page.set_content(f"<!doctype html><body {around}>{outside}{html}</body>")
    fill = page.eval_on_selector("td.lh-saturated", "e => getComputedStyle(e).backgroundColor")
    wanted = getattr(VERDICTS["saturated"].colour, scheme)[0]
    assert fill == f"rgb({', '.join(str(int(wanted[i : i + 2], 16)) for i in (1, 3, 5))})"
    assert page.eval_on_selector("#outside", "e => getComputedStyle(e).padding") == "1px"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


# ---------------------------------------------------------------- show


@pytest.fixture
def seen():
    model = Stack(layers=1)
    with levelhead.torch.watch(model) as watch:
        model(randn(2, 16, 32))
    return watch


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_show_prints_in_a_terminal(seen, shell, capsys, monkeypatch):
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    assert seen.show() is None
    assert capsys.readouterr().out == f"{seen.summary()}\n"


def test_show_draws_in_place_within_a_cell(seen, capsys, monkeypatch):
    shell = SimpleNamespace(kernel=object(), execution_count=1)
    shown = []

    def display(what, display_id):
        assert what is seen and display_id is True
        place = len(shown)
        shown.append(1)
        return SimpleNamespace(update=lambda what: shown.__setitem__(place, shown[place] + 1))

    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr("IPython.display.display", display)
    assert [seen.show() for _ in range(3)] == [None] * 3
    shell.execution_count = 2  # the next cell has a place of its own
    seen.show()
    assert shown == [3, 1]
    assert capsys.readouterr().out == ""


def test_ipython_is_not_imported_for_it():
    code = (
        "import sys, numpy as np, levelhead as lh; q = np.ones((1, 9, 4));"
        "lh.attention(q, q, q, return_health=True)._repr_html_();"
        "print([name for name in ('IPython', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
