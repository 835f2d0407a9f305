"""Evaluation is no training: neither between its steps nor before the first one."""

import json

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.checkpoint import checkpoint
from watch_support import (
    PARTS,
    Attention,
    Stack,
    Wrapper,
    lively,
    modes,
    no_grad,
    randn,
    update,
    watching,
)

import levelhead.torch
from levelhead.store import JsonLines, TensorBoard, read_run

X = randn(2, 13, 32)
ROWS = 26
MANY = randn(5, 13, 32)  # a batch of evaluation: 65 rows


# ---------------------------------------------------------------- before the first step

BEFORE = {name: PARTS[name] for name in ("all of it", "a part", "a wrapper")}


@pytest.mark.parametrize("sane", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("train", [PARTS["all of it"], PARTS["a part"]], ids=["all", "part"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("checks", [2, 4])
def test_training_begins_at_step_0_whatever_ran_before(sane, train, every, checks):
    """As after Lightning's sanity check, or an evaluation on start."""
    model = lively(Wrapper(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model, every=every)
    with watch:
        for _ in range(checks):
            no_grad(lambda: sane(model, MANY))
        assert watch.calls > 0 and watch.before_training.calls == 0
        on = []
        for _ in range(7):
            update(model, train(model, X).square().mean(), optimizer)
            on.append(modes())
    trained = [record for record in records if record.phase == "training"]
    assert [record.step for record in trained] == list(range(0, 7, every))
    for record in trained:
        assert (record.health["net.layers.0"].rows == ROWS).all()
        assert list(record.gradients) == ["net.layers.0", "net.layers.1"]
    assert (watch.health["net.layers.0"].rows == len(trained) * ROWS).all()
    assert watch.calls == 2 * len(trained)
    assert on == [int((step + 1) % every == 0) for step in range(7)]
    before = [record for record in records if record.phase != "training"]
    assert before == records[: len(before)]
    assert {record.phase for record in before} == {"inference"}
    rows = sum(record.health["net.layers.0"].rows for record in before)
    assert (watch.before_training.health["net.layers.0"].rows == rows).all() and rows.min() >= 65
    assert watch.before_training.calls * 65 == 2 * rows[0]
    assert watch.before_training.gradients == {}


def test_gradients_before_the_first_step_belong_to_it():
    """A batch, an evaluation, another batch, and only then does the optimizer step."""
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model, every=2)
    with watch:
        for _ in range(3):
            no_grad(lambda: model(MANY))
        model(X).square().mean().backward()
        for _ in range(3):
            no_grad(lambda: model(MANY))
        update(model, model(X).square().mean(), optimizer)
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 0), ("inference", 2), ("inference", 4), ("training", 0),
    ]  # fmt: skip
    assert (watch.health["layers.0"].rows == 2 * ROWS).all()
    assert (watch.before_training.health["layers.0"].rows == 3 * 65).all()


def test_what_is_known_of_both_before_training():
    """Without an optimizer nobody knows, and health is that of all calls."""
    model = Stack()
    watch, records = watching(model)
    with watch:
        no_grad(lambda: model(X))
        model(X).square().mean().backward()
        assert (watch.health["layers.0"].rows == 2 * ROWS).all() and watch.calls == 4
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 0),
        ("inference", 1),
    ]
    assert list(records[1].gradients) == list(watch.gradients) == ["layers.0", "layers.1"]
    assert (watch.health["layers.0"].rows == 2 * ROWS).all()
    assert watch.before_training.health == {} and watch.left_out == {}


def test_calls_of_one_module_with_other_heads_in_both():
    class Changing(nn.Module):
        def forward(self, heads):
            q = randn(1, heads, 9, 8).requires_grad_()
            return F.scaled_dot_product_attention(q, q, q)

    model = Changing()
    with levelhead.torch.watch(model) as seen:
        no_grad(lambda: model(4))
        model(2)
    assert {name: health.shape for name, health in seen.health.items()} == {
        "(2 heads)": (2,),
        "": (4,),
    }


