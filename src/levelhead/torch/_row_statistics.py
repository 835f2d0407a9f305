"""Health in plain torch, from scores that are there as a matrix: any device, any shape.

Each row's statistics come by the tail-separated form: sums over all outcomes but one largest, so
that a saturated row keeps its small numbers in float32 too. What is summed, over which rows and how
parts are merged is the table's to say (levelhead._health.statistics).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._health import LARGE_SCORE, SATURATED_WEIGHT, Health
from .._health.sampling import PATTERN_KEYS
from .._health.statistics import statistics_of
from ._patterns import Sample, pattern_columns, sample

TILE = 1 << 20  # scores at a time: few enough to stay in a cache


class Rows(NamedTuple):
    """What the formulas are made of, (..., H, L); the tail is all outcomes but one largest."""

    l1: Tensor  # Σ e of the tail
    a: Tensor  # Σ e·d
    total: Tensor  # 1 + l1
    head: Tensor  # the largest weight
    rest: Tensor  # the weight of all others
    t2: Tensor  # Σ p² of the tail
    t3: Tensor  # Σ p³ of the tail
    outcomes: Tensor  # how many there are, 2 at least
    exps: Tensor  # (..., H, L, S), exp(logit - largest) of the keys
    null_exp: Tensor  # the same of all learned sinks together
    distance: Tensor  # (..., L, S), |i - j| of the positions


def _entropy(row: Rows) -> Tensor:
    return torch.log1p(row.l1) - row.a / row.total


def _jacobian_square(row: Rows) -> Tensor:
    square = (row.head * row.rest) ** 2 + row.t2 * (1 + 2 * row.head**2)
    return square + row.t2**2 - 2 * row.t3


# A row's share in each sum over rows. The table of statistics says over which rows.
FORMULAS: dict[str, Callable[[Rows], Tensor]] = {
    "entropy": _entropy,
    "entropy_ratio": lambda row: _entropy(row) / row.outcomes.log(),
    "effective_keys": lambda row: 1 / (row.head**2 + row.t2),
    "top_weight": lambda row: row.head,
    "saturated": lambda row: row.head > SATURATED_WEIGHT,
    "signal": lambda row: 2 * row.rest - row.rest**2 - row.t2,
    "jacobian_norm": lambda row: _jacobian_square(row).clamp(min=0).sqrt(),
    "first_key": lambda row: row.exps.select(-1, 0) / row.total,
    "distance": lambda row: (row.exps * row.distance).sum(-1) / row.total,
    "null_mass": lambda row: row.null_exp / row.total,
}


def hidden_bias(bias: Tensor) -> Tensor:
    """Where a float bias, or a logit that holds one, means "hidden" to the statistics."""
    return bias <= torch.finfo(bias.dtype).min / 2


def row_statistics(
    scores: Tensor,
    logits: Tensor,
    counted: Tensor,
    null: Tensor | None,
    distance: Tensor,
    sampled: Sample,
) -> dict[str, Tensor]:
    """What each row contributes, every entry (..., H, L); rows that are left out hold zeros.

    Of the sampled rows alone, "weights" has all, (..., H, R, S), and "taken" which rows count.

    scores:   (..., H, L, S), scale·QKᵀ
    logits:   (..., H, L, S), the same with softcap and bias, as they enter the softmax
    counted:  broadcastable to them; the pairs that are visible to the statistics
    null:     broadcastable to (..., H, L, N); the logits of N learned sinks, usually of one
    distance: broadcastable to them; |i - j| of the positions
    sampled:  the rows, among these, that patterns are taken from
    """
    if scores.shape[-1] == 0:  # maxima need a column
        scores, logits = (
            scores.new_zeros(*scores.shape[:-1], 1),
            logits.new_zeros(*scores.shape[:-1], 1),
        )
        counted, distance = torch.zeros_like(scores, dtype=torch.bool), torch.zeros_like(scores)
    counted = counted.expand(scores.shape)
    none = float("-inf")
    visible = counted.sum(-1)
    broken = (counted & (scores.isfinite() & logits.isfinite()).logical_not()).any(-1)
    outcomes = visible
    if null is not None:
        null = null.to(logits.dtype)
        outcomes = visible + null.shape[-1]
        broken = broken | (null < float("inf")).all(-1).logical_not()
    outcomes = outcomes.clamp(min=2).to(logits.dtype)
    used = (visible > 0) & broken.logical_not()
    pairs = counted & used.unsqueeze(-1)

    reached = torch.where(pairs, logits, none)
    key_top, place = reached.max(-1)
    index = torch.arange(scores.shape[-1], device=scores.device)
    largest = index == place.unsqueeze(-1)
    top = key_top
    if null is not None:
        null_top, null_place = null.max(-1)
        top = torch.maximum(key_top, null_top)
        key_leads = (key_top >= null_top).unsqueeze(-1)  # else a sink does, and all keys are tail
        largest = largest & key_leads
    top = torch.where(used, top, 0)
    below = torch.where(pairs, reached - top.unsqueeze(-1), 0)
    exps = torch.where(pairs, below.exp(), 0)
    tail = torch.where(largest, 0, exps)
    l1, a = tail.sum(-1), (tail * below).sum(-1)
    l2, l3, null_mass = (tail * tail).sum(-1), (tail**3).sum(-1), torch.zeros_like(l1)
    if null is not None:
        null_exps = torch.where(used.unsqueeze(-1), (null - top.unsqueeze(-1)).exp(), 0)
        places = torch.arange(null.shape[-1], device=null.device)
        leads = (places == null_place.unsqueeze(-1)) & key_leads.logical_not()
        null_tail = torch.where(leads, 0, null_exps)
        null_below = torch.where(null_tail > 0, null - top.unsqueeze(-1), 0)
        l1, a = l1 + null_tail.sum(-1), a + (null_tail * null_below).sum(-1)
        l2, l3 = l2 + (null_tail * null_tail).sum(-1), l3 + (null_tail**3).sum(-1)
        null_mass = null_exps.sum(-1)

    total, head, rest = 1 + l1, 1 / (1 + l1), l1 / (1 + l1)
    t2, t3 = l2 / total**2, l3 / total**3
    row = Rows(l1, a, total, head, rest, t2, t3, outcomes, exps, null_mass, distance)

    kept = torch.where(pairs, scores, 0)
    mean = kept.sum(-1) / visible.clamp(min=1)
    deviation = torch.where(pairs, scores - mean.unsqueeze(-1), 0)
    largest_one = deviation.abs().amax(-1).clamp(min=1)  # its square may overflow a float32
    choice = used & (visible > 1)
    over, table = {"finite_rows": used, "choice_rows": choice}, statistics_of(Health)

    taken = sampled.of(used, -1) & (sampled.of(visible, -1) >= PATTERN_KEYS)
    if not sampled.chosen.all():
        taken = taken & torch.from_numpy(sampled.chosen).to(scores.device)
    weights = sampled.of(exps, -2) / sampled.of(total, -1).unsqueeze(-1)
    return {
        "taken": taken,
        "weights": torch.where(taken.unsqueeze(-1), weights, 0),
        "visible": visible,
        "broken": broken & (visible > 0),
        "used": used,
        "choice": choice,
        "score_max": torch.where(pairs, scores, none).amax(-1),
        "score_min": torch.where(pairs, scores, -none).amin(-1),
        "score_mean": mean,
        "score_m2": (deviation / largest_one.unsqueeze(-1)).square().sum(-1),
        "score_unit": largest_one,  # of their deviations
        "large_scores": (kept.abs() > LARGE_SCORE).sum(-1),
        **{
            name: torch.where(over[table[name].over], formula(row), 0)
            for name, formula in FORMULAS.items()
        },
    }


@torch.no_grad()
def matrix_health(scores: Tensor, logits: Tensor, counted: Tensor, null: Tensor | None) -> Tensor:
    """The sums of `Health` for matrices (..., L, S), the queries being the last L positions.

    null: (..., L, N), the logits of N learned sinks
    """
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores, logits = scores.float(), logits.float()
    rows, keys = scores.shape[-2:]
    at = torch.arange(keys - rows, keys, device=scores.device).unsqueeze(-1)
    distance = (at - torch.arange(keys, device=scores.device)).abs()
    sampled = sample(rows, keys, offset=keys - rows)
    step = max(1, TILE // max(1, scores.numel() // max(rows, 1)))
    parts = []
    for first in range(0, max(rows, 1), step):
        some = slice(first, min(first + step, rows))
        sink = None if null is None else part_of(null, some)
        scored, entered, seen, far = (part_of(x, some) for x in (scores, logits, counted, distance))
        parts.append(row_statistics(scored, entered, seen, sink, far, sampled.part(some)))
    return health_sums(parts, sampled)


def part_of(x: Tensor, rows: slice) -> Tensor:
    """Some rows of (..., L, S). Fake tensors of a device that is not there take no [] nor ~."""
    return x.narrow(-2, rows.start, rows.stop - rows.start)


def widened(x: Tensor) -> Tensor:
    """In float64, where it is; Apple's devices do not have that."""
    return x.float() if x.device.type == "mps" else x.double()


