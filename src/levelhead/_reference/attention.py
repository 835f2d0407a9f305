"""The specification: attention in plain NumPy, dense, float64, one small function per step.

    scores  = scale · Q Kᵀ            step 1 and 2
    logits  = softcap, bias, -inf where hidden
    weights = softmax(logits)         step 3 and 4, with a learned sink in the denominator
    output  = dropout(weights) V      step 5

It holds the whole L-by-S matrix and is slow on purpose. The engine is tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._health import GradHealth, Health
from .._result import AttentionGradients, AttentionResult
from ..scaling import sqrt_dk
from .health import health_sums

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Window = int | Sequence[int | None] | None
Scalar = TypeVar("Scalar", bound=np.generic)


def reference(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    causal: bool = False,
    window: Window = None,
    query_offset: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    return_health: bool = False,
    return_weights: bool = False,
) -> Any:
    """softmax(scale·QKᵀ + mask) V as the textbook has it, in float64.

    >>> import numpy as np, levelhead as lh
    >>> q, k = np.array([[1.0]]), np.array([[25.0], [2.0], [-3.0]])
    >>> v = np.array([[1.0], [10.0], [100.0]])
    >>> lh.reference(q, k, v, causal=True, query_offset=0)
    array([[1.]])
    >>> r = lh.reference(q, k, v, return_weights=True)
    >>> [f"{p:.1e}" for p in r.weights[0]]
    ['1.0e+00', '1.0e-10', '6.9e-13']

    query, key, value: (..., Hq, L, Dk), (..., Hkv, S, Dk), (..., Hkv, S, Dv); 2-D is one head
    mask: broadcastable to (..., Hq, L, S); True may attend, a float is added to the scores
    causal, window: what a query sees around its own position; a window w means (w - 1, 0)
    query_offset: position of the first query, an int or one per batch entry; None is S - L
    key_lengths: one per batch entry; keys at or past it do not exist
    scale: None is 1/√Dk; a float, or one per head
    softcap: c·tanh(score/c), before the mask
    sinks: (Hq,), a logit per head that joins the denominator and has no value
    dropout, seed: share of weights dropped, by the mask of `dropout_keep`
    return_lse, return_health, return_weights: any of them makes the result an AttentionResult
    """
    with np.errstate(all="ignore"):  # NaN and infinity are cases here, not accidents
        steps = _forward(
            *(query, key, value, mask, causal, window, query_offset, key_lengths),
            *(scale, softcap, sinks, dropout, seed),
        )
        output = weighted_sum(steps.weights * steps.kept, steps.visible, steps.value)
        output = output.reshape(*steps.lead, *output.shape[-2:])
        if not (return_lse or return_health or return_weights):
            return output
        rows, pairs = steps.weights.shape[-2:-1], steps.weights.shape[-2:]
        return AttentionResult(
            output,
            lse=steps.lse.reshape(*steps.lead, *rows) if return_lse else None,
            weights=steps.weights.reshape(*steps.lead, *pairs) if return_weights else None,
            health=_health(steps) if return_health else None,
        )


def reference_backward(
    grad_output: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    output: ArrayLike | None = None,
    lse: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
    causal: bool = False,
    window: Window = None,
    query_offset: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_health: bool = False,
) -> AttentionGradients:
    """The gradients of query, key and value, from the dense formulas in float64.

    >>> import numpy as np, levelhead as lh
    >>> x = np.eye(3)
    >>> dq, dk, dv, _ = lh.reference_backward(np.ones((3, 3)), x, x, x)
    >>> dv.sum(axis=1).round(6)                      # every row hands out a weight of 1
    array([3., 3., 3.])

    grad_output: (..., Hq, L, Dv), the loss's gradient by the output
    output, lse: not needed; taken so that a call of `attention_backward` works here unchanged
    return_health: also GradHealth
    The other arguments are those of the forward call.
    """
    del output, lse
    with np.errstate(all="ignore"):
        steps = _forward(
            *(query, key, value, mask, causal, window, query_offset, key_lengths),
            *(scale, softcap, sinks, dropout, seed),
        )
        expected = (*steps.lead, steps.query.shape[-2], steps.value.shape[-1])
        grad = np.asarray(grad_output, dtype=np.float64)
        if grad.shape != expected:
            raise ValueError(f"grad_output must have shape {expected}, got {grad.shape}")
        grad = grad.reshape(*steps.query.shape[:-1], grad.shape[-1])

        weights, visible, seen_by = steps.weights, steps.visible, _transpose(steps.visible)
        dv = weighted_sum(_transpose(weights * steps.kept), seen_by, grad)
        dweights = np.where(visible, grad @ _transpose(steps.value) * steps.kept, 0.0)
        # The softmax Jacobian diag(p) - ppᵀ, applied to each row.
        mean = (weights * dweights).sum(axis=-1, keepdims=True)
        dlogits = weights * (dweights - mean)
        dscores = dlogits if softcap is None else dlogits * _softcap_slope(steps.scores, softcap)
        dproducts = steps.scale * np.where(visible, dscores, 0.0)
        dq = weighted_sum(dproducts, visible, steps.key)
        dk = weighted_sum(_transpose(dproducts), seen_by, steps.query)

        health = None
        if return_health:
            squares = [
                np.where(steps.counted, gradient, 0.0) ** 2 for gradient in (dweights, dlogits)
            ]
            sums = np.stack([square.sum(axis=(-2, -1)) for square in squares], axis=-1)
            health = GradHealth.from_sums(sums.reshape(*_head_shape(steps.lead), 2))
    shape, groups = np.shape(key)[:-2], steps.groups
    return AttentionGradients(
        dq.reshape(*steps.lead, *dq.shape[-2:]),
        _sum_groups(dk, groups).reshape(*shape, *dk.shape[-2:]),
        _sum_groups(dv, groups).reshape(*shape, *dv.shape[-2:]),
        health,
    )


class _Steps(NamedTuple):
    """Everything between the inputs and the weighted sum; B is the flattened batch."""

    lead: tuple[int, ...]  # the query's shape before (L, Dk), for the way out
    groups: int  # query heads to a key head
    query: Floats  # (B, Hq, L, Dk)
    key: Floats  # (B, Hq, S, Dk), repeated for its group of query heads
    value: Floats  # (B, Hq, S, Dv), repeated too
    positions: NDArray[np.int64]  # (B, L)
    reach: NDArray[np.int64]  # (B, L), how many keys a query may see, a dense mask aside
    scale: Floats  # broadcastable to (Hq, 1, 1)
    sinks: Floats | None  # (Hq,)
    scores: Floats  # (B, Hq, L, S), scale·QKᵀ
    logits: Floats  # the same with softcap and bias, -inf where hidden
    visible: Bools
    counted: Bools  # visible, and no bias that only stands in for -inf
    weights: Floats  # 0 where hidden
    lse: Floats  # (B, Hq, L)
    kept: Floats  # what dropout multiplies the weights by: 0 or 1/(1 - dropout)


def _forward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: ArrayLike | None,
    causal: bool,
    window: Window,
    query_offset: ArrayLike | None,
    key_lengths: ArrayLike | None,
    scale: ArrayLike | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    dropout: float,
    seed: int | None,
) -> _Steps:
    lead, groups, q, k, v = _heads(query, key, value)
    batch, heads, length, width = q.shape
    size = k.shape[-2]
    factor = _per_head("scale", sqrt_dk(width) if scale is None else scale, heads)
    null = None if sinks is None else _per_head("sinks", sinks, heads, scalar=False)

    positions = _positions(query_offset, batch, length, size)
    allowed, bias, soft_hidden = _read_mask(mask, lead, (batch, heads, length, size))
    near = _in_window(positions, size, causal, window) & _exists(key_lengths, batch, size)[:, None]
    visible = np.broadcast_to(allowed, (batch, heads, length, size)) & near[:, None]

    scores = factor * _products(q, k)
    logits = np.where(visible, _softcap(scores, softcap) + bias, -np.inf)
    weights, lse = softmax(logits, null)
    return _Steps(
        *(lead, groups, q, k, v, positions, near.sum(axis=-1), factor),
        None if null is None else null[:, 0, 0],
        *(scores, logits, visible, visible & ~soft_hidden),
        # A NaN in the denominator reaches a whole row; a hidden weight is 0 even there.
        np.where(visible, weights, 0.0),
        lse,
        _kept((batch, heads, length, size), dropout, seed),
    )


# ---------------------------------------------------------------- the textbook's steps


def _products(query: Floats, key: Floats) -> Floats:
    """QKᵀ: every query with every key."""
    products: Floats = query @ _transpose(key)
    return products


def _softcap(scores: Floats, cap: float | None) -> Floats:
    if cap is None:
        return scores
    if not cap > 0:
        raise ValueError(f"softcap must be above 0, got {cap}")
    return cap * np.tanh(scores / cap)


def _softcap_slope(scores: Floats, cap: float) -> Floats:
    return 1.0 / np.cosh(scores / cap) ** 2


def softmax(logits: Floats, sinks: Floats | None = None) -> tuple[Floats, Floats]:
    """Weights (..., L, S) and log of the denominator (..., L); a row of only -inf has weights 0.

    >>> import numpy as np
    >>> from levelhead._reference import softmax
    >>> weights, lse = softmax(np.log([[1.0, 3.0]]))
    >>> weights, lse
    (array([[0.25, 0.75]]), array([1.38629436]))

    logits: (..., L, S), -inf where hidden
    sinks:  broadcastable to (..., L, 1), a logit that only joins the denominator
    """
    null = np.broadcast_to(-np.inf if sinks is None else sinks, (*logits.shape[:-1], 1))
    outcomes = np.concatenate([logits, null], axis=-1)
    top = outcomes.max(axis=-1, keepdims=True)
    top = np.where(top == -np.inf, 0.0, top)  # exp(-inf - 0) is 0; -inf - -inf would be NaN
    exps = np.exp(outcomes - top)
    total = exps.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):  # the logarithm of an empty row's 0 is meant
        lse = (top + np.log(total))[..., 0]
    weights = exps / np.where(total == 0, 1.0, total)
    return weights[..., :-1], lse


def weighted_sum(weights: Floats, visible: Bools, values: Floats) -> Floats:
    """weights @ values over the visible pairs only: a hidden NaN times a weight of 0 is nothing.

    weights, visible: (..., L, S); values: (..., S, D). Keys with a NaN or infinite value are
    added one by one, to the rows that see them.
    """
    finite = np.asarray(np.isfinite(values).all(axis=-1, keepdims=True))
    output: Floats = weights @ np.where(finite, values, 0.0)
    for j in np.flatnonzero(~finite.all(axis=tuple(range(values.ndim - 2)))):
        at_j = slice(j, j + 1)
        adds = visible[..., at_j] & ~finite[..., at_j, :]
        output += np.where(adds, weights[..., at_j] * values[..., at_j, :], 0.0)
    return output


# ---------------------------------------------------------------- who sees whom


def _positions(
    query_offset: ArrayLike | None, batch: int, length: int, size: int
) -> NDArray[np.int64]:
    """The position of every query among the keys, (B, L); key j is at position j."""
    first = _whole("query_offset", size - length if query_offset is None else query_offset)
    if first.ndim > 0 and first.size != batch:
        raise ValueError(
            f"query_offset must be an int or {batch} of them, one per batch entry; "
            f"got shape {first.shape}"
        )
    return np.broadcast_to(first.reshape(-1, 1), (batch, 1)) + np.arange(length)


def _in_window(positions: NDArray[np.int64], size: int, causal: bool, window: Window) -> Bools:
    """(B, L, S): the keys at most `left` before and `right` after a query's position."""
    left, right = _window(window)
    ahead = np.arange(size) - positions[..., None]
    seen = np.ones(ahead.shape, dtype=np.bool_)
    if causal:
        seen &= ahead <= 0
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def _window(window: Window) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if isinstance(window, (int, np.integer)):
        if window < 1:
            raise ValueError(f"window must be at least 1 key, got {window}")
        return int(window) - 1, 0
    left, right = window
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"window must have sides of 0 or more, or None; got {tuple(window)}")
    return left, right