def test_alerts_before_training_are_kept_apart():
    class Loud(Stack):
        size = 1.0

        def forward(self, x):
            return super().forward(x * self.size)

    model, alerts = lively(Loud(1), size=0.1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch, records = watching(model, on_alert=alerts.append)
    with watch:
        no_grad(lambda: model(X))
        model.size = 300.0
        no_grad(lambda: model(X))
        assert [(a.step, a.phase) for a in watch.alerts] == [(1, "inference")] * len(alerts)
        early = len(alerts)
        assert early == 1 and str(alerts[0]).startswith("inference, step 1, 4 heads, the worst ")
        model.size = 1.0
        update(model, model(X).square().mean(), optimizer)
        assert watch.alerts == []
        model.size = 300.0
        update(model, model(X).square().mean(), optimizer)
    assert watch.alerts == alerts[early:] == list(records[-1].alerts)
    assert {(alert.step, alert.phase) for alert in watch.alerts} == {(1, "training")}
    assert str(watch.alerts[0]).startswith("step 1, 4 heads, the worst layers.0, head ")
    early_ones = watch.before_training.alerts
    assert {(alert.step, alert.phase) for alert in early_ones} == {(-1, "before training")}
    assert [alert.head for alert in early_ones] == [alert.head for alert in alerts[:early]]


def test_a_head_that_is_bad_before_training_is_reported_again_in_training():
    model = lively(Stack(1), size=0.1)
    model.layers[0].qkv.weight.data *= 300
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch, _ = watching(model)
    with watch:
        no_grad(lambda: model(X))
        update(model, model(X).square().mean(), optimizer)
    assert watch.alerts and {alert.previous for alert in watch.alerts} == {""}
    heads = [alert.head for alert in watch.alerts]
    assert heads == [alert.head for alert in watch.before_training.alerts]


def test_the_page_after_a_sanity_check_is_of_training(tmp_path):
    model = lively(Wrapper(), size=0.1)
    model.seldom_used = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with levelhead.torch.watch(model) as seen:
        no_grad(lambda: (model(MANY), model.seldom_used(MANY), model(MANY)))
        seen.report(tmp_path / "inference.html")
        for _ in range(3):
            update(model, model.training_step(X), optimizer)
    seen.report(tmp_path / "training.html")
    assert "2 steps recorded, 0 to 1" in (tmp_path / "inference.html").read_text()
    page = (tmp_path / "training.html").read_text()
    assert "3 steps recorded, 0 to 2" in page and "seldom_used" not in page
    assert "6 attention calls, 2 layers" in seen.summary()


# ---------------------------------------------------------------- steps by hand


def sgd(model):
    """An optimizer of one's own."""
    with torch.no_grad():
        for p in model.parameters():
            p.data.sub_(1e-4 * p.grad)
            p.grad = None


def test_evaluation_between_steps_by_hand():
    model = lively(Wrapper(), size=0.1)
    watch, records = watching(model, every=2)
    with watch:
        no_grad(lambda: model(MANY))
        for _ in range(4):
            model.training_step(X).backward()
            sgd(model)
            watch.step()
            no_grad(lambda: (model(MANY), model.net(MANY)))
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 0), ("training", 0), ("training", 2),
    ]  # fmt: skip
    assert (watch.health["net.layers.0"].rows == 2 * ROWS).all()
    assert (watch.before_training.health["net.layers.0"].rows == 65).all()


