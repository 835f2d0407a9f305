"""Scalars beside the health: which step they belong to, what they may be, what is told."""

import logging
import math

import numpy as np
import pytest
import torch
from watch_support import Stack, lively, randn, watching

import levelhead.torch

X = randn(2, 13, 32)


class Parts(torch.nn.Module):
    """Only a part of it is ever called: its own forward is never seen."""

    def __init__(self):
        super().__init__()
        self.net = Stack()


def model_and_optimizer(kind=Stack):
    model = lively(kind(), size=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def update(model, optimizer):
    net = getattr(model, "net", model)
    loss = net(X).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(steps, *, before=None, after=None, kind=Stack, **options):
    """Train and log; before, after: (watch, step) → None, around the optimizer's step."""
    model, optimizer = model_and_optimizer(kind)
    net = getattr(model, "net", model)
    watch, records = watching(model, **options)
    with watch:
        for step in range(steps):
            net(X).square().mean().backward()
            if before:
                before(watch, step)
            optimizer.step()
            if after:
                after(watch, step)
    return watch, records


def kept(watch):
    """{step: scalars} as a report sees them."""
    return {record.step: record.scalars for record in watch._history}


def messages(caplog):
    return [entry.getMessage() for entry in caplog.records]


# ---------------------------------------------------------------- which step


@pytest.mark.parametrize("kind", [Stack, Parts])
@pytest.mark.parametrize("every", [1, 3])
def test_before_the_end_of_a_step_it_is_that_steps(kind, every, caplog):
    watch, records = train(
        8, before=lambda watch, step: watch.log(loss=10.0 + step), kind=kind, every=every
    )
    assert [record.scalars for record in records] == [
        {"loss": 10.0 + step} for step in range(0, 8, every)
    ]
    assert kept(watch) == {record.step: record.scalars for record in records}
    assert messages(caplog) == []


@pytest.mark.parametrize("kind", [Stack, Parts])
@pytest.mark.parametrize("every", [1, 3])
def test_after_the_end_of_a_step_it_is_still_that_steps(kind, every, caplog):
    watch, records = train(
        8, after=lambda watch, step: watch.log(loss=10.0 + step), kind=kind, every=every
    )
    assert kept(watch) == {step: {"loss": 10.0 + step} for step in range(0, 8, every)}
    assert all(record.scalars == {} for record in records)  # handed on before it was known
    assert messages(caplog) == []


def test_a_compiled_models_steps_begin_unseen():
    """Between recorded steps no hook of it runs, so each log looks as if it came between steps."""
    model, optimizer = model_and_optimizer()
    watch, records = watching(model, every=3)
    with watch:
        for step in range(7):
            model.forward(X).square().mean().backward()
            watch.log(loss=10.0 + step)
            optimizer.step()
    assert [record.scalars["loss"] for record in records] == [10, 13, 16]
    assert [record.means["loss"] for record in records] == [10, 12, 15]


def test_sinks_with_a_log_are_told_of_what_came_late():
    class Sink(list):
        def __call__(self, record):
            self.append((record.step, dict(record.scalars)))

        def log(self, step, scalars, phase):
            self.append((step, scalars, phase))

    def after(watch, step):
        watch.log(loss=float(step), lr=0.1)
        watch.log(extra=1)

    model, optimizer = model_and_optimizer()
    sink = Sink()
    with levelhead.torch.watch(model, every=2, sinks=[sink]) as watch:
        for step in range(3):
            update(model, optimizer)
            after(watch, step)
    assert sink == [
        (0, {}),
        (0, {"loss": 0.0, "lr": 0.1}, "training"),
        (0, {"extra": 1.0}, "training"),
        (2, {}),
        (2, {"loss": 2.0, "lr": 0.1}, "training"),
        (2, {"extra": 1.0}, "training"),
    ]


def test_a_sink_whose_log_fails_stops_nothing(caplog):
    class Sink:
        def __call__(self, record):
            pass

        def log(self, values):  # of another kind
            raise AssertionError

    model, optimizer = model_and_optimizer()
    with levelhead.torch.watch(model, sinks=[Sink()]) as watch:
        for _ in range(3):
            update(model, optimizer)
            watch.log(loss=1.0)
    (said,) = messages(caplog)
    assert "failed at step 0; the watch goes on" in said


def test_evaluation_after_a_step_is_logged_with_it():
    """Its forward is no part of any step, so the step that ended is still the latest."""
    model, optimizer = model_and_optimizer()
    watch, _ = watching(model)
    with watch:
        for step in range(3):
            update(model, optimizer)
            with torch.no_grad():
                model(X)
            watch.log(val_loss=step)
    assert kept(watch) == {step: {"val_loss": step} for step in range(3)}


def test_steps_that_end_by_hand():
    model = lively(Stack(), size=0.1)
    watch, records = watching(model)
    with watch:
        for step in range(3):
            model(X).square().mean().backward()
            watch.log(loss=step)
            watch.step()
            watch.log(after=step)
    assert [record.scalars for record in records] == [{"loss": step} for step in range(3)]
    assert kept(watch)[1] == {"loss": 1, "after": 1}


def test_an_optimizer_in_backward():
    model = lively(Stack(), size=0.1)
    parameters = list(model.parameters())
    optimizers = {p: torch.optim.SGD([p], lr=1e-4) for p in parameters}
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    watch, records = watching(model)
    with watch:
        for step in range(3):
            loss = model(X).square().mean()
            watch.log(before=step)
            loss.backward()
            watch.log(after=step)
    assert [record.step for record in records] == [0, 1, 2]
    assert kept(watch) == {step: {"before": step, "after": step} for step in range(3)}


def test_inference_has_its_scalars_too():
    model = lively(Stack(), size=0.1)
    watch, records = watching(model, every=2)
    with watch, torch.no_grad():
        for step in range(4):
            model(X)
            watch.log(loss=step)
    assert [record.phase for record in records] == ["inference"] * 2
    assert kept(watch) == {0: {"loss": 0}, 2: {"loss": 2}}


def test_what_came_before_training_stays_out_of_its_means():
    model, optimizer = model_and_optimizer()
    watch, records = watching(model)
    with watch:
        for _ in range(2):
            with torch.no_grad():
                model(X)
            watch.log(loss=100)
        loss = model(X).square().mean()
        watch.log(loss=1)
        loss.backward()
        optimizer.step()
    assert [record.phase for record in records] == ["inference", "inference", "training"]
    assert (records[-1].scalars, records[-1].means) == ({"loss": 1}, {"loss": 1})


def test_a_step_that_is_not_over_shows_what_was_logged():
    model, _ = model_and_optimizer()
    watch, records = watching(model)
    with watch:
        model(X)
        watch.log(loss=3)
        assert watch._steps.open_record().scalars == {"loss": 3}
    assert records[-1].scalars == {"loss": 3}


def test_a_second_block_begins_anew(caplog):
    model, optimizer = model_and_optimizer()
    watch, records = watching(model)
    watch.log(loss=1)
    with watch:
        update(model, optimizer)
    watch.log(loss=2)
    with watch:
        watch.log(loss=3)
        update(model, optimizer)
    assert [record.scalars for record in records] == [{}, {"loss": 3}]
    assert messages(caplog) == ["watch.log: called while the watch is off; it is left out"]


# ---------------------------------------------------------------- twice, and now and then


def test_of_several_values_in_a_step_the_last_counts(caplog):
    def thrice(watch, step):
        for part in range(3):
            watch.log(loss=10 * step + part)

    _, records = train(2, before=thrice)
    assert [record.scalars["loss"] for record in records] == [2, 12]
    assert [record.means["loss"] for record in records] == [2, 12]
    (said,) = messages(caplog)
    assert said.startswith("watch.log: loss came more than once in a step; the last value counts.")


def test_before_and_after_the_end_of_a_step_is_twice(caplog):
    """As with accumulated gradients, where the last batch logs after the optimizer."""
    watch, _ = train(
        3,
        before=lambda watch, step: watch.log(loss=step),
        after=lambda watch, step: watch.log(loss=10 + step),
    )
    assert kept(watch) == {0: {"loss": 10}, 1: {"loss": 11}, 2: {"loss": 2}}  # no further step
    assert len(messages(caplog)) == 1


def test_a_second_value_after_the_end_shifts_none(caplog):
    def after(watch, step):
        for part in range(1 + (step == 0)):
            watch.log(loss=10 * step + part)

    watch, _ = train(4, after=after)
    assert kept(watch) == {0: {"loss": 1}, 1: {"loss": 10}, 2: {"loss": 20}, 3: {"loss": 30}}
    assert len(messages(caplog)) == 1


def test_a_name_may_be_missing():
    def before(watch, step):
        if step % 2:
            watch.log(odd=step)

    _, records = train(5, before=before)
    assert [record.scalars for record in records] == [{}, {"odd": 1}, {}, {"odd": 3}, {}]


# ---------------------------------------------------------------- means


def test_means_are_of_all_steps_since_the_last_recorded_one():
    def before(watch, step):
        watch.log(loss=step)
        if step in (1, 3):
            watch.log(seldom=step)

    _, records = train(7, before=before, every=3)
    assert [record.means["loss"] for record in records] == [0, 2, 5]  # of 0; 1, 2, 3; 4, 5, 6
    assert [record.means.get("seldom") for record in records] == [None, 2, None]
    assert [record.scalars.get("seldom") for record in records] == [None, 3, None]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_step_that_overflows_spoils_no_mean(kind):
    values = [1.0, 2.0, math.inf, 4.0, math.nan, math.nan, -math.inf, 5.0, math.nan, math.nan]
    _, records = train(10, before=lambda watch, step: watch.log(loss=kind(values[step])), every=3)
    assert [record.means["loss"] for record in records[:2]] == [1, 3]
    assert records[2].means["loss"] == -math.inf  # of steps 4 to 6, the last: there is no number
    assert records[3].means["loss"] == 5 and math.isnan(records[3].scalars["loss"])


def test_sums_have_more_digits_than_half_precision():
    def before(watch, step):  # in bfloat16, 256 + 1 is 256
        watch.log(loss=torch.tensor(256.0 if step % 3 == 1 else 1.0, dtype=torch.bfloat16))

    _, records = train(4, before=before, every=3)
    assert [record.means["loss"] for record in records] == [1, 86]


def test_a_late_value_is_in_the_next_mean():
    """Its own was out already; so each value is in one."""
    _, records = train(5, after=lambda watch, step: watch.log(loss=step), every=2)
    assert [record.means.get("loss") for record in records] == [None, 0.5, 2.5]


def test_means_of_values_of_several_kinds():
    values = [1, torch.tensor(2), np.float32(3), torch.tensor([[True]]), torch.tensor(3.0).double()]
    _, records = train(5, before=lambda watch, step: watch.log(loss=values[step]), every=4)
    assert [record.means["loss"] for record in records] == [1, 9 / 4]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "value",
    [
        *(2, 2.0, np.float32(2), np.int64(2), np.array(2.0)),
        *(torch.tensor(2.0), torch.tensor([[2]]), torch.tensor(2.0, requires_grad=True)),
        *(torch.tensor(2, dtype=dtype) for dtype in (torch.float16, torch.float64, torch.uint8)),
    ],
    ids=repr,
)
def test_numbers_of_every_kind(value, caplog):
    _, records = train(2, before=lambda watch, step: watch.log(loss=value))
    for record in records:
        assert record.scalars == record.means == {"loss": 2.0}
        assert type(record.scalars["loss"]) is float
    assert messages(caplog) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_whatever_number_it_is_it_is_kept(value, kind):
    _, records = train(1, before=lambda watch, step: watch.log(loss=kind(value)))
    np.testing.assert_array_equal(records[0].scalars["loss"], value)
    np.testing.assert_array_equal(records[0].means["loss"], value)


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (None, "None"),
        ("0.5", "'0.5'"),
        (b"1", "b'1'"),
        (1j, "1j"),
        (np.complex64(1), "np.complex64(1+0j)"),
        (np.array("1.5"), "array('1.5', dtype='<U3')"),
        (np.ones(2), "array([1., 1.])"),
        ([1.0], "[1.0]"),
        (10**400, "1" + "0" * 96 + "..."),
        (torch.ones(2, 3), "a tensor of shape (2, 3), float32 on cpu"),
        (torch.ones(0), "a tensor of shape (0,), float32 on cpu"),
        (torch.tensor(1j), "a tensor of shape (), complex64 on cpu"),
        (torch.ones((), device="meta"), "a tensor of shape (), float32 on meta"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_number_is_told_of_once_and_left_out(value, came, caplog):
    def before(watch, step):
        watch.log(loss=value, other=1)

    _, records = train(3, before=before)
    assert [record.scalars for record in records] == [{"other": 1}] * 3
    assert messages(caplog) == [
        f"watch.log: loss: expected a number, or a tensor with one element, got {came}; left out"
    ]


def test_a_tensor_that_cannot_be_read_is_left_out(caplog):
    class Broken(torch.Tensor):
        def __float__(self):
            raise RuntimeError("no value here")

    value = torch.ones(()).as_subclass(Broken)
    _, records = train(2, before=lambda watch, step: watch.log(loss=value))
    assert [record.scalars for record in records] == [{}, {}]
    assert len(messages(caplog)) == 1


def test_a_tensor_may_be_written_over_afterwards():
    running = torch.zeros(())

    def before(watch, step):
        running.fill_(step)
        watch.log(loss=running)
        running.zero_()

    _, records = train(3, before=before, every=2)
    assert [record.scalars["loss"] for record in records] == [0, 2]
    assert [record.means["loss"] for record in records] == [0, 1.5]


def test_no_graph_is_kept_alive():
    model, optimizer = model_and_optimizer()
    watch, _ = watching(model, every=100)
    with watch:
        for _ in range(3):
            loss = model(X).square().mean()
            watch.log(loss=loss)
            loss.backward()
            optimizer.step()
            total, _ = watch._steps.scalars._sums.get("loss", (torch.zeros(()), 0))
            assert not total.requires_grad


def test_tensors_are_read_on_recorded_steps_only(monkeypatch):
    """To read one from another device is to wait for it."""
    read = []
    item, to_float = torch.Tensor.item, torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "item", lambda t: (read.append(t), item(t))[1])
    monkeypatch.setattr(torch.Tensor, "__float__", lambda t: (read.append(t), to_float(t))[1])
    reads = []

    def log(watch, step):
        watch.log(loss=torch.tensor(float(step)))
        reads.append(len(read))

    train(9, before=log, every=4, gradients=False)
    counts = np.diff([*reads, len(read)])
    assert counts[[0, 4, 8]].min() >= 2  # the value, and the mean
    assert counts[[1, 2, 3, 5, 6, 7]].max() == 0
    reads.clear()
    train(9, after=log, every=4, gradients=False)
    counts = np.diff(reads)
    assert counts[[0, 1, 2, 4, 5, 6]].max() == 0