def _exists(key_lengths: ArrayLike | None, batch: int, size: int) -> Bools:
    """(B, S): the keys before each entry's length."""
    if key_lengths is None:
        return np.ones((batch, size), dtype=np.bool_)
    lengths = _whole("key_lengths", key_lengths)
    if lengths.size != batch:
        raise ValueError(
            f"key_lengths must have {batch} entries, one per batch entry; got shape {lengths.shape}"
        )
    if ((lengths < 0) | (lengths > size)).any():
        raise ValueError(f"key_lengths must lie in 0 … {size}, got {lengths.tolist()}")
    exists: Bools = np.arange(size) < lengths.reshape(batch, 1)
    return exists


def _read_mask(
    mask: ArrayLike | None, lead: tuple[int, ...], shape: tuple[int, int, int, int]
) -> tuple[Bools, Floats, Bools]:
    """What a mask says per pair, each broadcastable to (B, Hq, L, S).

    May attend; what to add; and whether that bias is so low (half of its dtype's lowest or less)
    that it is meant as hidden: added all the same, but no pair for the statistics.
    """
    no = np.zeros((1, 1, 1, 1), dtype=np.bool_)
    zero = np.zeros((1, 1, 1, 1))
    if mask is None:
        return ~no, zero, no
    given = np.asarray(mask)
    full = (*lead, *shape[-2:])
    try:
        pairs = np.broadcast_to(given, full).reshape(shape)
    except ValueError:
        raise ValueError(f"mask must broadcast to {full}, got shape {given.shape}") from None
    if given.dtype == np.bool_:
        return pairs, zero, no
    lowest = _lowest(given.dtype)
    bias = pairs.astype(np.float64)
    hidden = bias == -np.inf
    return ~hidden, np.where(hidden, 0.0, bias), bias <= lowest / 2


