"""The lab's framework: what an experiment is, how it runs and resumes, what it writes."""

import csv
import doctest
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from levelhead import lab
from levelhead.lab import _experiment, _figures, _progress, _tables, claims
from levelhead.lab._experiment import find

TOY = '''
"""A toy: it writes down when it is called."""
from pathlib import Path

CLAIM = 99
VERSION = 1
TITLE = "Toys <b>add</b> up"
SAID = "One & one is two."
DONE = "Added {n} times."
FOUND = "It was {sum:.1f±} (1e-07 at d_k)."
LIMITS = "Never <script>alert(1)</script>."
CLOCK = "It took {took:.9f} s."
SEEDS = {"tiny": 3}
SECONDS = {"tiny": 0.01}
LOG = Path(LOGFILE)

def measure(size, seed):
    with LOG.open("a") as log:
        print(seed, file=log)
    if LOG.with_suffix(".stop").exists() and seed == 1:
        raise KeyboardInterrupt
    seconds = len(LOG.read_text()) / 2  # a clock that never shows the same time twice
    return {"sums": {"of": ["a", "b"], "sum": [2.0 + seed, float("nan")]}, "n": 2,
            "timings": {"clock": {"run": [1], "seconds": [seconds]}}}

def numbers(runs):
    from levelhead.lab._figures import Spread
    return {"n": runs[0]["n"], "sum": Spread([run["sums"]["sum"][0] for run in runs]),
            "took": runs[0]["timings"]["clock"]["seconds"][0]}

def verdict(runs):
    """Holds if the sum is at least 2."""
    good = all(run["sums"]["sum"][0] >= 2 for run in runs)
    return ("holds" if good else "does not hold"), "the sum is within 1e-07 of itself."

def plot(runs):
    return [{"data": [{"type": "scatter", "x": [1, 2], "y": [1, 2]}],
             "layout": {"title": {"text": "toy"}, "xaxis": {}, "yaxis": {}}}]
'''