def test_any_name_will_do():
    names = {"self": 1, "scalars": 2, "val/loss": 3, "Δ": 4}
    _, records = train(1, before=lambda watch, step: watch.log(**names))
    assert records[0].scalars == names


# ---------------------------------------------------------------- nothing logged


def test_it_is_said_once_that_no_loss_was_logged(caplog):
    said = "No loss was logged: alarms are surer with watch.log(loss=loss) at every step."
    with caplog.at_level(logging.INFO, "levelhead"):
        watch, _ = train(45, every=2)
        assert messages(caplog) == [said]
        assert caplog.records[0].levelname == "INFO"
        assert watch.summary().splitlines()[-1] == said
        caplog.clear()
        for options in ({"before": lambda watch, step: watch.log(loss=1)}, {"every": 3}):
            watch, _ = train(45, **options)
            assert said not in watch.summary()
        assert messages(caplog) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_it_is_said_that_a_loss_never_was_a_number(caplog, loss):
    with caplog.at_level(logging.INFO, "levelhead"):
        watch, _ = train(45, before=lambda watch, step: watch.log(loss=loss, rate=1.0))
    said = "The loss that was logged was never a finite number: alarms are less sure without it."
    assert watch.summary().splitlines()[-1] == said and messages(caplog).count(said) == 1
    watch, _ = train(45, before=lambda watch, step: watch.log(loss=loss if step < 9 else 1.0))
    assert "loss" not in watch.summary().splitlines()[-1]


def test_it_is_said_that_the_loss_is_not_logged_any_more(caplog):
    said = "No loss was logged lately: alarms are surer with watch.log(loss=loss) at every step."

    def at_first(watch, step):
        if step < 30:
            watch.log(loss=1.0)

    with caplog.at_level(logging.INFO, "levelhead"):
        watch, _ = train(150, before=at_first)
    assert watch.summary().splitlines()[-1] == said and messages(caplog) == [said]


def test_inference_needs_no_loss():
    model = Stack()
    with levelhead.torch.watch(model) as watch, torch.no_grad():
        for _ in range(30):
            model(X)
    assert "loss" not in watch.summary()
