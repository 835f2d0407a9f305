"""Every health statistic by its definition, from the dense matrix in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._health import LARGE_SCORE, SATURATED_WEIGHT, Floats, Health
from .._health.statistics import statistics_of
from .patterns import pattern_sums

Bools = NDArray[np.bool_]


class Rows(NamedTuple):
    """What the definitions are made of, row by row; the last outcome is the learned sink.

    On a saturated row 1 - p of the largest weight rounds to 0 even in float64. Wherever the
    others' share is meant, it is summed from the others.
    """

    p: Floats  # (B, Hq, L, S + 1)
    log_p: Floats
    one_minus_p: Floats
    others_squares: Floats  # for each outcome the sum of all others' p²
    outcomes: NDArray[np.int64]  # (B, Hq, L), how many there are
    away: NDArray[np.int64]  # (B, 1, L, S), |i - j| of the positions


def _entropy(row: Rows) -> Floats:
    total: Floats = -np.where(row.p > 0, row.p * row.log_p, 0.0).sum(axis=-1)
    return total


# A row's share in each sum over rows: (B, Hq, L). The table of statistics says over which rows.
DEFINITIONS: dict[str, Callable[[Rows], Floats]] = {
    "entropy": _entropy,
    "entropy_ratio": lambda row: _entropy(row) / np.log(np.maximum(row.outcomes, 2)),
    "effective_keys": lambda row: 1.0 / (row.p**2).sum(axis=-1),
    "top_weight": lambda row: row.p.max(axis=-1),
    "saturated": lambda row: (row.p.max(axis=-1) > SATURATED_WEIGHT).astype(np.float64),
    "signal": lambda row: (row.p * row.one_minus_p).sum(axis=-1),
    # ‖diag(p) - ppᵀ‖²: p²(1 - p)² on the diagonal, p_i²p_j² off it.
    "jacobian_norm": lambda row: np.sqrt(
        (row.p**2 * (row.one_minus_p**2 + row.others_squares)).sum(axis=-1)
    ),
    "first_key": lambda row: row.p[..., 0],
    "distance": lambda row: (row.p[..., :-1] * row.away).sum(axis=-1),
    "null_mass": lambda row: row.p[..., -1],
}


def health_sums(
    scores: Floats,
    logits: Floats,
    counted: Bools,
    sinks: Floats | None,
    positions: NDArray[np.int64],
    reach: NDArray[np.int64],
) -> Floats:
    """The sums that `Health` is made of, (B, Hq, len(Health.COLUMNS)).

    scores:    (B, Hq, L, S), scale·QKᵀ
    logits:    (B, Hq, L, S), the same with softcap and bias, as they enter the softmax
    counted:   (B, Hq, L, S), the pairs that are visible to the statistics
    sinks:     (Hq,), a logit per head in the denominator
    positions: (B, L), of the queries among the keys
    reach:     (B, L), how many keys a query may see, a dense mask aside

    A row is nonfinite if a visible score or logit, or its head's sink, is NaN or infinite (a
    sink of -inf is simply absent). Such a row counts in rows, pairs, widest_row and
    nonfinite_rows, and nowhere else.
    """
    size = scores.shape[-1]
    null = np.full(scores.shape[1], -np.inf) if sinks is None else sinks
    visible = counted.sum(axis=-1)
    broken = (counted & ~(np.isfinite(scores) & np.isfinite(logits))).any(axis=-1)
    broken |= ~(null < np.inf)[:, None]
    used = (visible > 0) & ~broken
    choice = used & (visible > 1)
    pairs = counted & used[..., None]

    # The sink is one more outcome. Rows that are left out get it with certainty: no NaN arises.
    outcomes = np.concatenate(
        [
            np.where(pairs, logits, -np.inf),
            np.where(used, null[:, None], 0.0)[..., None],
        ],
        axis=-1,
    )
    away = np.abs(positions[:, None, :, None] - np.arange(size))
    row = _rows(outcomes, visible + (sinks is not None), away)

    count = pairs.sum(axis=(-2, -1))
    at_least_one = np.maximum(count, 1)
    mean = np.where(pairs, scores, 0.0).sum(axis=(-2, -1)) / at_least_one
    deviations = np.where(pairs, scores - mean[..., None, None], 0.0)

    sums = {
        "rows": np.full(scores.shape[:2], scores.shape[2]),
        "pairs": visible.sum(axis=-1),
        "empty_rows": (visible == 0).sum(axis=-1),
        "nonfinite_rows": (broken & (visible > 0)).sum(axis=-1),
        "finite_rows": used.sum(axis=-1),
        "choice_rows": choice.sum(axis=-1),
        "widest_row": visible.max(axis=-1, initial=0),
        "score_count": count,
        "score_max": scores.max(axis=(-2, -1), initial=-np.inf, where=pairs),
        "score_min": scores.min(axis=(-2, -1), initial=np.inf, where=pairs),
        "score_mean": mean,
        "score_m2": (deviations**2).sum(axis=(-2, -1)),
        "large_scores": (pairs & (np.abs(scores) > LARGE_SCORE)).sum(axis=(-2, -1)),
        **pattern_sums(row.p[..., :-1], pairs.sum(axis=-1), reach, positions),
    }
    over, table = {"finite_rows": used, "choice_rows": choice}, statistics_of(Health)
    for name, definition in DEFINITIONS.items():
        sums[name] = np.where(over[table[name].over], definition(row), 0.0).sum(axis=-1)
    return np.stack([sums[name].astype(np.float64) for name in Health.COLUMNS], axis=-1)


def _rows(outcomes: Floats, count: NDArray[np.int64], away: NDArray[np.int64]) -> Rows:
    """p and what goes with it, for rows of logits (..., n), each with one finite at least."""
    below_top = outcomes - outcomes.max(axis=-1, keepdims=True)
    exps = np.exp(below_top)
    largest = np.arange(outcomes.shape[-1]) == outcomes.argmax(axis=-1)[..., None]
    tail = np.where(largest, 0.0, exps).sum(axis=-1, keepdims=True)
    p = exps / (1.0 + tail)
    return Rows(
        p=p,
        log_p=below_top - np.log1p(tail),
        one_minus_p=_sum_of_others(exps, largest) / (1.0 + tail),
        others_squares=_sum_of_others(p**2, largest),
        outcomes=count,
        away=away,
    )


def _sum_of_others(x: Floats, largest: Bools) -> Floats:
    """For each entry of a row the sum of all others, without cancellation for the largest."""
    others = np.where(largest, 0.0, x).sum(axis=-1, keepdims=True)
    every: Floats = x.sum(axis=-1, keepdims=True)
    return np.where(largest, others, every - x)
