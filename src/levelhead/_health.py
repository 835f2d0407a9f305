"""Health and GradHealth: what attention says about itself, head by head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from ._per_head import Floats, PerHead, ratio
from ._verdicts import Thresholds, Verdict, judge

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GRAD_SUMS", "HEALTH_SUMS", "GradHealth", "Health", "Thresholds", "Verdict"]

# Definitions, not thresholds: the sums are taken with them and cannot be judged anew.
LARGE_SCORE = 100.0
SATURATED_WEIGHT = 0.99

# The raw columns per head; the engine writes them in this order. "Finite" rows are those that
# see something and whose visible scores are all finite; "choice" rows see more than one key.
HEALTH_SUMS = (
    "rows",
    "pairs",
    "empty_rows",
    "nonfinite_rows",
    "finite_rows",
    "choice_rows",
    "widest_row",  # a maximum
    "score_count",  # visible pairs of finite rows
    "score_max",  # -inf without any
    "score_min",  # +inf without any
    "score_mean",
    "score_m2",  # sum of squared deviations from the mean
    "large_scores",
    "entropy",  # from here on sums over finite rows
    "entropy_ratio",  # over choice rows
    "effective_keys",
    "top_weight",
    "saturated",  # over choice rows
    "signal",
    "jacobian_norm",
    "first_key",  # over choice rows
    "distance",
    "null_mass",
)
GRAD_SUMS = ("weight_grad_sq", "score_grad_sq")

_AT = {name: column for column, name in enumerate(HEALTH_SUMS)}
_COUNT, _MEAN, _M2 = _AT["score_count"], _AT["score_mean"], _AT["score_m2"]
_WIDEST, _MAX, _MIN = _AT["widest_row"], _AT["score_max"], _AT["score_min"]


class _Count:
    """A column of whole numbers."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.column = _AT[name]

    @overload
    def __get__(self, health: None, owner: type) -> Self: ...
    @overload
    def __get__(self, health: Health, owner: type) -> NDArray[np.int64]: ...
    def __get__(self, health: Health | None, owner: type) -> Self | NDArray[np.int64]:
        return self if health is None else health.sums[..., self.column].astype(np.int64)


class _Mean:
    """A column divided by the number of rows or pairs it was summed over."""

    def __init__(self, over: str) -> None:
        self.over = _AT[over]

    def __set_name__(self, owner: type, name: str) -> None:
        self.column = _AT[name]

    @overload
    def __get__(self, health: None, owner: type) -> Self: ...
    @overload
    def __get__(self, health: Health, owner: type) -> Floats: ...
    def __get__(self, health: Health | None, owner: type) -> Self | Floats:
        if health is None:
            return self
        return ratio(health.sums[..., self.column], health.sums[..., self.over])


class Health(PerHead):
    """How attention fares, per head: arrays of shape (..., Hq).

    >>> import numpy as np, levelhead as lh
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 32, 64))          # two heads
    >>> scaled = lh.reference(q, k, v, return_health=True).health
    >>> unscaled = lh.reference(q, k, v, scale=1.0, return_health=True).health
    >>> bool((unscaled.signal < scaled.signal).all())
    True
    >>> [verdict.verdict for verdict in scaled.verdicts()]
    ['healthy', 'healthy']

    Scores are scale·q·k over the visible pairs; weights are the probabilities, before dropout.
    Empty rows are counted and otherwise left out. So are rows with a NaN or infinite score, so
    that one bad row does not hide the others: the scores and means are those of all other rows.
    A field is NaN where there is nothing to average.

    rows, pairs, empty_rows, nonfinite_rows: counts of query rows, visible pairs, rows that see
        nothing, rows with a NaN or infinite score
    widest_row: the most keys any row sees
    score_max, score_min, score_mean, score_var: over the visible pairs
    large_scores: share of pairs with |score| > 100
    entropy, entropy_ratio: mean of H = -Σ p ln p, and of H / its maximum over rows with a choice
    effective_keys, top_weight: mean of 1/Σp² and of max p
    saturated: share of rows with a choice whose max p > 0.99
    signal, jacobian_norm: mean trace and Frobenius norm of the softmax Jacobian diag(p) - ppᵀ
    first_key: mean weight on key 0, over rows with a choice
    distance: mean of Σ p·|i - j| in positions
    null_mass: mean weight taken by a learned sink
    """

    __slots__ = ()
    COLUMNS = HEALTH_SUMS
    FIELDS = (
        *("rows", "pairs", "empty_rows", "nonfinite_rows", "widest_row"),
        *("score_max", "score_min", "score_mean", "score_var", "large_scores"),
        *("entropy", "entropy_ratio", "effective_keys", "top_weight", "saturated"),
        *("signal", "jacobian_norm", "first_key", "distance", "null_mass"),
    )

    rows = _Count()
    pairs = _Count()
    empty_rows = _Count()
    nonfinite_rows = _Count()
    widest_row = _Count()

    @property
    def score_max(self) -> Floats:
        return self._of_scores("score_max")

    @property
    def score_min(self) -> Floats:
        return self._of_scores("score_min")

    @property
    def score_mean(self) -> Floats:
        return self._of_scores("score_mean")

    def _of_scores(self, name: str) -> Floats:
        return np.where(self._sums[..., _COUNT] > 0, self._sums[..., _AT[name]], np.nan)

    @property
    def score_var(self) -> Floats:
        return ratio(self._sums[..., _M2], self._sums[..., _COUNT])

    large_scores = _Mean(over="score_count")
    entropy = _Mean(over="finite_rows")
    entropy_ratio = _Mean(over="choice_rows")
    effective_keys = _Mean(over="finite_rows")
    top_weight = _Mean(over="finite_rows")
    saturated = _Mean(over="choice_rows")
    signal = _Mean(over="finite_rows")
    jacobian_norm = _Mean(over="finite_rows")
    first_key = _Mean(over="choice_rows")
    distance = _Mean(over="finite_rows")
    null_mass = _Mean(over="finite_rows")

    @staticmethod
    def _combine(parts: Floats) -> Floats:
        merged: Floats = parts.sum(axis=0)
        merged[..., _WIDEST] = parts[..., _WIDEST].max(axis=0, initial=0)
        merged[..., _MAX] = parts[..., _MAX].max(axis=0, initial=-np.inf)
        merged[..., _MIN] = parts[..., _MIN].min(axis=0, initial=np.inf)
        # Chan's formula for any number of parts: spread within the parts plus spread of their
        # means. Squaring deviations from the common mean avoids E[x²] - E[x]²'s cancellation.
        count, mean = parts[..., _COUNT], parts[..., _MEAN]
        total = merged[..., _COUNT]
        overall = (count * mean).sum(axis=0) / np.where(total == 0, 1.0, total)
        merged[..., _MEAN] = overall
        merged[..., _M2] += (count * (mean - overall) ** 2).sum(axis=0)
        return merged

    def verdicts(self, **thresholds: float) -> list[Verdict]:
        """One verdict per head, worst first, over the whole batch.

        >>> import numpy as np, levelhead as lh
        >>> q = 200 * np.eye(16)[None]
        >>> verdict, = lh.reference(q, q, q, return_health=True).health.verdicts()
        >>> verdict.verdict, verdict.level
        ('exploding', 'critical')
        >>> verdict.reason
        'the largest |score| is 10,000 (critical from 10,000)'

        thresholds: any field of `Thresholds`, by name

        Heads all of whose rows see fewer than 8 keys (min_keys) are left out: they say little.
        Nonfinite rows are reported even for them.
        """
        return judge(self.over_batch()._heads(), Thresholds().changed(thresholds))

    def __str__(self) -> str:
        merged = self.over_batch()
        heads = merged._heads()
        verdicts = {verdict.head: verdict for verdict in merged.verdicts()}
        unjudged = [index for index in range(len(heads)) if index not in verdicts]
        lines = [_title(merged), _HEADINGS] if heads else [_title(merged)]
        for index in [*verdicts, *unjudged]:
            head, verdict = heads[index], verdicts.get(index)
            name = "(few keys)" if verdict is None else verdict.verdict
            if verdict is not None and verdict.level in ("critical", "error", "warning"):
                name += f" ({verdict.level})"
            numbers = (
                max(abs(head["score_max"]), abs(head["score_min"])),
                math.sqrt(head["score_var"]),
                *(head[field] for field in _SHOWN),
            )
            lines.append(_line(str(index), name, [_short(number) for number in numbers]))
        return "\n".join(lines)