def health_sums(parts: list[dict[str, Tensor]], sampled: Sample) -> Tensor:
    """The sums that `Health` is made of, (..., H, len(Health.COLUMNS)).

    They stay on the device of the scores: to read a number waits for all that it has yet to do.

    parts:   `row_statistics` of some rows each, in order
    sampled: the rows, among all of them, that patterns are taken from
    """

    def column(name: str) -> Tensor:
        return widened(torch.cat([part[name] for part in parts], -1))

    patterns = pattern_columns(
        torch.cat([part["weights"] for part in parts], -2),
        torch.cat([part["taken"] for part in parts], -1),
        sampled,
    )

    visible, used = column("visible"), column("used")
    count = visible * used
    pairs = count.sum(-1)
    mean = (column("score_mean") * count).sum(-1) / pairs.clamp(min=1)
    within = column("score_m2") * column("score_unit") ** 2
    spread = (column("score_mean") - mean.unsqueeze(-1)) ** 2 * count  # Chan's formula
    no_rows = visible.shape[-1] == 0
    sums = {
        "rows": torch.full_like(pairs, visible.shape[-1]),
        "pairs": visible.sum(-1),
        "empty_rows": widened(visible == 0).sum(-1),
        "nonfinite_rows": column("broken").sum(-1),
        "finite_rows": used.sum(-1),
        "choice_rows": column("choice").sum(-1),
        "widest_row": torch.zeros_like(pairs) if no_rows else visible.amax(-1),
        "score_count": pairs,
        "score_max": pairs - float("inf") if no_rows else column("score_max").amax(-1),
        "score_min": pairs + float("inf") if no_rows else column("score_min").amin(-1),
        "score_mean": mean,
        "score_m2": (within + spread).sum(-1),
        **{name: widened(each) for name, each in patterns.items()},
    }
    return torch.stack(
        [sums[name] if name in sums else column(name).sum(-1) for name in Health.COLUMNS],
        -1,
    )
