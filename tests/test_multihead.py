"""MultiHeadAttention against the same steps written out with the reference."""

import math

import numpy as np
import pytest

from levelhead._multihead import MultiHeadAttention, _split
from levelhead._reference import reference
from levelhead._result import AttentionResult


def by_hand(layer, x, context=None, **options):
    source = x if context is None else context

    def heads(y, weight, bias, count):
        y = y @ weight + (0 if bias is None else bias)
        return np.moveaxis(y.reshape(*y.shape[:-1], count, layer.d_k), -2, -3)

    out = reference(
        heads(x, layer.w_query, layer.b_query, layer.num_heads),
        heads(source, layer.w_key, layer.b_key, layer.num_kv_heads),
        heads(source, layer.w_value, layer.b_value, layer.num_kv_heads),
        **{"scale": layer.scale, **options},
    )
    out = np.concatenate([out[..., h, :, :] for h in range(layer.num_heads)], axis=-1)
    return out @ layer.w_output + (0 if layer.b_output is None else layer.b_output)


def layer_and_input(dtype=np.float64, lead=(2,), **options):
    layer = MultiHeadAttention(24, 6, dtype=dtype, **options)
    rng = np.random.default_rng(1)
    for name in ("b_query", "b_key", "b_value", "b_output"):  # zeros would hide a mistake
        if getattr(layer, name) is not None:
            getattr(layer, name)[:] = rng.standard_normal(getattr(layer, name).shape)
    return layer, rng.standard_normal((*lead, 7, 24)).astype(dtype)


@pytest.mark.parametrize("kv_heads", [None, 3, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_self_attention(kv_heads, bias, lead):
    layer, x = layer_and_input(num_kv_heads=kv_heads, bias=bias, lead=lead)
    out = layer(x, causal=True)
    assert out.shape == x.shape
    np.testing.assert_allclose(out, by_hand(layer, x, causal=True), rtol=1e-9, atol=1e-12)


def test_heads_are_views_of_the_projection():
    projected = np.arange(2 * 5 * 12.0).reshape(2, 5, 12)
    heads = _split(projected, 3)
    assert heads.shape == (2, 3, 5, 4) and np.shares_memory(heads, projected)
    np.testing.assert_array_equal(heads[1, 2, 3], projected[1, 3, 8:12])


def test_cross_attention_with_a_context_of_another_width():
    layer, x = layer_and_input(d_key=10, num_kv_heads=2)
    context = np.random.default_rng(2).standard_normal((2, 11, 10))
    np.testing.assert_allclose(layer(x, context), by_hand(layer, x, context), rtol=1e-9, atol=1e-12)


def test_results_carry_the_projected_output():
    layer, x = layer_and_input()
    r = layer(x, return_lse=True, return_weights=True, return_health=True)
    assert isinstance(r, AttentionResult)
    np.testing.assert_array_equal(r.output, layer(x))
    assert r.weights.shape == (2, 6, 7, 7) and r.lse.shape == (2, 6, 7)
    assert r.health.shape == (2, 6)


@pytest.mark.parametrize(
    ("rule", "scale"),
    [("sqrt_dk", 0.5), ("none", 1.0), ("dk", 0.25), ("sqrt_dmodel", 1 / math.sqrt(24))],
)
def test_scale_rules(rule, scale):
    layer, x = layer_and_input(scale_rule=rule)
    assert layer.scale == scale
    np.testing.assert_allclose(layer(x), by_hand(layer, x, scale=scale), rtol=1e-9, atol=1e-12)
    custom, _ = layer_and_input(scale_rule=lambda d_k, d_model: d_k / d_model)
    assert custom.scale == 4 / 24


def test_a_scale_in_the_call_replaces_the_rule():
    layer, x = layer_and_input()
    np.testing.assert_allclose(
        layer(x, scale=2.0), by_hand(layer, x, scale=2.0), rtol=1e-9, atol=1e-12
    )
    assert not np.allclose(layer(x, scale=2.0), layer(x))


def test_weights_are_xavier_uniform_and_follow_the_seed():
    layer = MultiHeadAttention(256, 8, num_kv_heads=2, d_key=128)
    assert layer.w_query.dtype == np.float32 and layer.w_key.shape == (128, 64)
    for weight in (layer.w_query, layer.w_key, layer.w_value, layer.w_output):
        limit = math.sqrt(6 / sum(weight.shape))
        assert 0.98 * limit < np.abs(weight).max() <= limit * 1.0001
        assert weight.std() == pytest.approx(limit / math.sqrt(3), rel=0.03)
    again, other = MultiHeadAttention(256, 8), MultiHeadAttention(256, 8, seed=1)
    np.testing.assert_array_equal(layer.w_query, again.w_query)
    assert (again.w_query != other.w_query).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtype_is_kept(dtype):
    layer, x = layer_and_input(dtype)
    assert layer(x).dtype == dtype
    assert {layer.b_query.dtype, layer.b_key.dtype, layer.b_value.dtype} == {np.dtype(dtype)}


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match="d_model must be a multiple of num_heads, got 24 and 5"):
        MultiHeadAttention(24, 5)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 6 and"):
        MultiHeadAttention(24, 6, num_kv_heads=4)
    with pytest.raises(ValueError, match="scale rule must be one of"):
        MultiHeadAttention(24, 6, scale_rule="cube")
    layer, x = layer_and_input(np.float32, d_key=10)
    with pytest.raises(
        ValueError, match=r"x must have shape \(\.\.\., length, 24\), got \(2, 7, 2"
    ):
        layer(x[..., :20], x[..., :10])
    with pytest.raises(ValueError, match=r"context must have shape \(\.\.\., length, 10\)"):
        layer(x, x)
    with pytest.raises(TypeError, match="x must be float32 like the weights, got float64"):
        layer(x.astype(np.float64), x[..., :10])