_SHOWN = ("entropy_ratio", "effective_keys", "top_weight", "saturated", "signal", "first_key")


def _line(head: str, verdict: str, cells: list[str]) -> str:
    return f"{head:>4}  {verdict:<20}" + "".join(f"{cell:>9}" for cell in cells)


_HEADINGS = _line(
    "head",
    "verdict",
    ["|score|", "std", "entropy", "eff.keys", "top", "saturat.", "signal", "1st key"],
)


def _title(health: Health) -> str:
    counts = {
        "rows": health.rows,
        "visible pairs": health.pairs,
        "empty rows": health.empty_rows,
        "nonfinite rows": health.nonfinite_rows,
    }
    totals = {name: int(count.sum()) for name, count in counts.items()}
    parts = [f"{total:,} {name}" for name, total in totals.items() if total or name == "rows"]
    heads = health.shape[-1]
    return f"attention health: {heads} head{'s' * (heads != 1)}, " + ", ".join(parts)


def _short(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.3g}"


class GradHealth(PerHead):
    """How much gradient gets through the softmax, per head: arrays of shape (..., Hq).

    >>> import numpy as np, levelhead as lh
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.standard_normal((4, 1, 32, 64))
    >>> scaled = lh.reference_backward(g, q, k, v, return_health=True).health
    >>> saturated = lh.reference_backward(g, q, k, v, scale=1e4, return_health=True).health
    >>> bool(saturated.survival[0] < scaled.survival[0] / 1000)
    True

    weight_grad_norm: ‖dL/dP‖_F, of the loss by the weights (before dropout)
    score_grad_norm:  ‖dL/dS‖_F, by the scores as they enter the softmax
    survival:         the second as a share of the first; NaN where no gradient arrived
    """

    __slots__ = ()
    COLUMNS = GRAD_SUMS
    FIELDS = ("weight_grad_norm", "score_grad_norm", "survival")

    @property
    def weight_grad_norm(self) -> Floats:
        return np.sqrt(self._sums[..., 0])

    @property
    def score_grad_norm(self) -> Floats:
        return np.sqrt(self._sums[..., 1])

    @property
    def survival(self) -> Floats:
        return ratio(self.score_grad_norm, self.weight_grad_norm)

    @staticmethod
    def _combine(parts: Floats) -> Floats:
        merged: Floats = parts.sum(axis=0)
        return merged

    def __str__(self) -> str:
        heads = self.over_batch()._heads()
        lines = [f"{'head':>4}{'|dL/dP|':>12}{'|dL/dS|':>12}{'survival':>12}"]
        # The least gradient first; NaN, where none arrived, last.
        order = sorted(
            range(len(heads)),
            key=lambda index: (math.isnan(heads[index]["survival"]), heads[index]["survival"]),
        )
        for index in order:
            cells = (_short(heads[index][field]) for field in self.FIELDS)
            lines.append(f"{index:>4}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)
