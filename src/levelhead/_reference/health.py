"""Every health statistic by its definition, from the dense matrix in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .._health import HEALTH_SUMS, LARGE_SCORE, SATURATED_WEIGHT

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def health_sums(
    scores: Floats,
    logits: Floats,
    counted: Bools,
    sinks: Floats | None,
    positions: NDArray[np.int64],
) -> Floats:
    """The sums that `Health` is made of, (B, Hq, len(HEALTH_SUMS)).

    scores:    (B, Hq, L, S), scale·QKᵀ
    logits:    (B, Hq, L, S), the same with softcap and bias, as they enter the softmax
    counted:   (B, Hq, L, S), the pairs that are visible to the statistics
    sinks:     (Hq,), a logit per head in the denominator
    positions: (B, L), of the queries among the keys

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
    row = _row_statistics(outcomes)
    weights = row["p"][..., :-1]
    outcome_count = visible + (sinks is not None)
    away = np.abs(positions[:, None, :, None] - np.arange(size))

    count = pairs.sum(axis=(-2, -1))
    at_least_one = np.maximum(count, 1)
    mean = np.where(pairs, scores, 0.0).sum(axis=(-2, -1)) / at_least_one
    deviations = np.where(pairs, scores - mean[..., None, None], 0.0)

    def over(rows: Bools, statistic: Floats) -> Floats:
        total: Floats = np.where(rows, statistic, 0.0).sum(axis=-1)
        return total

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
        "entropy": over(used, row["entropy"]),
        "entropy_ratio": over(choice, row["entropy"] / np.log(np.maximum(outcome_count, 2))),
        "effective_keys": over(used, row["effective_keys"]),
        "top_weight": over(used, row["top_weight"]),
        "saturated": (choice & (row["top_weight"] > SATURATED_WEIGHT)).sum(axis=-1),
        "signal": over(used, row["signal"]),
        "jacobian_norm": over(used, row["jacobian_norm"]),
        "first_key": over(choice, row["p"][..., 0]),
        "distance": over(used, (weights * away).sum(axis=-1)),
        "null_mass": over(used, row["p"][..., -1]),
    }
    return np.stack([sums[name].astype(np.float64) for name in HEALTH_SUMS], axis=-1)


def _row_statistics(outcomes: Floats) -> dict[str, Floats]:
    """p and what is defined by it, for rows of logits (..., n), each with one finite at least.

    On a saturated row 1 - p of the largest weight rounds to 0 even in float64. Wherever the
    others' share is meant, it is summed from the others.
    """
    below_top = outcomes - outcomes.max(axis=-1, keepdims=True)
    exps = np.exp(below_top)
    largest = np.arange(outcomes.shape[-1]) == outcomes.argmax(axis=-1)[..., None]
    tail = np.where(largest, 0.0, exps).sum(axis=-1, keepdims=True)

    p = exps / (1.0 + tail)
    log_p = below_top - np.log1p(tail)
    one_minus_p = _sum_of_others(exps, largest) / (1.0 + tail)
    squares = p**2
    # ‖diag(p) - ppᵀ‖²: p²(1 - p)² on the diagonal, p_i²p_j² off it.
    jacobian_square = (squares * (one_minus_p**2 + _sum_of_others(squares, largest))).sum(axis=-1)
    return {
        "p": p,
        "entropy": -np.where(p > 0, p * log_p, 0.0).sum(axis=-1),
        "effective_keys": 1.0 / squares.sum(axis=-1),
        "top_weight": p.max(axis=-1),
        "signal": (p * one_minus_p).sum(axis=-1),
        "jacobian_norm": np.sqrt(jacobian_square),
    }


def _sum_of_others(x: Floats, largest: Bools) -> Floats:
    """For each entry of a row the sum of all others, without cancellation for the largest."""
    others = np.where(largest, 0.0, x).sum(axis=-1, keepdims=True)
    every: Floats = x.sum(axis=-1, keepdims=True)
    return np.where(largest, others, every - x)
