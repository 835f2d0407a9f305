"""What a watch takes, what it says and hands out, and where that goes."""

import json
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from page_support import unpacked
from torch import nn
from watch_support import (
    Stack,
    lively,
    modes,
    randn,
    watching,
)

import levelhead.torch
from levelhead._health import Thresholds
from levelhead._health.verdicts import MARKS, VERDICTS
from levelhead.report._run_page import run_data
from levelhead.store import JsonLines, Store, StoreError, read_run

X = randn(2, 13, 32)


# ---------------------------------------------------------------- nothing seen, wrong arguments


def test_nothing_seen_is_loud():
    model = nn.Linear(4, 4)
    expected = pytest.warns(RuntimeWarning, match="saw no attention call")
    with expected as warned, levelhead.torch.watch(model) as seen:
        model(randn(2, 4))
    assert warned[0].filename == __file__
    assert seen.summary() == "no attention call was seen"
    assert seen.health == {} and seen.calls == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_scripted_module_cannot_be_looked_into():
    class Plain(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    scripted = torch.jit.script(Plain())
    expected = pytest.warns(RuntimeWarning, match="not a scripted or exported module")
    with expected, levelhead.torch.watch(scripted):
        scripted(randn(2, 4, 11, 8))


def test_calls_on_another_thread_are_reported():
    model = Stack()
    expected = pytest.warns(RuntimeWarning, match="on the thread that opened it")
    with expected, levelhead.torch.watch(model):
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()


def test_no_warning_when_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with levelhead.torch.watch(model := Stack(), every=5), torch.no_grad():
            model(X)
            model(X)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"every": 0}, ValueError, "every: expected an integer of at least 1, got 0"),
        ({"every": 1.5}, ValueError, "every: expected an integer of at least 1, got 1.5"),
        ({"every": True}, ValueError, "every: expected an integer of at least 1, got True"),
        ({"thresholds": {"explode": 3}}, TypeError, "unknown threshold 'explode'; there are: "),
        ({"thresholds": {"sink": None}}, TypeError, "threshold sink: expected a number, got None"),
        ({"thresholds": {"sink": np.nan}}, ValueError, "threshold sink: expected a number"),
    ],
)
def test_wrong_options(options, error, said):
    with pytest.raises(error, match=said):
        levelhead.torch.watch(Stack(), **options)


def test_wrong_model():
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got function"):
        levelhead.torch.watch(lambda x: x)


# ---------------------------------------------------------------- what it hands out


