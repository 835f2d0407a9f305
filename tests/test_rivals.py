"""The rivals: each against its formula written out."""

import numpy as np
import pytest

from levelhead import _rivals
from levelhead._reference import reference
from levelhead._rivals import additive_attention, cosine_attention, unscaled_attention


def inputs(dtype=np.float64, lead=(2, 3), length=5, size=7, d=16):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((*lead, length, d)).astype(dtype)
    k, v = rng.standard_normal((2, *lead, size, d)).astype(dtype)
    return q, k, v


def additive_weights(hidden_q=8, dq=16, dk=16):
    rng = np.random.default_rng(1)
    return (
        rng.standard_normal((dq, hidden_q)),
        rng.standard_normal((dk, hidden_q)),
        rng.standard_normal(hidden_q),
    )


def additive_by_hand(q, k, v, w_query, w_key, v_score, visible):
    """One head, pair by pair."""
    out = np.zeros((len(q), v.shape[-1]))
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if visible[i, j]]
        if keys:
            scores = [v_score @ np.tanh(q[i] @ w_query + k[j] @ w_key) for j in keys]
            e = np.exp(np.array(scores) - max(scores))
            out[i] = e / e.sum() @ v[keys]
    return out


# ---------------------------------------------------------------- unscaled and cosine


def test_unscaled_is_attention_without_the_root():
    q, k, v = inputs()
    np.testing.assert_allclose(
        unscaled_attention(q, k, v, causal=True),
        reference(q, k, v, scale=1.0, causal=True),
        rtol=1e-9,
        atol=1e-12,
    )
    assert not np.allclose(unscaled_attention(q, k, v), reference(q, k, v))


def test_cosine_normalises_and_divides_by_the_temperature():
    q, k, v = inputs()
    unit_q, unit_k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    for temperature in (0.05, 1.0):
        np.testing.assert_allclose(
            cosine_attention(q, k, v, temperature=temperature, causal=True),
            reference(unit_q, unit_k, v, scale=1 / temperature, causal=True),
            rtol=1e-9,
            atol=1e-12,
        )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_cosine_scores_cannot_explode(dtype):
    q, k, v = inputs(dtype)
    huge = {np.float16: 1e3, np.float32: 1e30, np.float64: 1e100}[dtype]
    r = cosine_attention((q * dtype(huge)).astype(dtype), k, v, return_health=True)
    assert r.output.dtype == dtype
    assert np.abs(r.health.score_max).max() <= 10.01
    np.testing.assert_allclose(
        r.output.astype(float), cosine_attention(q, k, v).astype(float), atol=1e-2
    )


def test_cosine_of_a_zero_vector_is_zero():
    q, k, v = inputs()
    q[..., 2, :] = 0
    out = cosine_attention(q, k, v)
    np.testing.assert_allclose(out[..., 2, :], v.mean(axis=-2), rtol=1e-9)


def test_cosine_temperature_must_be_positive():
    with pytest.raises(ValueError, match=r"temperature must be above 0, got 0\.0"):
        cosine_attention(*inputs(), temperature=0.0)


# ---------------------------------------------------------------- additive


@pytest.mark.parametrize("block", [1, 300, 1 << 20])
def test_additive_pair_by_pair(monkeypatch, block):
    monkeypatch.setattr(_rivals, "_BLOCK_ELEMENTS", block)
    q, k, v = inputs()
    layers = additive_weights()
    mask = np.random.default_rng(2).random((2, 1, 5, 7)) < 0.7
    mask[0, 0, 3] = False
    r = additive_attention(q, k, v, *layers, mask=mask, causal=True, return_weights=True)
    causal = np.arange(7) <= np.arange(5)[:, None] + 2
    for b, h in np.ndindex(2, 3):
        visible = mask[b, 0] & causal
        np.testing.assert_allclose(
            r.output[b, h],
            additive_by_hand(q[b, h], k[b, h], v[b, h], *layers, visible),
            rtol=1e-10,
        )
        assert (r.weights[b, h][~visible] == 0).all()
    assert (r.output[0, :, 3] == 0).all()
    sums = r.weights.sum(axis=-1)
    np.testing.assert_allclose(sums[sums > 0], 1.0)


def test_additive_takes_queries_and_keys_of_different_width():
    q, k, v = inputs(lead=())
    layers = additive_weights(dq=16, dk=4)
    out = additive_attention(q, k[:, :4], v, *layers)
    assert out.shape == (5, 16)
    np.testing.assert_allclose(
        out, additive_by_hand(q, k[:, :4], v, *layers, np.ones((5, 7), bool)), rtol=1e-10
    )


def test_additive_float_mask_is_added():
    q, k, v = inputs(lead=())
    layers = additive_weights()
    only_last = np.where(np.arange(7) == 6, 0.0, -np.inf)
    v[:6] = np.nan  # hidden: must not show
    np.testing.assert_allclose(
        additive_attention(q, k, v, *layers, mask=only_last), np.broadcast_to(v[6], (5, 16))
    )
    v[:6] = 0.0
    leaning = additive_attention(q, k, v, *layers, mask=np.where(np.arange(7) == 6, 50.0, 0.0))
    np.testing.assert_allclose(leaning, np.broadcast_to(v[6], (5, 16)), rtol=1e-6)


def test_additive_keeps_float32():
    q, k, v = inputs(np.float32)
    layers = [x.astype(np.float32) for x in additive_weights()]
    r = additive_attention(q, k, v, *layers, return_weights=True)
    assert r.output.dtype == r.weights.dtype == np.float32


def test_additive_checks_its_hidden_size():
    w_query, w_key, v_score = additive_weights()
    with pytest.raises(
        ValueError, match=r"same hidden size, got shapes \(16, 8\), \(16, 8\) and \(7,\)"
    ):
        additive_attention(*inputs(), w_query, w_key, v_score[:7])
