"""Steps that cannot end are reported, and only those."""

import copy

import pytest
import torch
from torch import nn
from watch_support import (
    Stack,
    lively,
    randn,
    watching,
)

import levelhead.torch

X = randn(2, 13, 32)
ROWS = 26

# Warnings are errors: whatever watches here without `pytest.warns` must say nothing.


def loss(model):
    return model(X).square().mean()


def by_hand(model, write):
    for p in model.parameters():
        write(p)
        p.grad = None


UPDATES = {
    "in place": torch.no_grad()(lambda p: p.sub_(1e-3 * p.grad)),
    "data": lambda p: p.data.add_(p.grad, alpha=-1e-3),
    "new data": lambda p: setattr(p, "data", p.data - 1e-3 * p.grad),
}


# ---------------------------------------------------------------- reported


class Masters:
    """Copies of the parameters, which an optimizer updates, as in mixed precision by hand."""

    def __init__(self, model):
        self.model = model
        self.copies = [p.detach().clone() for p in model.parameters()]
        self.optimizer = torch.optim.SGD(self.copies, lr=1e-4)

    def step(self):
        for mine, p in zip(self.copies, self.model.parameters(), strict=True):
            mine.grad = p.grad
        self.optimizer.step()
        with torch.no_grad():
            for mine, p in zip(self.copies, self.model.parameters(), strict=True):
                p.copy_(mine)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("steps", [2, 7])
def test_an_optimizer_of_other_parameters(gradients, steps):
    model = lively(Stack(), size=0.1)
    masters = Masters(model)
    watch, records = watching(model, every=3, gradients=gradients)
    with pytest.warns(RuntimeWarning) as said, watch:
        for _ in range(steps):
            loss(model).backward()
            masters.step()
    (warning,) = said
    text = str(warning.message)
    assert "the optimizers that stepped (SGD) hold no parameter of the watched Stack" in text
    assert f"its calls before {steps} updates are all one step" in text
    assert "give the watch the model that is trained: the very object" in text
    assert "or call watch.step() after each update" in text
    assert warning.filename == __file__
    assert [record.step for record in records] == [0]
    assert (watch.health["layers.0"].rows == steps * ROWS).all()


def test_it_is_reported_while_a_long_run_goes_on():
    model = lively(Stack(1), size=0.1)
    other = torch.optim.SGD(Stack(1).parameters(), lr=1e-4)
    with levelhead.torch.watch(model, gradients=False):  # nothing more at the end
        for _ in range(99):
            loss(model)
            other.step()
        with pytest.warns(RuntimeWarning, match="its calls before 100 updates are all") as said:
            for _ in range(20):
                loss(model)
                other.step()
    assert len(said) == 1 and said[0].filename == __file__


@pytest.mark.parametrize("write", UPDATES.values(), ids=UPDATES)
def test_updates_without_any_optimizer(write):
    model = lively(Stack(), size=0.1)
    with (
        pytest.warns(RuntimeWarning, match="2 times the watched Stack ran forward and") as said,
        levelhead.torch.watch(model),
    ):
        for _ in range(2):
            loss(model).backward()
            by_hand(model, write)
    assert len(said) == 1
    assert "but no optimizer of it stepped, so all is one step. A step ends" in str(said[0].message)


def test_many_backward_passes_without_any_update():
    model = lively(Stack(), size=0.1)
    with (
        pytest.warns(RuntimeWarning, match="10 times the watched Stack ran forward and backward"),
        levelhead.torch.watch(model),
    ):
        for _ in range(10):
            loss(model).backward()


def test_not_when_it_ends_by_an_error():
    model = lively(Stack(), size=0.1)
    with pytest.raises(KeyboardInterrupt), levelhead.torch.watch(model) as seen:
        for _ in range(20):
            loss(model).backward()
            by_hand(model, UPDATES["data"])
        raise KeyboardInterrupt
    assert seen.calls == 40


# ---------------------------------------------------------------- not reported