def test_steps_by_hand_beside_an_optimizer():
    """Both mean the same steps, from the first one on."""
    model = lively(Wrapper(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model, every=2)
    with watch:
        for _ in range(5):
            update(model, model.training_step(X), optimizer)
            watch.step()
            no_grad(lambda: model(MANY))
    assert [(record.phase, record.step) for record in records] == [
        ("training", 0), ("training", 2), ("training", 4),
    ]  # fmt: skip
    assert (watch.health["net.layers.0"].rows == 3 * ROWS).all()


def test_inference_by_hand_then_training():
    model = lively(Stack(), size=0.1)
    watch, records = watching(model)
    with watch:
        watch.step()
        for _ in range(2):
            no_grad(lambda: (model(X), model(X)))
            watch.step()
        for _ in range(2):
            model(X).square().mean().backward()
            sgd(model)
            watch.step()
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 1), ("inference", 2), ("training", 0), ("training", 1),
    ]  # fmt: skip
    assert (watch.health["layers.0"].rows == 2 * ROWS).all()
    assert (watch.before_training.health["layers.0"].rows == 4 * ROWS).all()


# ---------------------------------------------------------------- again and again


def test_entering_again_to_evaluate_and_train_on():
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    for _ in range(2):
        with watch:
            no_grad(lambda: model(MANY))
            for _ in range(2):
                update(model, model(X).square().mean(), optimizer)
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 0), ("training", 0), ("training", 1),
        ("inference", 2), ("training", 2), ("training", 3),
    ]  # fmt: skip
    assert (watch.health["layers.0"].rows == 4 * ROWS).all()
    assert (watch.before_training.health["layers.0"].rows == 2 * 65).all()