def test_heads_that_change_in_number_are_kept_apart():
    class Turns(nn.Module):
        def forward(self, x, heads):
            q = x.unflatten(-1, (heads, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q)

    model = Turns()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        for heads in (4, 2, 4, 2, 1):
            model(X, heads)
    assert {name: health.shape for name, health in seen.health.items()} == {
        "": (4,),
        "(2 heads)": (2,),
        "(1 head)": (1,),
    }
    assert (seen.health["(2 heads)"].rows == 2 * 26).all()


def test_without_gradient_health():
    model = Stack()
    with levelhead.torch.watch(model, gradients=False) as seen:
        model(X).sum().backward()
    assert seen.gradients == {} and seen.calls == 2


def test_a_shared_layer_is_one():
    model = Stack(layers=1)
    model.layers.append(model.layers[0])
    with levelhead.torch.watch(model) as seen:
        model(X)
    assert list(seen.health) == ["layers.0"]
    assert (seen.health["layers.0"].rows == 2 * 26).all()


def test_summary():
    model = lively(Stack(), size=0.05)
    with torch.no_grad():
        model.layers[1].qkv.weight[8:16] *= 20_000  # the second head's queries
    with levelhead.torch.watch(model) as seen:
        model(X).sum().backward()
    text = seen.summary()
    assert text.startswith("2 attention calls, 2 layers, 8 heads\n")
    lines = text.splitlines()
    assert lines[1].split()[0] == "layers.0" and "gradient survival" in lines[1]
    assert "head 1: exploding" in lines[2]
    assert "At step 0: 1 of 8 heads needs attention: 1 exploding." in lines
    assert "layers.1, head 1: exploding (error); the largest |score| is" in text
    assert "What to do: tame the scores" in text
    lenient = {"saturated": 2, "collapsed": 0, "exploding": 1e9, "exploding_critical": 1e9}
    with levelhead.torch.watch(model, thresholds=lenient) as seen:
        model(X)
    assert "At step 0: no problems found in 8 heads. 6 of 8 heads give every key" in seen.summary()
    assert not seen.alerts


class Loud(nn.Module):
    """One head, whose largest score is as asked."""

    def forward(self, size):
        q = torch.eye(16)[None, None] * size**0.5
        return F.scaled_dot_product_attention(q, q, q, scale=1.0)


class Louder(nn.Module):
    """One layer per size."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(Loud() for _ in sizes)

    def forward(self):
        for layer, size in zip(self.layers, self.sizes, strict=True):
            layer(size)


def test_the_summary_speaks_of_the_last_step():
    model = Louder(1.0)
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        for size in (5_000.0, 5_000.0, 1.0):
            model.sizes = [size]
            model()
        assert "At step 2: no problems found in 1 head." in seen.summary()
        assert seen.health["layers.0"].verdicts()[0].verdict == "exploding"  # over all steps
        model.sizes = [6_000.0]
        model()
    assert "At step 3: 1 of 1 head needs attention: 1 exploding." in seen.summary()


def test_the_summary_is_worst_first():
    model = Louder(1_500.0, 20_000.0, 3_000.0, 50_000.0, 2_000.0, 200_000.0, 1.0)
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        model()
    lines = seen.summary().splitlines()
    named = [line.split(",")[0] for line in lines if "; the largest |score| is" in line]
    assert named == [f"layers.{place}" for place in (5, 3, 1, 2, 4)]
    assert lines[-1] == "and 1 more; report() shows them all"
    (alert,) = seen.alerts
    assert (alert.layer, alert.heads) == (named[0], 6)


def test_the_newest_step_is_reported_though_the_history_thins_out(monkeypatch):
    monkeypatch.setattr("levelhead.torch.watching._watch._HISTORY", 4)
    model = Louder(1.0)
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        for step in range(22):
            model.sizes = [5_000.0 if step == 21 else 1.0]
            model()
    assert seen._history[-1].step < 21
    assert "At step 21: 1 of 1 head needs attention: 1 exploding." in seen.summary()
    assert seen._run().steps[-1] == 21


def test_one_verdict_whoever_says_it(tmp_path):
    """With thresholds of one's own: alerts, summary, store, sinks and pages agree."""
    model, records = lively(Stack(), size=0.2), []
    strict, path = {"exploding": 2}, tmp_path / "run.db"
    with (
        JsonLines(tmp_path / "run.jsonl") as lines,
        levelhead.torch.watch(
            model, store=path, sinks=[lines, records.append], thresholds=strict
        ) as seen,
    ):
        model(X).sum().backward()
    said = [
        [
            (v.verdict, v.level)
            for v in sorted(seen.health[layer].verdicts(**strict), key=lambda v: v.head)
        ]
        for layer in seen.health
    ]
    assert ("exploding", "error") in said[0] + said[1]
    assert Thresholds().changed(strict) == read_run(path).thresholds == seen._run().thresholds
    for run in (read_run(path), seen._run()):
        data = run_data(run)
        letters = [[(VERDICTS[v].letter, MARKS[level]) for v, level in layer] for layer in said]
        assert letters == [
            list(zip("".join(part["verdicts"]), "".join(part["levels"]), strict=True))
            for part in unpacked(data)
        ]
        assert 2.0 in [guide["at"] for guide in data["guides"]["largest_score"]]
        ill = sum(level == "error" for layer in said for _, level in layer)
        verb = "needs" if ill == 1 else "need"
        assert f"At step 0: {ill} of 8 heads {verb} attention: {ill} exploding." == data["headline"]
    assert data["headline"] in seen.summary()
    (alert,) = seen.alerts
    assert (alert.verdict, alert.level, alert.heads) == ("exploding", "error", ill)
    assert read_run(path).alerts == [alert]
    (group,) = data["alerts"]
    assert (group["verdict"], group["hint"]) == (alert.verdict, alert.hint)
    line = json.loads((tmp_path / "run.jsonl").read_text())
    assert [[(h["verdict"], h["level"]) for h in part["heads"]] for part in line["layers"]] == said
    assert [list(zip(j.names, j.levels, strict=True)) for j in records[0].judged.values()] == said


def test_a_report_writes_no_database(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a database was opened")

    model = Stack()
    with levelhead.torch.watch(model) as seen:
        model(X).sum().backward()
    monkeypatch.setattr("sqlite3.connect", refuse)
    seen.report(tmp_path / "page.html")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_gradient_survival_is_on_the_page(tmp_path):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with levelhead.torch.watch(model, store=tmp_path / "run.db") as seen:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
    for run in (read_run(tmp_path / "run.db"), seen._run()):
        data = run_data(run)
        for layer, numbers in zip(data["layers"], unpacked(data), strict=True):
            _, survival = run.series(layer["name"], "survival")
            np.testing.assert_allclose(numbers["series"]["survival"].T, survival, rtol=3e-4)
            assert (survival > 0).all() and (survival < 1).all()


def test_what_a_watch_shows_of_itself():
    model = Stack()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        assert repr(seen) == "<watch of Stack: on, step 0, 0 calls, 0 layers, 0 heads, 0 alerts>"
        model(X)
    assert repr(seen) == "<watch of Stack: off, step 1, 2 calls, 2 layers, 8 heads, 0 alerts>"
    assert repr(seen._run()) == (
        "<Run: a run of Stack, 1 step (0 to 0), 2 layers, 0 alerts, ended>"
    )


def test_report_of_a_step_that_is_not_over(tmp_path):
    model = Stack()
    with levelhead.torch.watch(model) as seen:
        model(X)
        seen.report(tmp_path / "now.html")
        assert seen.calls == 2
        model(X)
    assert (seen.health["layers.0"].rows == 2 * 26).all()
    seen.report(tmp_path / "end.html")
    assert all("layers.0" in (tmp_path / name).read_text() for name in ("now.html", "end.html"))


def test_the_history_thins_out(monkeypatch):
    monkeypatch.setattr("levelhead.torch.watching._watch._HISTORY", 8 * 10)
    model = Stack()
    watch, records = watching(model)
    with watch, torch.no_grad():
        for _ in range(50):
            model(X)
    kept = [record.step for record in watch._history]
    assert len(records) == 50 and len(kept) <= 10
    assert kept[0] == 0 and kept[-1] >= 40 and len(set(np.diff(kept))) == 1


# ---------------------------------------------------------------- where it goes


def test_store_and_sinks(tmp_path):
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    path, lines = tmp_path / "run.db", JsonLines(tmp_path / "run.jsonl")
    with levelhead.torch.watch(model, every=2, store=path, sinks=[lines]) as seen:
        for _ in range(4):
            model(X).sum().backward()
            optimizer.step()
        assert read_run(path).steps == [0, 2]  # to be read while it is written
    lines.close()
    run = read_run(path)
    assert (run.model, run.layers) == ("Stack", ["layers.0", "layers.1"])
    assert run.total() == seen.health
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) >= 2
    with Store(path, name="second") as store:
        with levelhead.torch.watch(model, store=store), torch.no_grad():
            model(X)
        with levelhead.torch.watch(model, store=store), torch.no_grad():  # it is still open
            model(X)
    assert read_run(path).name == "second"


def test_a_store_that_cannot_be_opened_says_so_before_anything(tmp_path):
    model = Stack()
    (tmp_path / "no.db").write_text("not a database")
    with pytest.raises(StoreError), levelhead.torch.watch(model, store=tmp_path / "no.db"):
        pytest.fail("it went on")
    assert modes() == 0 and not model._forward_hooks