def _lowest(dtype: np.dtype[Any]) -> float:
    if np.issubdtype(dtype, np.floating):
        return float(np.finfo(dtype).min)
    if dtype.name == "bfloat16":
        return -float.fromhex("0x1.FEp127")
    raise TypeError(f"mask must be bool or floating, got {dtype}")


# ---------------------------------------------------------------- dropout


def dropout_keep(seed: int, rows: ArrayLike, keys: ArrayLike, rate: float) -> Bools:
    """Which weights dropout keeps: a function of seed, row and key alone, whatever the threads.

    >>> from levelhead._reference import dropout_keep
    >>> dropout_keep(seed=1, rows=[0, 1], keys=[0, 1, 2], rate=0.5).shape
    (2, 3)

    seed: any int, taken modulo 2⁶⁴
    rows: (batch·Hq + head)·L + query, for each row of weights
    keys: the keys' indices
    rate: the share to drop, in [0, 1)

    A row's 64 random bits come from the SplitMix64 finaliser. Their halves enter a 32-bit mixer
    at two places, one before and one after its first multiplication, so that two rows share no
    shifted copy of one sequence.
    """
    u32, u64 = np.uint32, np.uint64
    with np.errstate(over="ignore"):  # arithmetic modulo a power of two is meant
        z = u64(seed % 2**64) + (np.asarray(rows, u64) + u64(1)) * u64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
        z = np.asarray(z ^ (z >> u64(31)))
        low, high = z.astype(u32)[..., None], (z >> u64(32)).astype(u32)[..., None]
        x = np.asarray(keys, u64).astype(u32) * u32(0x9E3779B1) + low
        x = (x ^ (x >> u32(16))) * u32(0x85EBCA6B)
        x = x ^ high
        x = (x ^ (x >> u32(13))) * u32(0xC2B2AE35)
        x = x ^ (x >> u32(16))
    kept: Bools = x >= u32(math.floor(rate * 2**32))
    return kept


