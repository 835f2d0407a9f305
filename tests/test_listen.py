"""Listening to single calls: their health, scores, weights, and the same calls rescaled."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import Stack, assert_same_health, lively, randn

import levelhead as lh
import levelhead.torch

B, HQ, HKV, L, S, D = 2, 4, 2, 9, 11, 8
Q, K, V = randn(B, HQ, L, D), randn(B, HKV, S, D, seed=1), randn(B, HKV, S, D, seed=2)
MASK = randn(B, 1, L, S, seed=3) > -0.7
BIAS = randn(HQ, L, S, seed=4)
LOW = torch.finfo(torch.float32).min


def calls_of(run, model=None):
    calls = []
    with levelhead.torch.listen(calls.append, model):
        run()
    return calls


def eager(q, k, v, scale, mask=None, cap=None, sinks=None):
    k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + (torch.where(mask, 0.0, LOW) if mask.dtype is torch.bool else mask)
    if sinks is not None:
        null = sinks[:, None, None].expand(B, HQ, L, 1)
        scores = torch.cat([scores, null], -1)
        scores = scores - scores.max(-1, keepdim=True).values
    return scores.softmax(-1)[..., :S] @ v


SINKS = torch.tensor([-1.0, 0.0, 1.0, 2.0])
CALLS = {
    "sdpa": (
        lambda: F.scaled_dot_product_attention(Q, K, V, scale=0.5, enable_gqa=True),
        {"scale": 0.5},
    ),
    "sdpa, mask": (
        lambda: F.scaled_dot_product_attention(Q, K, V, MASK, scale=0.5, enable_gqa=True),
        {"scale": 0.5, "mask": MASK},
    ),
    "sdpa, dropout": (
        lambda: F.scaled_dot_product_attention(Q, K, V, BIAS, 0.4, scale=0.5, enable_gqa=True),
        {"scale": 0.5, "mask": BIAS},
    ),
    "levelhead": (
        lambda: levelhead.torch.attention(Q, K, V, causal=True, softcap=0.9, sinks=SINKS),
        {"scale": D**-0.5, "causal": True, "softcap": 0.9, "sinks": SINKS},
    ),
    "eager": (lambda: eager(Q, K, V, 0.5), {"scale": 0.5}),
    "eager, mask": (lambda: eager(Q, K, V, 0.5, MASK), {"scale": 0.5, "mask": MASK}),
    "eager, bias": (lambda: eager(Q, K, V, 0.5, BIAS), {"scale": 0.5, "mask": BIAS}),
    "eager, cap": (
        lambda: eager(Q, K, V, 0.5, MASK, 0.9),
        {"scale": 0.5, "mask": MASK, "softcap": 0.9},
    ),
    "eager, sink": (
        lambda: eager(Q, K, V, 0.5, MASK, sinks=SINKS),
        {"scale": 0.5, "mask": MASK, "sinks": SINKS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name):
    run, options = CALLS[name]
    options = {
        key: value.double().numpy() if key == "sinks" else value.numpy()
        if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }  # fmt: skip
    arrays = [x.numpy() for x in (Q, K, V)]
    (call,) = calls_of(run)
    assert call.kind == ("eager" if "eager" in name else "fused")
    assert (call.shape, call.dk, call.module) == ((B, HQ, L, S), D, "")
    assert call.scale == pytest.approx(options["scale"])
    truth = lh.reference(*arrays, **options, return_health=True, return_weights=True)
    assert call.health.shape == (B, HQ)
    assert_same_health({"": call.health}, {"": truth.health})

    mask = options.get("mask")
    visible = np.ones((B, HQ, L, S), bool)
    if mask is not None and mask.dtype == bool:
        visible &= mask
    if options.get("causal"):
        visible &= np.tril(np.ones((L, S), bool), S - L)
    keys = np.repeat(arrays[1], HQ // HKV, axis=1)
    scores = np.where(visible, arrays[0] @ keys.swapaxes(-1, -2) * options["scale"], np.nan)
    for entry, head in np.ndindex(B, HQ):
        np.testing.assert_allclose(call.scores(entry, head), scores[entry, head], 1e-5, 1e-6)
        assert call.scores(entry, head).dtype == np.float64
        np.testing.assert_allclose(
            call.weights(entry, head), truth.weights[entry, head], 1e-4, 1e-6
        )
    for factor in (0.3, 4.0):
        other = lh.reference(
            *arrays, **options | {"scale": options["scale"] * factor}, return_health=True
        )
        assert_same_health({"": call.rescaled(factor)}, {"": other.health}, 1e-3, 1e-4)


def test_scales_per_head_are_told_as_their_mean():
    scales = torch.tensor([0.1, 0.2, 0.3, 0.4])
    (call,) = calls_of(lambda: levelhead.torch.attention(Q, K, V, scale=scales))
    assert call.scale == pytest.approx(0.25)
    expected = lh.reference(
        *(x.numpy() for x in (Q, K, V)), scale=2 * scales.numpy(), return_health=True
    ).health
    assert_same_health({"": call.rescaled(2)}, {"": expected})


def test_any_number_of_batch_dimensions():
    for shape in ((L, D), (HQ, L, D), (3, 2, HQ, L, D), (0, HQ, L, D)):
        x = randn(*shape)
        (call,) = calls_of(lambda x=x: F.scaled_dot_product_attention(x, x, x))
        batch = int(np.prod(shape[:-3]))
        heads = shape[-3] if len(shape) > 2 else 1
        assert call.shape == (batch, heads, L, L)
        if batch:
            flat = x.reshape(batch, heads, L, D).numpy()
            expected = (flat @ flat.swapaxes(-1, -2) * D**-0.5)[-1, -1]
            np.testing.assert_allclose(call.scores(batch - 1, heads - 1), expected, 1e-5, 1e-6)


def test_names():
    model = lively(Stack())
    x = randn(2, 13, 32)
    assert [call.module for call in calls_of(lambda: model(x), model)] == ["layers.0", "layers.1"]
    assert [call.module for call in calls_of(lambda: model(x))] == ["Attention"] * 2
    part = model.layers[1]
    assert [call.module for call in calls_of(lambda: model(x), part)] == ["", ""]
    both = nn.Sequential(model, Stack(1))
    assert [call.module for call in calls_of(lambda: both(x), both)] == [
        "0.layers.0", "0.layers.1", "1.layers.0",
    ]  # fmt: skip


def test_gradients_of_a_call():
    found = []

    def ask(call):
        call.on_gradients = found.append

    q = Q.clone().requires_grad_()
    with levelhead.torch.listen(ask):
        output = F.scaled_dot_product_attention(q, K, V, enable_gqa=True)
    g = randn(*output.shape, seed=6)
    output.backward(g)  # outside: the call remembers who asked
    expected = lh.reference_backward(*(x.numpy() for x in (g, Q, K, V)), return_health=True).health
    assert found[0].shape == (B, HQ)
    np.testing.assert_allclose(found[0].survival, expected.survival, 1e-4)
    np.testing.assert_allclose(found[0].weight_grad_norm, expected.weight_grad_norm, 1e-4)


def test_nothing_is_kept_of_a_call_that_nobody_keeps():
    import gc
    import weakref

    q = Q.clone().requires_grad_()
    kept = []
    with levelhead.torch.listen(lambda call: kept.append(weakref.ref(call))):
        output = F.scaled_dot_product_attention(q, K, V, enable_gqa=True)
        eager(q, K, V, 0.5)
    gc.collect()
    assert [ref() for ref in kept] == [None, None] and output.requires_grad


def test_compiled_parts_run_eagerly():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, q, q), backend="eager", fullgraph=True
    )
    assert len(calls_of(lambda: compiled(Q))) == 1
    assert torch._dynamo.eval_frame._stance.stance == "default"
    compiled(Q)