# ---------------------------------------------------------------- things that go wrong


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("train", [PARTS["all of it"], PARTS["a part"]], ids=["all", "part"])
def test_a_forward_that_fails(error, train):
    model = lively(Wrapper(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    fails = []

    def fail(module, args):
        if fails:
            raise error("half way")

    model.net.layers[1].register_forward_pre_hook(fail)
    watch, records = watching(model)
    with watch:
        for step in range(3):
            fails.append(True)
            for run in (lambda: no_grad(lambda: train(model, MANY)), lambda: train(model, X)):
                with pytest.raises(error, match="half way"):
                    run()
            fails.clear()
            assert torch.is_grad_enabled()
            if step:  # the first time, evaluation would be a step before training
                no_grad(lambda: train(model, MANY))
            update(model, train(model, X).square().mean(), optimizer)
    trained = [record for record in records if record.phase == "training"]
    assert [record.step for record in trained] == [0, 1, 2]
    for record in trained:  # the forward that failed is a part of the step
        assert (record.health["net.layers.0"].rows == 2 * ROWS).all()
        assert (record.health["net.layers.1"].rows == ROWS).all()


# ---------------------------------------------------------------- several optimizers, compile


@pytest.mark.parametrize("every", [1, 4])
def test_parts_with_optimizers_of_their_own(every):
    """Forwards of parts end no step and hold none up."""
    model = lively(Wrapper(), size=0.1)
    one, two = (torch.optim.SGD(layer.parameters(), lr=1e-4) for layer in model.net.layers)
    watch, records = watching(model, every=every)
    with watch:
        for _ in range(3):
            model.training_step(X).backward()
            one.step()
            two.step()
        one = torch.optim.Adam(model.parameters(), lr=1e-4)  # the others are still there
        for _ in range(7):
            update(model, model.training_step(X), one)
    steps = [record.step for record in records]
    assert steps == list(range(0, 9, every)) and watch.calls == (20 if every == 1 else 6)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_parts_with_optimizers_that_step_as_gradients_arrive(every, reentrant):
    model = Wrapper()
    model.head = nn.Linear(32, 1)
    for p in lively(model, size=0.1).parameters():
        optimizer = torch.optim.SGD([p], lr=1e-4)
        p.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    watch, records = watching(model, every=every)
    with watch:
        for _ in range(5):
            x = X.clone().requires_grad_()
            if reentrant is not None:
                for layer in model.net.layers:
                    x = x + checkpoint(layer, x, use_reentrant=reentrant)
            else:
                x = model.net(x)
            model.head(x).square().mean().backward()
    assert [record.step for record in records] == list(range(0, 5, every))
    for record in records:
        assert list(record.gradients) == ["net.layers.0", "net.layers.1"]
        assert (record.health["net.layers.0"].rows == ROWS).all()


@pytest.mark.parametrize("watched", ["inner", "outer"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model_that_is_evaluated_first(watched, fullgraph):
    torch.compiler.reset()
    model = lively(Stack(), size=0.1)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(compiled if watched == "outer" else model, every=2)
    with watch:
        for _ in range(3 if watched == "outer" else 1):
            no_grad(lambda: compiled(MANY))
        for step in range(4):
            if watched == "inner" and step == 0:
                model(X)  # inside a graph nobody can notice that training begins
            update(model, compiled(X).square().mean(), optimizer)
            no_grad(lambda: compiled(MANY))
    assert [record.step for record in records if record.phase == "training"] == [0, 2]
    assert list(watch.health) == list(watch.gradients) == ["layers.0", "layers.1"]


def test_a_model_whose_compiled_form_must_not_break_its_graph():
    torch.compiler.reset()
    model = lively(Stack(), size=0.1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    watch, records = watching(model, every=2)
    with watch, torch.no_grad():
        for _ in range(5):
            compiled(X)
    assert [record.step for record in records] == [0, 2, 4]


def test_an_alert_may_stop_a_training_whose_optimizers_step_in_backward():
    def stop(alert):
        raise SystemError("enough")

    model = lively(Stack(1), size=6.0)
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=1e-4)
        p.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    watch, records = watching(model, on_alert=stop)
    with pytest.raises(SystemError, match="enough"), watch:
        model(X).square().mean().backward()
        pytest.fail("it went on")
    assert len(records) == 1 and len(watch.alerts) > 0


def test_between_steps_of_inference_pytorchs_fast_path_is_left_alone():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model, every=3)
    with watch:
        for _ in range(2):
            no_grad(lambda: model(X))
            assert not any(
                part._forward_pre_hooks for each in model[0].layers for part in each.modules()
            )
        for _ in range(4):
            update(model, model[0](X).square().mean(), optimizer)
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 0), ("training", 0), ("training", 3),
    ]  # fmt: skip
    assert not any(part._forward_pre_hooks for part in model.modules())


# ---------------------------------------------------------------- where it goes


def test_store_and_sinks_keep_what_was_before_training_apart(tmp_path):
    model = lively(Wrapper(), size=0.1)
    model.net.layers[1].qkv.weight.data *= 300
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path / "run.db"
    with (
        JsonLines(tmp_path / "run.jsonl") as lines,
        TensorBoard(tmp_path / "board") as board,
        levelhead.torch.watch(model, store=path, sinks=[lines, board], every=2) as seen,
    ):
        for _ in range(3):
            no_grad(lambda: model(MANY))
        early = read_run(path)
        assert (early.phase, early.steps) == ("inference", [0, 2])
        for _ in range(3):
            update(model, model.training_step(X), optimizer)
        assert (early.steps, len(early.health("net.layers.0"))) == ([0, 2], 2)  # as it was
    run, before = read_run(path), read_run(path, phase="before training")
    assert (run.phase, run.steps) == ("training", [0, 2])
    assert (before.phase, before.steps) == ("before training", [-3, -1])
    assert run.total() == seen.health and run.alerts == seen.alerts
    assert before.total() == seen.before_training.health
    assert before.alerts == seen.before_training.alerts != []
    assert [step for step, _ in before.health("net.layers.0")] == [-3, -1]
    assert read_run(path, phase="inference").steps == []
    written = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["step"]) for line in written] == [
        ("inference", 0), ("inference", 2), ("training", 0), ("training", 2),
    ]  # fmt: skip
    assert {alert["phase"] for alert in written[0]["alerts"]} == {"inference"}
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for tag in ("signal/net.layers.0", "inference/signal/net.layers.0"):
        assert [event.step for event in events.Scalars(tag)] == [0, 2]
