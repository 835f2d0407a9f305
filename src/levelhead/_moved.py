"""How far another scale moves attention from what it was."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._health import Health

Floats = NDArray[np.float64]


class Moved(NamedTuple):
    """A call with its scores multiplied by another number, beside the call as it was.

    health: Health with the other scale, (..., heads)
    sums:   (..., heads, 4); the rows that see two keys or more; over them the total variation
            distance ½ Σ|p - p'| between the weights, a learned sink's among them; over all rows
            the squares of what the outputs change by, and of the outputs as they were. The last
            two are NaN where the values are not known

    Rows that were not finite before are left out. One that no longer is has lost all its weight.
    """

    health: Health
    sums: Floats

    @property
    def weight_moved(self) -> Floats:
        """The share of a row's weight that moves to other keys: 0 for none, 1 for all of it."""
        return _ratio(self.sums[..., 1], self.sums[..., 0])

    @property
    def output_changed(self) -> Floats:
        """‖o' - o‖/‖o‖ of the head's outputs o."""
        return np.sqrt(_ratio(self.sums[..., 2], self.sums[..., 3]))

    @staticmethod
    def merge(*parts: Moved) -> Moved:
        """All parts and all their batch entries together, one entry per head."""
        return Moved(
            Health.merge(*(part.health.over_batch() for part in parts)),
            sum(part.sums.sum(axis=tuple(range(part.sums.ndim - 2))) for part in parts),
        )

    @staticmethod
    def nowhere(health: Health) -> Moved:
        """A call as it was."""
        sums = np.zeros((*health.shape, 4))
        sums[..., 0], sums[..., 3] = health.choice_rows, 1.0
        return Moved(health, sums)


def _ratio(part: Floats, whole: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return part / whole