class Toy:
    def __init__(self, folder):
        self.file, self.log = folder / "toy.py", folder / "log.txt"
        self.write(TOY.replace("LOGFILE", repr(str(self.log))))

    def write(self, source):
        self.file.write_text(textwrap.dedent(source))
        # A file changed twice within a second would else come back from its cache.
        importlib.invalidate_caches()
        sys.modules.pop("levelhead.lab.claims.toy", None)
        for cached in (self.file.parent / "__pycache__").glob("*"):
            cached.unlink()
        _experiment.experiments.cache_clear()

    def edit(self, old, new):
        assert old in self.file.read_text()
        self.write(self.file.read_text().replace(old, new))

    def calls(self):
        """The seeds measured since the last time."""
        seeds = [int(line) for line in self.log.read_text().split()] if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return seeds

    def run(self, out, **options):
        return lab.run(["toy"], out=out, **{"size": "tiny", **options})


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """One more experiment, by nothing but a file."""
    folder = tmp_path / "claims"
    folder.mkdir()
    monkeypatch.setattr(claims, "__path__", [*claims.__path__, str(folder)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Toy(folder)
    sys.modules.pop("levelhead.lab.claims.toy", None)
    _experiment.experiments.cache_clear()


# ---------------------------------------------------------------- experiments


def test_every_file_is_an_experiment_in_the_order_of_the_claims():
    found = list(lab.experiments().values())
    assert [one.claim for one in found] == sorted(one.claim for one in found)
    assert {"variance", "saturation", "gradients", "initialisation"} <= set(lab.experiments())
    for one in found:
        assert one.claim >= 1 and one.version >= 1
        assert one.title and one.said and one.done and one.found and one.limits
        # A seed of the study is hundreds of runs, each with a seed of its own.
        assert one.name == "verdicts" or min(one.seeds["quick"], one.seeds["full"]) >= 3
        assert one.verdict.__doc__


def test_adding_an_experiment_is_adding_a_file(toy, tmp_path):
    assert lab.experiments()["toy"].claim == 99
    assert toy.run(tmp_path / "out").results[-1]["verdict"] == "holds"


def test_the_recipe_in_the_docs_is_complete(toy, tmp_path):
    text = (Path(__file__).parents[1] / "docs/lab/README.md").read_text(encoding="utf-8")
    toy.write(re.search("```python\n(.*?)```", text, re.DOTALL)[1])
    (result,) = toy.run(tmp_path / "out").results
    assert (result["claim"], result["verdict"]) == (99, "holds")
    assert result["why"] == "the error is at most 5/√n for 2 of 2 values of n."
    assert "With 4 numbers the error is 0." in result["text"] and "{" not in result["text"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<figcaption>Error of the mean</figcaption>" in page


def test_names_numbers_and_hyphens_find_an_experiment():
    assert [one.name for one in find(["2", "head-width", "VARIANCE"])] == ["variance", "head_width"]
    assert len(find()) == len(lab.experiments())


def test_an_unknown_name_names_all_and_the_nearest(tmp_path):
    with pytest.raises(lab.UnknownExperiment) as caught:
        lab.run(["varience"], out=tmp_path / "out")
    assert "no experiment 'varience'; did you mean 'variance'?" in str(caught.value)
    assert "five_steps, variance, divisor" in str(caught.value)
    assert caught.value.nearest == "variance"
    assert caught.value.names == tuple(lab.experiments())
    assert not (tmp_path / "out").exists()
    with pytest.raises(lab.LabError, match=r"'xyzzyx'\. The experiments are"):
        lab.run(["xyzzyx"], out=tmp_path)


@pytest.mark.parametrize(
    "name", ["_experiment", "_figures", "_page", "_results", "_run", "_tables"]
)
def test_examples_in_docstrings(name):
    failed, tried = doctest.testmod(importlib.import_module(f"levelhead.lab.{name}"))
    assert failed == 0 < tried


def test_importing_the_lab_brings_no_framework():
    code = (
        "import sys, levelhead.lab as lab; lab.experiments();"
        "heavy = ('torch', 'transformers', 'plotly', 'typer', 'rich', 'jinja2');"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


# ---------------------------------------------------------------- running


def test_what_a_run_leaves_behind(toy, tmp_path):
    out = tmp_path / "out"
    done = toy.run(out)
    assert toy.calls() == [0, 1, 2]
    (result,) = json.loads((out / "results.json").read_text())
    assert done.results == [result] and done.not_run == {} and done.page == out / "index.html"
    assert result == {
        "claim": 99,
        "experiment": "toy",
        "title": "Toys <b>add</b> up",
        "claim_text": "One & one is two.",
        "verdict": "holds",
        "why": "the sum is within 1·10⁻⁷ of itself.",
        "text": "One & one is two. Added 2 times. It was 3.0 ± 1.0 (1·10⁻⁷ at d_k). "
        "Never <script>alert(1)</script>.",
        "size": "tiny",
        "seeds": [0, 1, 2],
        "figures": {
            "sums": {
                "of": ["a", "b"],
                "sum": {
                    "mean": [3.0, None],
                    "std": [1.0, None],
                    "min": [2.0, None],
                    "max": [4.0, None],
                },
            },
            "n": 2,
        },
    }
    (timing,) = json.loads((out / "timings.json").read_text())
    assert timing["experiment"] == "toy" and "seconds" in timing["timings"]["clock"]
    with (out / "data" / "toy-sums.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["seed", "of", "sum"] and rows[3] == ["1", "a", "3.0"] and len(rows) == 7
    assert (out / "data" / "toy-timings-clock.csv").read_text().startswith("seed,run,seconds\n0,1,")
    page = (out / "index.html").read_text()
    assert "Toys &lt;b&gt;add&lt;/b&gt; up" in page and "<script>alert(1)" not in page
    assert "levelhead lab toy" in page and "def measure(size, seed):" in page
    assert not list(out.rglob(".*"))  # no half-written file


def test_the_clock_is_kept_out_of_the_results(toy, tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    toy.run(first)
    toy.run(second)
    assert (first / "results.json").read_bytes() == (second / "results.json").read_bytes()
    assert (first / "timings.json").read_bytes() != (second / "timings.json").read_bytes()


def test_what_is_finished_is_not_measured_again_unless_asked(toy, tmp_path):
    out = tmp_path / "out"
    toy.run(out)
    before = (out / "results.json").read_bytes()
    toy.calls()
    toy.run(out)
    assert toy.calls() == [] and (out / "results.json").read_bytes() == before
    toy.run(out, again=True)
    assert toy.calls() == [0, 1, 2]
    toy.run(out, seeds=4)
    assert toy.calls() == [3]
    toy.run(out, seed=7, seeds=2)
    assert toy.calls() == [7, 8]


def test_an_interrupted_run_goes_on_where_it_stopped(toy, tmp_path):
    out = tmp_path / "out"
    stop = toy.log.with_suffix(".stop")
    stop.touch()
    with pytest.raises(KeyboardInterrupt):
        toy.run(out)
    assert toy.calls() == [0, 1] and not (out / "results.json").exists()
    stop.unlink()
    toy.run(out)
    assert toy.calls() == [1, 2] and (out / "results.json").exists()


def test_damaged_figures_are_measured_again(toy, tmp_path):
    out = tmp_path / "out"
    toy.run(out)
    toy.calls()
    kept = out / "runs" / "tiny"
    (kept / "toy-0.json").write_text('{"version": 1, "figu')
    (kept / "toy-2.json").write_text("[]")
    toy.run(out)
    assert toy.calls() == [0, 2]


def test_another_version_measures_again_but_other_words_do_not(toy, tmp_path):
    out = tmp_path / "out"
    toy.run(out)
    toy.calls()
    toy.edit('LIMITS = "Never', 'LIMITS = "Hardly ever')
    toy.edit(">= 2 for run", ">= 3 for run")
    assert toy.run(out).results[-1]["verdict"] == "does not hold"
    assert toy.calls() == []
    assert "Hardly ever" in (out / "results.json").read_text()
    toy.edit("2.0 + seed", "5.0 + seed")
    toy.edit("VERSION = 1", "VERSION = 2")
    assert toy.run(out).results[-1]["verdict"] == "holds"
    assert toy.calls() == [0, 1, 2]
    toy.edit("VERSION = 2", "VERSION = 1")  # an older version is another one, too
    toy.run(out)
    assert toy.calls() == [0, 1, 2]


def test_figures_that_name_no_version_are_measured_again(toy, tmp_path):
    """As they were kept before experiments had versions: with a fingerprint of the code."""
    out = tmp_path / "out"
    toy.run(out)
    toy.calls()
    for path in (out / "runs" / "tiny").iterdir():
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({"code": "0123456789abcdef", "figures": kept["figures"]}))
    toy.run(out)
    assert toy.calls() == [0, 1, 2]


def test_a_second_run_keeps_what_the_folder_has_finished(toy, tmp_path):
    out = tmp_path / "out"
    toy.run(out)
    done = lab.run(["five_steps"], out=out, size="tiny")
    assert [result["experiment"] for result in done.results] == ["five_steps", "toy"]
    elsewhere = lab.run(["five_steps"], out=tmp_path / "elsewhere", size="tiny")
    assert [result["experiment"] for result in elsewhere.results] == ["five_steps"]


def test_progress_tells_what_comes_and_the_time_left(toy, tmp_path):
    told = []
    toy.run(tmp_path / "out", progress=told.append)
    assert [(p.experiment, p.seed, p.done, p.total) for p in told] == [
        *(("toy", seed, seed, 3) for seed in range(3)),
        ("", -1, 3, 3),
    ]
    assert told[0].left == pytest.approx(0.03)
    assert told[1].left == pytest.approx(2 * told[1].elapsed) and told[-1].left == 0


def test_each_experiment_is_told_when_it_is_finished(toy, tmp_path):
    told = []
    options = {"out": tmp_path / "out", "size": "tiny", "progress": told.append}
    lab.run(["five_steps", "toy"], **options, finished=told.append)
    order = [(type(each).__name__, each.experiment) for each in told]
    assert order.index(("Finished", "five_steps")) < order.index(("Progress", "toy"))
    assert order[-2:] == [("Finished", "toy"), ("Progress", "")]
    (toys,) = [each for each in told if order[told.index(each)] == ("Finished", "toy")]
    assert (toys.claim, toys.verdict) == (99, "holds") and toys.seconds > 0
    assert toys.why == "the sum is within 1·10⁻⁷ of itself."
    told.clear()
    lab.run(["toy"], **options, finished=told.append)  # all of it is there
    assert [each.seconds for each in told if isinstance(each, lab.Finished)] == [0.0]


def test_figures_to_remember_are_in_the_results(toy, tmp_path):
    toy.edit('CLOCK = "It', 'KEY = {"sum of {n}": "{sum:.1f±}", "nearly 0": "1e-07"}\nCLOCK = "It')
    (result,) = toy.run(tmp_path / "out").results
    assert result["key_figures"] == {"sum of 2": "3.0 ± 1.0", "nearly 0": "1·10⁻⁷"}
    page = (tmp_path / "out" / "index.html").read_text()
    assert '<th scope="row">sum of 2</th><td>3.0\u00a0±\u00a01.0</td>' in page


def test_the_time_left_rests_on_what_was_worked_and_not_on_what_was_found(monkeypatch):
    class One:
        name, seconds = "one", {"full": 100.0}

    told, now = [], iter([0.0, 1.0, 21.0, 141.0])
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(now))
    tracker = _progress.Tracker([(One, 0), (One, 1)], "full", told.append)
    tracker.at(0, 0.5, 0.5)  # half of it was in the folder
    tracker.at(0, 0.6)  # a tenth, expected to take 10 seconds, took 21
    tracker.at(2)
    assert [p.done for p in told] == [0.5, 0.6, 2] and [p.seed for p in told] == [0, 0, -1]
    assert [p.left for p in told] == pytest.approx([150.0, 2.1 * 140, 0.0])


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_is_no_folder_and_that_is_said_before_any_work(toy, tmp_path, inside):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(lab.LabError, match=r"out: expected a folder, but .*file.* a file"):
        toy.run(file / "deeper" if inside else file)
    assert toy.calls() == [] and file.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_said_before_any_work(toy, tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    # As root every folder can be written, so the refusal is played.
    monkeypatch.setattr("levelhead.lab._run.tempfile.TemporaryFile", refuse)
    with pytest.raises(lab.LabError, match=r"cannot be written \(Permission denied\); choose"):
        toy.run(tmp_path / "out")
    assert toy.calls() == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write")
def test_a_folder_that_nobody_can_write(toy):
    with pytest.raises(lab.LabError, match="out: /proc/lab cannot be written"):
        toy.run("/proc/lab")
    assert toy.calls() == []


def test_wrong_sizes_and_seeds(toy, tmp_path):
    with pytest.raises(lab.LabError, match="size: expected one of tiny, quick, full, got 'huge'"):
        toy.run(tmp_path / "out", size="huge")
    with pytest.raises(lab.LabError, match="seeds: expected at least 1, got 0"):
        toy.run(tmp_path / "out", seeds=0)


def test_without_torch_the_others_run(tmp_path):
    code = f"""
import json, sys
sys.modules["torch"] = None
from levelhead import lab
done = lab.run(["five_steps", "gradients", "initialisation"], out={str(tmp_path)!r}, size="tiny")
print(json.dumps([done.not_run, [(r["experiment"], r["verdict"], r["why"]) for r in done.results]]))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    not_run, results = json.loads(run.stdout)
    torch = 'it needs PyTorch: pip install "levelhead[torch]"'
    demo = 'it needs the demo model: pip install "levelhead[demo]"'
    assert not_run == {"gradients": torch, "initialisation": demo}
    assert results[0][:2] == ["five_steps", "holds"]
    assert results[1:] == [["gradients", "not run", torch], ["initialisation", "not run", demo]]
    page = (tmp_path / "index.html").read_text()
    assert page.count("levelhead[torch]") == 1 and "2 were not run" in page


# ---------------------------------------------------------------- figures


def test_numbers_with_their_spread():
    x = _figures.Spread([1.0, 2.0, 3.0])
    assert (x, x.std, x.low, x.high) == (2.0, 1.0, 1.0, 3.0)
    assert f"{x:.1f} {x:.2f±} {x:.0%±}" == "2.0 2.00 ± 1.00 200% ± 100%"
    assert f"{_figures.Spread([5.0]):.1f±}" == "5.0"
    assert f"{_figures.Spread([5.0, 5.001]):.1f±}" == "5.0"  # a spread of 0.0 says nothing


def test_cells_that_people_read():
    import numpy as np

    cells = {
        (0.99, 1.01, 1.0): "1.000 ± 0.010",
        (64.0, 64.0): "64",
        (1e-7, 3e-7): "2·10⁻⁷ ± 1·10⁻⁷",
        (12345.0, 12355.0): "12,350.0 ± 7.1",
        (np.nan, 1.0): "–",
    }
    for values, text in cells.items():
        assert _tables.cell(np.array(values)) == text
    assert _tables.cell(np.array(["sqrt_dk", "sqrt_dk"])) == "1/√d_k"
    names = ("d_k", "top_weight", "first_W_q", "std_sqrt_dmodel", "variance_q", "W_q", "d_model")
    assert [*map(_tables._words, names)] == [
        *("d_k", "top weight", "first W_q", "std 1/√d_model", "variance q", "W_q", "d_model")
    ]


def test_at_finds_one_row_or_fails():
    table = _figures.stack([{"t": {"d": [1, 1], "x": [1.0, 2.0]}}])["t"]
    with pytest.raises(ValueError):
        _figures.at(table, "x", d=1)
    with pytest.raises(ValueError):
        _figures.at(table, "x", d=2)


def test_no_measured_number_is_typed_into_the_texts():
    """FOUND states numbers by its fields; what else it holds are conditions and theory."""
    for one in lab.experiments().values():
        fields = re.findall(r"\{(\w+)(?::[^}]*)?\}", one.found)
        assert len(fields) >= 4, one.name


def test_the_published_words_are_those_of_the_published_results():
    """results.md and the README's table are what docs/lab/publish.py writes."""
    root = Path(__file__).parents[1]
    path = root / "docs/lab/publish.py"
    spec = importlib.util.spec_from_file_location("publish", path)
    publish = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(publish)
    results = json.loads((root / "docs/lab/results.json").read_text(encoding="utf-8"))
    assert [one["claim"] for one in results] == list(range(1, len(lab.experiments()) + 1))
    assert {one["size"] for one in results} == {"full"}
    readme = (root / "README.md").read_text(encoding="utf-8")
    page = (root / "docs/lab/results.md").read_text(encoding="utf-8")
    assert page == publish.results_page(results, publish.published_pictures())
    assert readme == publish.with_table(readme, results)
    for one in results:
        assert (
            f"| {one['claim']} | {one['title']} | {lab.verdict_words(one['verdict'])} |" in readme
        )
        assert one["title"] == lab.experiments()[one["experiment"]].title
        assert one["claim_text"] == lab.experiments()[one["experiment"]].said
        answer = f"**{lab.verdict_words(one['verdict']).capitalize()}:** {lab.reason(one['why'])}."
        assert answer in page and len(lab.reason(one["why"])) <= 110
        for label, value in one.get("key_figures", {}).items():
            assert f"| {label} | {value} |" in page
    lines = [line for line in page.splitlines() if not line.startswith(("|", "!"))]
    assert max(map(len, lines)) < 700  # paragraphs are short
    shown = [
        root / folder / picture
        for folder, text in (("", readme), ("docs/lab", page))
        for picture in re.findall(r"\((\S+\.png)\)", text)
    ]
    assert len(shown) > 40 and all(picture.is_file() for picture in shown)
