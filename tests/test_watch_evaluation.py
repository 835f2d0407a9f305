"""Evaluation between the steps of training is left out, and no part of training is taken for it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from watch_support import (
    PARTS,
    WITHOUT,
    Attention,
    Stack,
    Wrapper,
    lively,
    no_grad,
    randn,
    update,
    watching,
)

import levelhead.torch

X = randn(2, 13, 32)
ROWS = 26
MANY = randn(5, 13, 32)  # a batch of evaluation: 65 rows


# ---------------------------------------------------------------- between the steps


@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("evaluate", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("every", [1, 2])
def test_evaluation_of_any_part_is_left_out(without, evaluate, every):
    model = lively(Wrapper(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model, every=every)
    with watch:
        for _ in range(4):
            update(model, model.training_step(X), optimizer)
            for _ in range(2):
                without(lambda: evaluate(model, MANY))
    assert [(record.step, record.phase) for record in records] == [
        (step, "training") for step in range(0, 4, every)
    ]
    for record in records:
        assert list(record.health) == ["net.layers.0", "net.layers.1"]
        assert (record.health["net.layers.0"].rows == ROWS).all()
    assert (watch.health["net.layers.1"].rows == ROWS * 4 // every).all()
    assert watch.calls == 8 // every
    assert set(watch.left_out) == {"evaluation"}


@pytest.mark.parametrize("train", [PARTS["all of it"], PARTS["a part"]], ids=["all", "part"])
def test_evaluation_amid_a_step_is_left_out(train):
    """As gradient accumulation with an evaluation between two batches."""
    model = lively(Wrapper(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            train(model, X).square().mean().backward()
            no_grad(lambda: train(model, MANY))
            update(model, train(model, X).square().mean(), optimizer)
    assert [record.step for record in records if record.phase == "training"] == [0, 1, 2]
    assert (watch.health["net.layers.0"].rows == 3 * 2 * ROWS).all()
    assert np.isfinite(watch.gradients["net.layers.0"].survival).all()


def test_a_frozen_model_with_gradients_on_is_training():
    model = Stack()
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.layers[1].parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            update(model, model(X).square().mean(), optimizer)
    assert [record.step for record in records] == [0, 1, 2]
    assert all(list(record.health) == ["layers.0", "layers.1"] for record in records)


def test_a_part_that_the_model_runs_without_gradients_is_left_out():
    """As a frozen tower, or a teacher that the model holds."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.net = Attention(), Attention()

        def forward(self, x):
            with torch.no_grad():
                seen = self.frozen(x)
            return self.net(seen)

    model = Towers()
    with levelhead.torch.watch(model) as seen:
        model(X)  # nothing trains: all of it is seen
    assert list(seen.health) == ["frozen", "net"] and seen.calls == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            update(model, model(X).square().mean(), optimizer)
    assert [(record.step, list(record.health)) for record in records] == [
        (step, ["net"]) for step in range(3)
    ]
    assert watch.left_out == {"evaluation": 3}
    assert watch.before_training.health == {}


# ---------------------------------------------------------------- checkpoints and functions


class Checkpointed(Wrapper):
    reentrant = True

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_checkpoint_is_training_or_evaluation_as_it_is_called(reentrant, mode):
    """In either mode: some fine-tune without dropout, some evaluate with it."""
    model = lively(Checkpointed(), size=0.1)
    model.reentrant = reentrant
    getattr(model, mode)()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            x = X.clone().requires_grad_()
            update(model, model(x).square().mean(), optimizer)
            no_grad(lambda: model(MANY.clone()))
            no_grad(lambda: checkpoint(model.net, MANY, use_reentrant=reentrant))
    assert [record.step for record in records] == [0, 1, 2]
    assert (watch.health["net.layers.0"].rows == 3 * ROWS).all()
    assert list(watch.gradients) == ["net.layers.0", "net.layers.1"]


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, run):
        ctx.save_for_backward(x, weight)
        return run(x) + 0 * weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.zeros_like(ctx.saved_tensors[1]), None


class New(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, run):
        return run(x) + 0 * weight.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.zeros_like(ctx.saved_tensors[1]), None


class Cast(Old):
    """With mixed precision's decorator between."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight, run):
        ctx.save_for_backward(x, weight)
        return run(x) + 0 * weight.sum()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad, torch.zeros_like(ctx.saved_tensors[1]), None


class Nested(Old):
    @staticmethod
    def forward(ctx, x, weight, run):
        ctx.save_for_backward(x, weight)
        return Old.apply(x, weight, run)


@pytest.mark.parametrize("function", [Old, New, Cast, Nested])
def test_an_autograd_function_computes_without_gradients_for_training(function):
    model = lively(Stack(), size=0.1)
    weight = model.layers[0].out.weight
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            x = X.clone().requires_grad_()
            update(model, function.apply(x, weight, model).square().mean(), optimizer)
            frozen = weight.detach() if function is New else weight
            no_grad(lambda w=frozen: function.apply(MANY, w, model))
    assert [record.step for record in records] == [0, 1, 2]
    assert (watch.health["layers.0"].rows == 3 * ROWS).all()
