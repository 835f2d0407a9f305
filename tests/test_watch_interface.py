"""What a watch takes, what it says and hands out, and where that goes."""

import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import (
    Stack,
    lively,
    modes,
    randn,
    watching,
)

import levelhead.torch
from levelhead.store import JsonLines, Store, StoreError, read_run

X = randn(2, 13, 32)


# ---------------------------------------------------------------- nothing seen, wrong arguments


def test_nothing_seen_is_loud():
    model = nn.Linear(4, 4)
    expected = pytest.warns(RuntimeWarning, match="saw no attention call")
    with expected as told, levelhead.torch.watch(model) as seen:
        model(randn(2, 4))
    assert told[0].filename == __file__
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


def test_calls_on_another_thread_are_told_of():
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
        for heads in (4, 2, 4, 2):
            model(X, heads)
    assert {name: health.shape for name, health in seen.health.items()} == {
        "": (4,),
        "(2 heads)": (2,),
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
        model.layers[1].qkv.weight[8:16] *= 2_000  # the second head's queries
    with levelhead.torch.watch(model) as seen:
        model(X).sum().backward()
    text = seen.summary()
    assert text.startswith("2 attention calls, 2 layers, 8 heads\n")
    lines = text.splitlines()
    assert lines[1].split()[0] == "layers.0" and "gradient survival" in lines[1]
    assert "head 1: exploding" in lines[2]
    assert "layers.1, head 1: exploding. the largest |score| is" in text
    assert "What to do: tame the scores" in text
    lenient = {"saturated": 2, "collapsed": 0} | dict.fromkeys(
        ("exploding_warning", "exploding", "exploding_critical"), 1e9
    )
    with levelhead.torch.watch(model, thresholds=lenient) as seen:
        model(X)
    assert "No head needs attention." in seen.summary() and not seen.alerts


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
    monkeypatch.setattr("levelhead.torch._watch._HISTORY", 8 * 10)
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