@pytest.mark.parametrize("critic_steps", [1, 5])
@pytest.mark.parametrize("detached", [True, False])
def test_two_models_with_an_optimizer_each(critic_steps, detached):
    """As in adversarial training: the other's optimizer steps first, and more often."""
    model, critic = lively(Stack(), size=0.1), lively(Stack(), size=0.1)
    mine = torch.optim.SGD(model.parameters(), lr=1e-4)
    its = torch.optim.SGD(critic.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            for _ in range(critic_steps):
                made = model(X)
                critic(made.detach() if detached else made).mean().backward()
                its.step()
            critic(model(X)).mean().backward()
            mine.step()
    assert [record.step for record in records] == [0, 1, 2]
    assert (watch.health["layers.0"].rows == 3 * (critic_steps + 1) * ROWS).all()


def test_gradient_accumulation():
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(2):
            for _ in range(16):
                loss(model).backward()
            optimizer.step()
    assert [record.step for record in records] == [0, 1]
    with levelhead.torch.watch(model) as seen:  # a look at one step, before its update
        for _ in range(8):
            loss(model).backward()
    assert (seen.health["layers.0"].rows == 8 * ROWS).all()


def test_a_model_that_is_converted_between_backward_passes():
    model = lively(Stack(), size=0.1)
    with levelhead.torch.watch(model) as seen:
        loss(model).backward()
        model.double()
        model(X.double()).square().mean().backward()
    assert seen.calls == 4


def test_inference_while_another_model_trains():
    model, other = Stack(1), Stack(1)
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-4)
    loss(model).backward()  # trained before, with gradients left over
    watch, records = watching(model)
    with watch:
        for _ in range(120):
            with torch.no_grad():
                target = model(X)
            (other(X) - target).square().mean().backward()
            optimizer.step()
    assert [record.step for record in records] == list(range(120))
    assert {record.phase for record in records} == {"inference"}


def test_forwards_with_gradients_and_nothing_else():
    model = Stack()
    loss(model).backward()
    with levelhead.torch.watch(model) as seen:
        for _ in range(30):
            model(X)
    assert (seen.health["layers.0"].rows == 30 * ROWS).all()


def test_parameters_that_are_replaced():
    model = lively(Stack(), size=0.1)
    watch, records = watching(model)
    with watch:
        for layer in model.layers:
            layer.qkv.weight = nn.Parameter(layer.qkv.weight.detach().clone())
            layer.out = nn.Linear(32, 32)
        optimizer = torch.optim.SGD([layer.out.weight for layer in model.layers], lr=1e-4)
        for _ in range(3):
            loss(model).backward()
            optimizer.step()
    assert [record.step for record in records] == [0, 1, 2]


def test_low_rank_adapters_beside_frozen_weights():
    class Adapted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

        def forward(self, x):
            return self.linear(x) + self.up(self.down(x))

    model = lively(Stack(), size=0.1).requires_grad_(False)
    for layer in model.layers:
        layer.out = Adapted(layer.out)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(12):
            loss(model).backward()
            optimizer.step()
    assert len(adapters) == 4 and [record.step for record in records] == list(range(12))


@pytest.mark.parametrize("what", ["a head on top", "a prompt below"])
def test_a_model_with_nothing_to_train_takes_the_steps_of_whoever_trains_around_it(what):
    model = lively(Stack(), size=0.1).requires_grad_(False)
    head, prompt = nn.Linear(32, 1), nn.Parameter(X.clone())
    trained = [prompt] if what == "a prompt below" else head.parameters()
    optimizer = torch.optim.SGD(trained, lr=1e-4)
    watch, records = watching(model, every=2)
    with watch:
        for _ in range(5):
            head(model(prompt)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(X)
    assert [record.step for record in records] == [0, 2, 4]
    assert (watch.health["layers.0"].rows == 3 * ROWS).all()


def test_a_frozen_teacher_is_inference_whoever_trains():
    teacher, student = Stack().requires_grad_(False), Stack()
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-4)
    watch, records = watching(teacher)
    with watch:
        for _ in range(3):
            with torch.no_grad():
                target = teacher(X)
            (student(X) - target).square().mean().backward()
            optimizer.step()
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 0), ("inference", 1), ("inference", 2),
    ]  # fmt: skip


def test_a_scaler_that_skips_steps():
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    watch, records = watching(model)
    with watch:
        for step in range(15):
            factor = float("inf") if step < 12 else 1.0
            scaler.scale(loss(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [record.step for record in records] == [0, 1, 2]
    assert (records[0].health["layers.0"].rows == 13 * ROWS).all()


def test_an_optimizer_of_ones_own_with_steps_by_hand():
    model = lively(Stack(), size=0.1)
    other = torch.optim.SGD(Stack().parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(12):
            loss(model).backward()
            by_hand(model, UPDATES["data"])
            other.step()
            watch.step()
    assert [record.step for record in records] == list(range(12))
    with watch:  # and again
        for _ in range(3):
            loss(model).backward()
            by_hand(model, UPDATES["data"])
            other.step()
            watch.step()
    assert [record.step for record in records] == list(range(15))


def test_an_average_that_is_evaluated_while_the_model_trains():
    model = lively(Stack(), size=0.1)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(average)
    with watch:
        for _ in range(2):
            for _ in range(60):
                loss(model).backward()
                optimizer.step()
            with torch.no_grad():
                average(X)
    assert [(record.phase, record.step) for record in records] == [
        ("inference", 0),
        ("inference", 1),
    ]