def _kept(shape: tuple[int, int, int, int], rate: float, seed: int | None) -> Floats:
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {rate}")
    if rate == 0:
        return np.ones((1, 1, 1, 1))
    if seed is None:
        raise ValueError("dropout needs a seed here, so that its mask can be repeated; got None")
    rows = np.arange(math.prod(shape[:-1])).reshape(shape[:-1])
    return dropout_keep(seed, rows, np.arange(shape[-1]), rate) / (1.0 - rate)


# ---------------------------------------------------------------- shapes and options


def _heads(
    query: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[tuple[int, ...], int, Floats, Floats, Floats]:
    """The three as (B, Hq, ·, ·) in float64, with key and value heads repeated for their groups."""
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (query, key, value))
    if not (q.ndim == k.ndim == v.ndim >= 2):
        raise ValueError(
            "query, key and value must have the same number of dimensions, 2 or more; "
            f"got shapes {q.shape}, {k.shape} and {v.shape}"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"key must have query's last dimension {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"value must have shape {k.shape[:-1]} + (Dv,), got {v.shape}")
    if k.shape[:-3] != q.shape[:-3]:
        raise ValueError(
            f"key must have query's batch dimensions {q.shape[:-3]}, got {k.shape[:-3]}"
        )
    lead = q.shape[:-2]
    heads, kv_heads = _head_shape(lead)[-1], _head_shape(k.shape[:-2])[-1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query's {heads} heads must be a multiple of key's {kv_heads}")
    batch, groups = math.prod(lead[:-1]), heads // kv_heads
    shared = [
        np.repeat(array.reshape(batch, kv_heads, *array.shape[-2:]), groups, axis=1)
        for array in (k, v)
    ]
    return lead, groups, q.reshape(batch, heads, *q.shape[-2:]), shared[0], shared[1]


def _head_shape(lead: tuple[int, ...]) -> tuple[int, ...]:
    """(..., Hq): two dimensions alone are one head."""
    return lead or (1,)


def _sum_groups(gradient: Floats, groups: int) -> Floats:
    """A shared head's gradient is the sum over the query heads that shared it."""
    batch, heads, *rest = gradient.shape
    total: Floats = gradient.reshape(batch, heads // groups, groups, *rest).sum(axis=2)
    return total


def _per_head(name: str, values: ArrayLike, heads: int, scalar: bool = True) -> Floats:
    """One number per head (or, where allowed, one for all) as (Hq, 1, 1) or (1, 1, 1)."""
    given = np.asarray(values, dtype=np.float64)
    if given.shape != (heads,) and not (scalar and given.ndim == 0):
        expected = f"be a number or have shape ({heads},)" if scalar else f"have shape ({heads},)"
        raise ValueError(f"{name} must {expected}, got shape {given.shape}")
    return given.reshape(-1, 1, 1)


def _whole(name: str, values: ArrayLike) -> NDArray[np.int64]:
    given = np.asarray(values)
    if not np.issubdtype(given.dtype, np.integer) and given.size > 0:
        raise TypeError(f"{name} must be whole numbers, got {given.dtype}")
    return given.astype(np.int64)


def _transpose(matrix: NDArray[Scalar]) -> NDArray[Scalar]:
    return np.swapaxes(matrix, -1, -2)


def _health(steps: _Steps) -> Health:
    sums = health_sums(
        *(steps.scores, steps.logits, steps.counted, steps.sinks, steps.positions, steps.reach)
    )
    return Health.from_sums(sums.reshape(*_head_shape(steps.lead), sums.shape[-1]))
