"""Tensors on another device than the CPU: PyTorch computes, health comes from tiles beside it.

There is no other device here that computes. CPU tensors are sent down that road instead.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import (
    Stack,
    assert_same_gradients,
    assert_same_health,
    lively,
    oracle,
    randn,
    train_step,
)

import levelhead.torch
from levelhead import _engine
from levelhead.torch import _tiled_health
from levelhead.torch.watching import _intercept


@pytest.fixture
def elsewhere(monkeypatch):
    """Whatever comes is on another device; the engine must not be asked."""

    def fail(*_, **__):
        raise AssertionError("the engine was asked")

    def compute(given, health, weights, listener, lse=False):
        return _tiled_health.attention(given, health, weights, listener, lse)

    monkeypatch.setattr(_intercept, "is_elsewhere", lambda tensor: True)
    monkeypatch.setattr(_intercept, "compute", compute)
    monkeypatch.setattr(_tiled_health, "TILE", 500)  # several tiles a call
    monkeypatch.setattr(_engine, "forward", fail)
    monkeypatch.setattr(_engine, "backward", fail)


def watch(model, run):
    with levelhead.torch.watch(model) as seen:
        step = train_step(model, run)
    return step, seen


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        return levelhead.torch.attention(q, k, v, causal=True, window=7)


MODELS = {
    "function": Stack,
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0),
    "weights": Weights,
    "levelhead": Own,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_by_the_engine(name, request):
    model, x = lively(MODELS[name](), size=0.2), randn(2, 13, 32)
    expected, by_engine = watch(model, lambda m: m(x))
    plain = train_step(model, lambda m: m(x))
    request.getfixturevalue("elsewhere")
    if name == "levelhead":  # PyTorch's own attention, with the window as a mask
        torch.testing.assert_close(expected, plain, rtol=1e-4, atol=1e-4)
        plain = None
    step, seen = watch(model, lambda m: m(x))
    if plain is not None:
        assert torch.equal(step[0], plain[0])  # PyTorch has computed it
        assert all(torch.equal(step[1][name], grad) for name, grad in plain[1].items())
    torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-3)
    assert list(seen.health) == list(by_engine.health) and seen.calls == by_engine.calls
    assert_same_health(seen.health, by_engine.health)
    assert_same_gradients(seen.gradients, by_engine.gradients)


def test_three_dimensions_and_grouped_heads(request):
    q, k, v = randn(6, 10, 8), randn(2, 10, 8, seed=1), randn(2, 10, 8, seed=2)

    def run():
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        with levelhead.torch.watch(nn.Identity()) as seen:
            F.scaled_dot_product_attention(given[0], given[0], given[0]).sum().backward()
            F.scaled_dot_product_attention(
                *(x[None] for x in given), enable_gqa=True
            ).sum().backward()
        return seen

    expected = run()
    request.getfixturevalue("elsewhere")
    seen = run()
    assert seen.calls == 2 and seen.health[""].shape == (6,)
    assert_same_health(seen.health, expected.health)
    assert_same_gradients(seen.gradients, expected.gradients)


def test_dropout_is_pytorchs(elsewhere):
    model, x = lively(Stack(dropout=0.4), size=0.2), randn(2, 13, 32)
    torch.manual_seed(0)
    plain = train_step(model, lambda m: m(x))
    torch.manual_seed(0)
    step, seen = watch(model, lambda m: m(x))
    assert torch.equal(step[0], plain[0])
    torch.manual_seed(0)
    with oracle() as truth:
        train_step(model, lambda m: m(x))
    assert_same_health(seen.health, truth.health())
    assert (seen.gradients["layers.0"].survival > 0).all()  # that of the call without dropout
