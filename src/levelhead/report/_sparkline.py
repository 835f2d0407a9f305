"""A line as small as a word: where something began, how it went, where it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .._health import Floats
from .._health.describe import plural
from .._health.numbers import number

SIZE = WIDTH, HEIGHT = 220, 44
MOST_POINTS = 120
_ROOM = 4  # around the line, for its end


class Sparkline(NamedTuple):
    """A line to be drawn in a box of SIZE, and its words.

    path:  of an SVG; it has gaps where there is no number, and is empty for a single one
    end:   its last point
    guide: the height of a limit, None where the line stays away from it
    """

    label: str
    words: str
    path: str
    end: tuple[float, float]
    guide: float | None = None
    guide_words: str = ""


def sparkline(
    label: str,
    values: ArrayLike,
    *,
    merge: Callable[[Floats], float] = np.mean,
    log: bool = False,
    limit: tuple[float, str] = (math.nan, ""),
) -> Sparkline | None:
    """The course of some numbers; None where none of them is finite.

    >>> from levelhead.report._sparkline import sparkline
    >>> line = sparkline("loss", [4.0, 2.0, float("nan"), 1.0])
    >>> line.words
    '4 → 1, not finite at 1 step'

    merge: makes one number of several, where there are more than fit
    limit: a number that the line is compared with, and what that says
    """
    given = np.asarray(values, np.float64)
    finite = given[np.isfinite(given)]
    if not finite.size:
        return None
    words = number(finite[0]) + (f" → {number(finite[-1])}" if finite.size > 1 else "")
    if lost := given.size - finite.size:
        words += f", not finite at {plural(lost, 'step')}"
    if finite.size == 1:
        return Sparkline(label, words, "", (0.0, 0.0))
    points = _scaled(_thinned(given, merge), log)
    low, high = np.nanmin(points), np.nanmax(points)
    guide = float(_scaled(np.array([limit[0]]), log)[0])
    heights = _heights(points, low, high)
    steps = np.linspace(_ROOM, WIDTH - _ROOM, len(points))
    path, last = _path(steps.tolist(), heights.tolist())
    near = float(_heights(np.array([guide]), low, high)[0]) if low <= guide <= high else None
    return Sparkline(label, words, path, last, None if near is None else round(near, 1), limit[1])


def _thinned(values: Floats, merge: Callable[[Floats], float]) -> Floats:
    """Neighbours merged, those left out that are no numbers."""
    parts = np.array_split(values, min(len(values), MOST_POINTS))
    known = [part[np.isfinite(part)] for part in parts]
    return np.array([merge(part) if part.size else math.nan for part in known])


def _scaled(values: Floats, log: bool) -> Floats:
    return np.log10(np.maximum(values, 1e-6)) if log else values


def _heights(points: Floats, low: float, high: float) -> Floats:
    """From the bottom to the top of the box; one level is its middle."""
    share = (points / 2 - low / 2) / (high / 2 - low / 2) if high > low else points * 0 + 0.5
    return HEIGHT - _ROOM - share * (HEIGHT - 2 * _ROOM)


def _path(steps: Sequence[float], heights: Sequence[float]) -> tuple[str, tuple[float, float]]:
    """The line, and its last point. A lone point is a line of no length: a dot."""
    path, end, drawing = "", (0.0, 0.0), False
    for x, y in zip(steps, heights, strict=True):
        if math.isnan(y):
            drawing = False
            continue
        end = round(x, 1), round(y, 1)
        path += f"{'L' if drawing else 'M'}{end[0]} {end[1]}"
        path += "" if drawing else "h0"
        drawing = True
    return path, end
