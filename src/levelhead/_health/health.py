"""Health and GradHealth: what attention says about itself, head by head.

They keep raw sums per head: cheap to make, exact to merge, statistics on demand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .describe import MOST_IN_REPR, gradient_table, health_table
from .judge import Evidence, judge
from .numbers import plain
from .statistics import (
    BackwardStatistics,
    Count,
    Floats,
    ForwardStatistics,
    Statistic,
    statistics_of,
)
from .verdicts import SHORT, Thresholds, Verdict

if TYPE_CHECKING:
    from typing import Self

Index = int | slice | tuple[int | slice, ...]


class _Names:
    """Names of the statistics of a class, as the table has them now."""

    def __init__(self, name: Callable[[Statistic], str | None]) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> tuple[str, ...]:
        names = (self._name(each) for each in statistics_of(owner).values())
        return tuple(name for name in names if name)


class PerHead:
    """Float64 sums of shape (..., Hq, columns) and what every kind of statistic does with them.

    The constructor only stores and trusts what it gets; `from_sums` checks sums from elsewhere.
    """

    __slots__ = ("_sums",)
    COLUMNS = _Names(lambda each: each.column)
    FIELDS = _Names(lambda each: each.name if each.is_field else None)

    def __init__(self, sums: Floats) -> None:
        self._sums = sums

    @classmethod
    def from_sums(cls, sums: ArrayLike) -> Self:
        """Wrap raw sums of shape (..., Hq, len(COLUMNS)), in the order of COLUMNS."""
        given = np.asarray(sums, dtype=np.float64)
        if given.ndim < 2 or given.shape[-1] != len(cls.COLUMNS):
            raise ValueError(
                f"sums must have shape (..., heads, {len(cls.COLUMNS)}), got {given.shape}"
            )
        return cls(given)

    @property
    def sums(self) -> Floats:
        """The raw sums, for storing: `from_sums` takes them back."""
        return self._sums

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., Hq), the shape of every field."""
        return self._sums.shape[:-1]

    def merge(self, *others: Self) -> Self:
        """Statistics of all the parts together: `a.merge(b)` or `Health.merge(a, b, c)`.

        Entries at the same place are merged, so all shapes must be equal. Parts whose batches
        differ in size first go through `over_batch()`, which leaves one entry per head.
        """
        for other in others:
            if type(other) is not type(self):
                raise TypeError(
                    f"merge takes {type(self).__name__} objects, got {type(other).__name__}"
                )
            if other.shape != self.shape:
                raise ValueError(
                    f"merge needs equal shapes, got {self.shape} and {other.shape}; "
                    "over_batch() brings each to one entry per head"
                )
        return type(self)(self._combine(np.stack([self._sums, *(o._sums for o in others)])))

    def over_batch(self) -> Self:
        """All batch entries merged: shape (Hq,)."""
        if self._sums.ndim == 2:
            return self
        # Not -1 for the batch: a size of 0 elsewhere would leave it undetermined.
        batch = math.prod(self._sums.shape[:-2])
        return type(self)(self._combine(self._sums.reshape(batch, *self._sums.shape[-2:])))

    @classmethod
    def _combine(cls, parts: Floats) -> Floats:
        """Merge along the first axis, which may be empty."""
        merged: Floats = parts.sum(axis=0)
        for each in statistics_of(cls).values():
            column = (..., each.place)
            if each.merge == "max":
                nothing = 0.0 if isinstance(each, Count) else -np.inf
                merged[column] = parts[column].max(axis=0, initial=nothing)
            elif each.merge == "min":
                merged[column] = parts[column].min(axis=0, initial=np.inf)
        return merged

    def __getitem__(self, index: Index) -> Self:
        """Select batch entries; the heads always stay together."""
        entries = index if isinstance(index, tuple) else (index,)
        batch_axes = self._sums.ndim - 2
        if len(entries) > batch_axes:
            raise IndexError(
                f"{len(entries)} indices for {batch_axes} batch axes of shape {self.shape}: "
                "indexing selects batch entries; for one head index a field, as in .entropy[0]"
            )
        return type(self)(self._sums[entries])

    def to_dict(self) -> dict[str, Any]:
        """Every field as nested lists of plain numbers, None where there is no finite number."""
        return {name: plain(getattr(self, name)) for name in self.FIELDS}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerHead) or type(other) is not type(self):
            return NotImplemented
        return np.array_equal(self._sums, other._sums, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]


class Health(ForwardStatistics, PerHead):
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
    """

    __slots__ = ()

    @classmethod
    def _combine(cls, parts: Floats) -> Floats:
        merged = super()._combine(parts)
        # Chan's formula for any number of parts: spread within the parts plus spread of their
        # means. Squaring deviations from the common mean avoids E[x²] - E[x]²'s cancellation.
        count_at, mean_at = (..., cls.score_count.place), (..., cls.score_mean.place)
        count, mean, total = parts[count_at], parts[mean_at], merged[count_at]
        overall = (count * mean).sum(axis=0) / np.where(total == 0, 1.0, total)
        merged[mean_at] = overall
        merged[..., cls.score_var.place] += (count * (mean - overall) ** 2).sum(axis=0)
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
        judged = judge(Evidence({"": self}), Thresholds().changed(thresholds))[""]
        verdicts = (judged[head] for head in judged.worst_first())
        return [verdict for verdict in verdicts if verdict.verdict != SHORT]

    def __str__(self) -> str:
        return f"attention health: {health_table(self)}"

    def _repr_html_(self) -> str:
        from ..report._notebook import health_html  # noqa: PLC0415

        return health_html(self)

    def __repr__(self) -> str:
        return f"Health of shape {self.shape}: {health_table(self, MOST_IN_REPR)}"


class GradHealth(BackwardStatistics, PerHead):
    """How much gradient gets through the softmax, per head: arrays of shape (..., Hq).

    >>> import numpy as np, levelhead as lh
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.standard_normal((4, 1, 32, 64))
    >>> scaled = lh.reference_backward(g, q, k, v, return_health=True).health
    >>> saturated = lh.reference_backward(g, q, k, v, scale=1e4, return_health=True).health
    >>> bool(saturated.survival[0] < scaled.survival[0] / 1000)
    True
    """

    __slots__ = ()

    def __str__(self) -> str:
        return gradient_table(self)

    def __repr__(self) -> str:
        return f"GradHealth of shape {self.shape}:\n{gradient_table(self, MOST_IN_REPR)}"


for _kind in (Health, GradHealth):
    _fields = (f"    {each.name}: {each.meaning}" for each in statistics_of(_kind).values())
    _kind.__doc__ = f"{_kind.__doc__}\n" + "\n".join(_fields) + "\n    "

# What the engine writes for each head, in this order.
HEALTH_SUMS: tuple[str, ...] = Health.COLUMNS
GRAD_SUMS: tuple[str, ...] = GradHealth.COLUMNS
