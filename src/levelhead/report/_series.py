"""A run's statistics over its steps, thinned to what a page can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .._health import Evidence, Finding, GradHealth, Health, Thresholds, judge
from .._health.describe import plural
from .._health.findings import MODEL
from .._health.numbers import plain
from .._health.verdicts import MARKS, VERDICTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._health import Floats, PerHead
    from ..store import Run

    Part = TypeVar("Part", bound=PerHead)

MOST_POINTS = 400  # of a line; a screen has hardly more pixels for it
MOST_NUMBERS = 1_500_000
_DIGITS = 4


def thinned(run: Run) -> tuple[list[int], dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The steps shown, per layer its lines, and the lines of what was logged.

    Where a run has too many steps, neighbours are merged, not dropped: the largest score of the
    group stays the largest score. A group goes by its last step.
    """
    steps = list(dict.fromkeys(run.steps))
    records = {layer: (run.health(layer), run.gradients(layer)) for layer in run.layers}
    heads = sum(health[-1][1].shape[-1] for health, _ in records.values() if health)
    room = MOST_NUMBERS // max(1, heads * (len(Health.FIELDS) + len(GradHealth.FIELDS)))
    size = max(1, math.ceil(len(steps) / max(20, min(MOST_POINTS, room))))
    group = {step: place // size for place, step in enumerate(steps)}
    shown = [steps[min(start + size, len(steps)) - 1] for start in range(0, len(steps), size)]
    courses = [run.course_at(step) for step in shown]
    lines = {
        layer: _lines(
            _merged(health, group, len(shown)),
            _merged(gradients, group, len(shown)),
            run.thresholds,
            [_of_layer(layer, course) for course in courses],
        )
        for layer, (health, gradients) in records.items()
    }
    scalars = [_scalar(name, *run.scalars[name], group, len(shown)) for name in run.scalars]
    return shown, lines, scalars


def _merged(
    records: Sequence[tuple[int, Part]], group: dict[int, int], groups: int
) -> list[Part | None]:
    parts: list[list[Part]] = [[] for _ in range(groups)]
    for step, part in records:
        parts[group[step]].append(part)
    return [many[0].merge(*many[1:]) if many else None for many in parts]


def _scalar(
    name: str, steps: NDArray[np.int64], values: Floats, group: dict[int, int], groups: int
) -> dict[str, Any]:
    """The mean of each group; numbers that are not finite are told of, for no line shows them."""
    finite = np.isfinite(values)
    at = [group[step] for step in steps[finite].tolist()]
    counts = np.bincount(at, minlength=groups)
    means = np.bincount(at, values[finite], groups) / np.where(counts, counts, np.nan)
    lost, label = steps[~finite], name
    if len(lost):
        label += f" (not finite at {plural(len(lost), 'step')}, first at step {lost[0]:,})"
    return {"name": name, "label": label, "values": plain(means.tolist(), _DIGITS)}


Course = tuple[Finding, ...] | None


def _of_layer(layer: str, course: Course) -> Course:
    """What of the course concerns a layer, without the numbers, so that few are different."""
    if course is None:
        return None
    return tuple(
        replace(each, reason="", evidence=(), since=None, forecast=each.forecast and "so")
        for each in course
        if each.scope == MODEL or each.layer == layer
    )


def _lines(
    health: list[Health | None],
    gradients: list[GradHealth | None],
    thresholds: Thresholds,
    courses: list[Course],
) -> dict[str, Any]:
    """Statistic → head → value at each point; and per head a letter and a mark at each point."""
    heads = next((part.shape[-1] for part in reversed(health) if part is not None), 0)
    series = _values(health, Health.FIELDS, heads)
    if any(part is not None for part in gradients):
        series |= _values(gradients, GradHealth.FIELDS, heads)
    return {"series": series, **_verdicts(health, gradients, thresholds, courses, heads)}


def _values(
    parts: Sequence[PerHead | None], names: Iterable[str], heads: int
) -> dict[str, list[list[float | None]]]:
    points = [None if part is None else plain(part.to_dict(), _DIGITS) for part in parts]
    return {
        name: [
            [None if point is None else point[name][head] for point in points]
            for head in range(heads)
        ]
        for name in names
    }


def _verdicts(
    health: list[Health | None],
    gradients: list[GradHealth | None],
    thresholds: Thresholds,
    courses: list[Course],
    heads: int,
) -> dict[str, list[str]]:
    """The verdict's letter and the level's mark; a blank where the layer took no part."""
    letters = [[" "] * len(health) for _ in range(heads)]
    marks = [[" "] * len(health) for _ in range(heads)]
    for course in dict.fromkeys(courses):
        # Points instead of layers: all that have one course are judged at once.
        places = [place for place, each in enumerate(courses) if each == course]
        points = Evidence(
            {str(place): part for place in places if (part := health[place]) is not None},
            {str(place): heard for place in places if (heard := gradients[place]) is not None},
            None
            if course is None
            else tuple(replace(each, layer=str(place)) for each in course for place in places),
        )
        for point, said in judge(points, thresholds).items() if points.health else ():
            place = int(point)
            for head, (name, level) in enumerate(zip(said.names, said.levels, strict=True)):
                letters[head][place], marks[head][place] = VERDICTS[name].letter, MARKS[level]
    return {
        "verdicts": ["".join(line) for line in letters],
        "levels": ["".join(line) for line in marks],
    }
