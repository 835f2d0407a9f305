"""What was logged, such as the loss, thinned for a page without losing a peak."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._health import Floats
from .._health.describe import plural
from .._health.numbers import plain
from ..store import Run

MOST_BINS = 300
_DIGITS = 5


def scalar_lines(run: Run) -> list[dict[str, Any]]:
    """Steps and values of each; of many neighbours the smallest and the largest.

    Numbers that are not finite are told of in the label, for no line shows them.
    """
    return [_line(name, *series) for name, series in run.scalars.items()]


def _line(name: str, steps: NDArray[np.int64], values: Floats) -> dict[str, Any]:
    finite = np.isfinite(values)
    lost, label = steps[~finite], name
    if len(lost):
        label += f" (not finite at {plural(len(lost), 'step')}, first at step {lost[0]:,})"
    kept = _extremes(values[finite])
    return {
        "name": name,
        "label": label,
        "steps": steps[finite][kept].tolist(),
        "values": plain(values[finite][kept].tolist(), _DIGITS),
    }


def _extremes(values: Floats) -> NDArray[np.int64]:
    """The places that are kept: the first, the last, and in each bin the two extremes."""
    if len(values) <= 2 * MOST_BINS:
        return np.arange(len(values))
    bins = np.array_split(np.arange(len(values)), MOST_BINS)
    found = [part[end(values[part])] for part in bins for end in (np.argmin, np.argmax)]
    return np.unique([0, *found, len(values) - 1])
