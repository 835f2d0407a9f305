"""Other ways to attend, as plain functions, to compare scaled dot-product attention with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._attention import attention
from ._reference import softmax, weighted_sum
from ._result import AttentionResult

Array = NDArray[Any]

# Additive attention needs a vector per pair; this many numbers are held at a time.
_BLOCK_ELEMENTS = 1 << 20


def unscaled_attention(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """softmax(QKᵀ)V: dot products as they are, whatever the dimension.

    >>> import numpy as np, levelhead as lh
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 16, 256))
    >>> health = lh.unscaled_attention(q, k, v, return_health=True).health
    >>> bool(health.top_weight[0] > 0.8)
    True

    query, key, value, options: those of `attention`, except scale
    """
    return attention(query, key, value, scale=1.0, **options)


def cosine_attention(
    query: Array, key: Array, value: Array, *, temperature: float = 0.1, **options: Any
) -> Any:
    """softmax(cos(q, k)/temperature)V: lengths play no part, so scores cannot explode.

    >>> import numpy as np, levelhead as lh
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 16, 64))
    >>> near, far = lh.cosine_attention(q, k, v), lh.cosine_attention(1000 * q, k, v)
    >>> bool(np.allclose(near, far))
    True

    query, key, value: those of `attention`; a vector of zeros has a cosine of 0 with any other
    temperature: what the cosines are divided by; scores lie within ±1/temperature
    options: those of `attention`, except scale
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    return attention(_unit(query), _unit(key), value, scale=1.0 / temperature, **options)


def additive_attention(
    query: Array,
    key: Array,
    value: Array,
    w_query: Array,
    w_key: Array,
    v_score: Array,
    *,
    mask: Array | None = None,
    causal: bool = False,
    return_weights: bool = False,
) -> Array | AttentionResult:
    """softmax(v·tanh(q W_q + k W_k))V: Bahdanau's score, a small network instead of a product.

    >>> import numpy as np, levelhead as lh
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((2, 4)), rng.standard_normal((5, 6)), np.ones((5, 3))
    >>> w_query, w_key = rng.standard_normal((4, 8)), rng.standard_normal((6, 8))
    >>> lh.additive_attention(q, k, v, w_query, w_key, np.ones(8)).round(6).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]

    query, key, value: (..., L, Dq), (..., S, Dk), (..., S, Dv); Dq and Dk may differ
    w_query, w_key: (Dq, A) and (Dk, A), the projections into the hidden layer
    v_score: (A,), from the hidden layer to the score
    mask: broadcastable to (..., L, S); True may attend, a float is added to the scores
    causal: a query sees the keys at or before its own position; the queries are the last L
    return_weights: also the weights, in an AttentionResult

    The hidden layer has A numbers per pair and is made for a few queries at a time.
    """
    if w_query.shape[-1:] != v_score.shape or w_key.shape[-1:] != v_score.shape:
        raise ValueError(
            "w_query, w_key and v_score must end in the same hidden size, "
            f"got shapes {w_query.shape}, {w_key.shape} and {v_score.shape}"
        )
    hidden_query, hidden_key = query @ w_query, key @ w_key
    length, size = query.shape[-2], key.shape[-2]
    pairs = (*np.broadcast_shapes(query.shape[:-2], key.shape[:-2]), length, size)
    visible, bias = _visible(mask, causal, pairs)

    weights = np.empty(pairs, hidden_query.dtype) if return_weights else None
    output = np.empty((*pairs[:-1], value.shape[-1]), np.result_type(hidden_query, value))
    per_row = max(1, int(np.prod(pairs[:-2])) * size * v_score.size)
    step = max(1, _BLOCK_ELEMENTS // per_row)
    with np.errstate(invalid="ignore"):  # a NaN stays in the rows that see it, without a warning
        for start in range(0, length, step):
            rows = slice(start, start + step)
            hidden = np.tanh(hidden_query[..., rows, None, :] + hidden_key[..., None, :, :])
            logits = np.where(visible[..., rows, :], hidden @ v_score + bias[..., rows, :], -np.inf)
            block = np.where(visible[..., rows, :], softmax(logits)[0], 0.0)
            output[..., rows, :] = weighted_sum(block, visible[..., rows, :], value)
            if weights is not None:
                weights[..., rows, :] = block
    return output if weights is None else AttentionResult(output, weights=weights)


def _visible(
    mask: Array | None, causal: bool, pairs: tuple[int, ...]
) -> tuple[NDArray[np.bool_], Array]:
    """Who sees whom and what is added to the scores, both broadcast to (..., L, S)."""
    length, size = pairs[-2:]
    visible = np.ones((length, size), dtype=np.bool_)
    if causal:
        visible = np.arange(size) <= np.arange(length)[:, None] + (size - length)
    bias: Array = np.zeros((), np.float32)
    if mask is not None:
        if mask.dtype == np.bool_:
            visible = visible & mask
        else:
            visible, bias = visible & (mask != -np.inf), mask
    return np.broadcast_to(visible, pairs), np.broadcast_to(bias, pairs)


def _unit(x: Array) -> Array:
    """Vectors of length 1 in x's own dtype; the squares are summed in float64, out of overflow."""
    x = np.asarray(x)
    length = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    return (x / np.where(length == 0, 1.0, length)).astype(x.dtype)
