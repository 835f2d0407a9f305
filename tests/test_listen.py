"""Listening to single calls: their health, scores, weights, and the same calls rescaled."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import Stack, assert_same_health, lively, randn

import levelhead as lh
import levelhead.torch
from levelhead._moved import Moved
from levelhead.torch import _tiled_health
from levelhead.torch.watching import _calls

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


def of_numpy(options):
    return {
        key: value.double().numpy() if key == "sinks" else value.numpy()
        if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name):
    run, options = CALLS[name]
    options = of_numpy(options)
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


# ---------------------------------------------------------------- how far another scale moves it


def moved_by_hand(arrays, options, factor):
    """Weight moved and output changed of each head, from the definitions."""
    p, o, q, changed = (
        x
        for scale in (1.0, factor)
        for result in [
            lh.reference(
                *arrays, **options | {"scale": options["scale"] * scale}, return_weights=True
            )
        ]
        for x in (result.weights, result.output)
    )
    null = [1 - x.sum(-1) if "sinks" in options else 0 for x in (p, q)]
    distance = (np.abs(q - p).sum(-1) + np.abs(null[1] - null[0])) / 2
    visible = np.ones(p.shape, bool)
    if (mask := options.get("mask")) is not None and mask.dtype == bool:
        visible &= mask
    if options.get("causal"):
        visible &= np.tril(np.ones(p.shape[-2:], bool), p.shape[-1] - p.shape[-2])
    choice = visible.sum(-1) > 1
    moved = (distance * choice).sum(-1) / choice.sum(-1)
    return moved, np.linalg.norm(changed - o, axis=(-2, -1)) / np.linalg.norm(o, axis=(-2, -1))


@pytest.mark.parametrize(
    ("tile", "few"),
    [(1 << 22, 1 << 24), (3 * B * HQ * S, 1 << 24), (3 * B * HQ * S, 1)],
    ids=["at once", "in tiles", "in tiles, none kept"],
)
@pytest.mark.parametrize("name", CALLS)
def test_how_far_another_scale_moves_a_call(name, tile, few, monkeypatch):
    monkeypatch.setattr(_tiled_health, "TILE", tile)
    monkeypatch.setattr(_calls, "_FEW_PAIRS", few)
    run, options = CALLS[name]
    (call,) = calls_of(run)
    for factor in (0.3, 4.0):
        moved = call.moved(factor)
        arrays = [x.double().numpy() for x in (Q, K, V)]
        weight, output = moved_by_hand(arrays, of_numpy(options), factor)
        assert moved.weight_moved.shape == (B, HQ) and (weight > 0.05).all()
        np.testing.assert_allclose(moved.weight_moved, weight, 1e-4)
        np.testing.assert_allclose(moved.output_changed, output, 1e-4)
        assert_same_health({"": moved.health}, {"": call.rescaled(factor)})
    nothing = call.moved(1.0)
    np.testing.assert_allclose(nothing.weight_moved, 0, atol=1e-6)
    np.testing.assert_allclose(nothing.output_changed, 0, atol=1e-6)


def test_rows_of_several_calls_count_alike():
    calls = [
        calls_of(lambda n=n: levelhead.torch.attention(Q[:, :, :n], K, V, causal=True))[0]
        for n in (1, L)
    ]
    parts = [call.moved(3.0) for call in calls]
    together = Moved.merge(*parts)
    assert together.health == lh.Health.merge(*(part.health.over_batch() for part in parts))
    rows = [parts[0].sums[..., 0].sum(0), parts[1].sums[..., 0].sum(0)]
    assert rows[0].tolist() == [B] * HQ and rows[1].tolist() == [B * L] * HQ
    mean = [part.weight_moved.mean(0) for part in parts]
    expected = (mean[0] * rows[0] + mean[1] * rows[1]) / (rows[0] + rows[1])
    np.testing.assert_allclose(together.weight_moved, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_do_not_blur_what_moves(dtype):
    """The scores of the other scale may not even fit into them."""
    q, k, v = (x.to(dtype) for x in (30 * Q, 30 * K, V))
    k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
    low = torch.where(MASK, 0.0, torch.finfo(dtype).min).to(dtype)
    factor, arrays = 8.0, [x.double().numpy() for x in (q, k, v)]
    weight, output = moved_by_hand(arrays, {"scale": 1 / 256, "mask": MASK.numpy()}, factor)
    (fused,) = calls_of(lambda: F.scaled_dot_product_attention(q, k, v, low, scale=1 / 256))
    np.testing.assert_allclose(fused.moved(factor).weight_moved, weight, 1e-3, 1e-5)
    np.testing.assert_allclose(fused.moved(factor).output_changed, output, 1e-3, 1e-5)
    # By hand the scores themselves have 16 bits.
    (eager,) = calls_of(lambda: ((q / 256) @ k.mT + low).softmax(-1) @ v)
    np.testing.assert_allclose(eager.moved(factor).weight_moved, weight, atol=0.05)
    assert not eager.moved(1e5).health.nonfinite_rows.any()


def test_a_row_that_breaks_has_lost_its_weight():
    q = Q.clone()
    q[0, 1, 2] = torch.nan
    (call,) = calls_of(lambda: F.scaled_dot_product_attention(q, K, V, enable_gqa=True))
    moved = call.moved(2.0)
    assert np.isfinite(moved.weight_moved).all() and np.isfinite(moved.output_changed).all()
    assert moved.sums[0, 1, 0] == L - 1  # it was broken before
    broken = call.moved(float("inf"))
    assert (broken.weight_moved == 1).all() and np.isnan(broken.output_changed).all()


def test_values_that_stand_elsewhere_are_not_known():
    q, k = (x.transpose(1, 2) for x in (Q, K.repeat_interleave(2, 1)))
    v = V.repeat_interleave(2, 1).transpose(1, 2)

    def run():
        weights = torch.einsum("bihd,bjhd->bihj", q, k).mul(0.5).softmax(-1)
        return torch.einsum("bihj,bjhd->bihd", weights, v)

    (call,) = calls_of(run)
    (other,) = calls_of(lambda: F.scaled_dot_product_attention(Q, K, V, scale=0.5, enable_gqa=True))
    np.testing.assert_allclose(call.moved(3.0).weight_moved, other.moved(3.0).weight_moved, 1e-4)
    assert np.isnan(call.moved(3.0).output_changed).all()


def test_folded_heads_and_letters_have_their_values():
    layer = lively(nn.MultiheadAttention(32, 4, batch_first=True)).eval()
    x = randn(2, 13, 32)
    (folded,) = calls_of(lambda: layer(x, x, x), layer)
    (fused,) = calls_of(lambda: layer(x, x, x, need_weights=False), layer)
    assert (folded.kind, fused.kind) == ("eager", "fused")
    expected = fused.moved(0.2)
    assert (expected.output_changed > 0.05).all()
    np.testing.assert_allclose(folded.moved(0.2).output_changed, expected.output_changed, 1e-4)

    def spelt():
        k, v = (x.repeat_interleave(2, 1) for x in (K, V))
        weights = torch.einsum("bhid,bhjd->bhij", Q, k).mul(0.5).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    (call,) = calls_of(spelt)
    (other,) = calls_of(lambda: F.scaled_dot_product_attention(Q, K, V, scale=0.5, enable_gqa=True))
    np.testing.assert_allclose(call.moved(3).output_changed, other.moved(3).output_changed, 1e-4)


def test_factors_on_queries_and_keys_belong_to_the_scale():
    x = randn(B, L, HQ * D)

    def scaled(on_query, on_key, **options):
        q = x.unflatten(-1, (HQ, D)).transpose(1, 2) * on_query
        k = x.unflatten(-1, (HQ, D)).transpose(1, 2) * on_key
        return F.scaled_dot_product_attention(q, k, k, scale=0.5, **options)

    per_head = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None]
    for on_query, on_key, scale in ((0.3, 1, 0.15), (0.3, 0.1, 0.015), (per_head, 1, 1.25)):
        (call,) = calls_of(lambda q=on_query, k=on_key: scaled(q, k))
        assert call.scale == pytest.approx(scale)
    (grouped,) = calls_of(
        lambda: F.scaled_dot_product_attention(Q * 0.3, K, V, scale=0.5, enable_gqa=True)
    )
    assert grouped.scale == pytest.approx(0.15)
    (folded,) = calls_of(lambda: F.scaled_dot_product_attention(Q[0] * 0.3, Q[0], Q[0], scale=0.5))
    assert folded.scale == pytest.approx(0.15)


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
