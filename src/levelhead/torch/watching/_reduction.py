"""Sums of heads that lie on several ranks: a few reductions make them one, as the table says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..._health import GradHealth, Health
from ..._health.statistics import Floats, Statistic, statistics_of

Kind = type[Health] | type[GradHealth]
Reduce = Callable[[Floats], Floats]  # entry by entry, over all ranks


class Reduced(NamedTuple):
    """The sums of each kind, and what was to be added and to be the largest beside them."""

    sums: list[Floats]
    added: Floats
    highest: Floats


def reduce_sums(
    parts: Sequence[tuple[Kind, Floats]],
    added: Floats,
    highest: Floats,
    total: Reduce,
    largest: Reduce,
) -> Reduced:
    """Merge the sums of all ranks, as `Health.merge` merges those of one.

    Three reductions do it whatever there is: of sums, of maxima, and of second moments about the
    common means, which come last because the means must be known (Chan's formula).

    parts:          (heads, columns) of each kind, the same heads on all ranks
    added, highest: further numbers to reduce along with the first two
    """
    sums = [sums for _, sums in parts]
    plans = [_Plan.of(kind) for kind, _ in parts]
    each = list(zip(plans, sums, strict=True))
    added, *totals = _as_one(total, [added, *(plan.summands(own) for plan, own in each)])
    highest, *tops = _as_one(largest, [highest, *(plan.extremes(own) for plan, own in each)])
    merged = [
        plan.merged(own, *found) for (plan, own), *found in zip(each, totals, tops, strict=True)
    ]
    moments = [plan.moments(own, after) for (plan, own), after in zip(each, merged, strict=True)]
    for plan, after, squares in zip(plans, merged, _as_one(total, moments), strict=True):
        after[:, [place for place, *_ in plan.squares]] = squares
    return Reduced(merged, added, highest)


def nothing(kind: Kind, heads: int) -> Floats:
    """The sums of heads that saw nothing: merging them changes nothing."""
    return kind(np.empty((0, heads, len(kind.COLUMNS)))).over_batch().sums


class _Plan(NamedTuple):
    """The columns of a kind, by how they merge.

    means:   with the column that counts what they are over
    squares: with that, and the column of their mean
    """

    sums: list[int]
    largest: list[int]
    smallest: list[int]
    means: list[tuple[int, int]]
    squares: list[tuple[int, int, int]]

    @classmethod
    def of(cls, kind: Kind) -> _Plan:
        table = [each for each in statistics_of(kind).values() if each.place >= 0]

        def those(how: str) -> list[Statistic]:
            return [each for each in table if each.merge == how]

        sums, largest, smallest = ([x.place for x in those(how)] for how in ("sum", "max", "min"))
        means = [(each.place, each.over_place) for each in those("mean")]
        mean_over = {over: place for place, over in means}
        squares = [(x.place, x.over_place, mean_over[x.over_place]) for x in those("squares")]
        return cls(sums, largest, smallest, means, squares)

    def summands(self, own: Floats) -> Floats:
        weighted = [own[:, [place]] * own[:, [count]] for place, count in self.means]
        return np.concatenate([own[:, self.sums], *weighted], axis=1)

    def extremes(self, own: Floats) -> Floats:
        return np.concatenate([own[:, self.largest], -own[:, self.smallest]], axis=1)

    def merged(self, own: Floats, totals: Floats, tops: Floats) -> Floats:
        """All but the squares."""
        found = np.empty_like(own)
        found[:, self.sums] = totals[:, : len(self.sums)]
        found[:, self.largest] = tops[:, : len(self.largest)]
        found[:, self.smallest] = -tops[:, len(self.largest) :]
        for at, (place, count) in enumerate(self.means, len(self.sums)):
            many = found[:, count]
            found[:, place] = totals[:, at] / np.where(many == 0, 1.0, many)
        return found

    def moments(self, own: Floats, merged: Floats) -> Floats:
        """The share of these rows in the squares, about the mean of all."""
        found = np.empty((len(own), len(self.squares)))
        for at, (place, count, mean) in enumerate(self.squares):
            found[:, at] = own[:, place] + own[:, count] * (own[:, mean] - merged[:, mean]) ** 2
        return found


def _as_one(reduce: Reduce, arrays: Sequence[Floats]) -> list[Floats]:
    """Arrays of any shapes, reduced in one go."""
    flat = np.concatenate([array.ravel() for array in arrays])
    ends = np.cumsum([array.size for array in arrays])[:-1]
    found = np.split(reduce(flat) if flat.size else flat, ends)
    return [part.reshape(array.shape) for part, array in zip(found, arrays, strict=True)]
