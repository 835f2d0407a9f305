"""A run's statistics over its steps, thinned to what a page can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .._health import GradHealth, Health
from ._fields import FIELDS, GRADIENT_FIELDS
from ._legend import LEGEND

if TYPE_CHECKING:
    from .._per_head import PerHead
    from ._run_page import RunLike

    Part = TypeVar("Part", bound=PerHead)

MOST_POINTS = 400  # of a line; a screen has hardly more pixels for it
MOST_NUMBERS = 1_500_000


def thinned(run: RunLike) -> tuple[list[int], dict[str, dict[str, Any]]]:
    """The steps shown, and per layer its lines.

    Where a run has too many steps, neighbours are merged, not dropped: the largest score of the
    group stays the largest score. A group goes by its last step.
    """
    steps = list(dict.fromkeys(run.steps))
    records = {layer: (run.health(layer), run.gradients(layer)) for layer in run.layers}
    heads = sum(health[-1][1].shape[-1] for health, _ in records.values() if health)
    room = MOST_NUMBERS // max(1, heads * (len(FIELDS) + len(GRADIENT_FIELDS)))
    size = max(1, math.ceil(len(steps) / max(20, min(MOST_POINTS, room))))
    group = {step: place // size for place, step in enumerate(steps)}
    shown = [steps[min(start + size, len(steps)) - 1] for start in range(0, len(steps), size)]
    return shown, {
        layer: _lines(_merged(health, group, len(shown)), _merged(gradients, group, len(shown)))
        for layer, (health, gradients) in records.items()
    }


def _merged(
    records: Sequence[tuple[int, Part]], group: dict[int, int], groups: int
) -> list[Part | None]:
    parts: list[list[Part]] = [[] for _ in range(groups)]
    for step, part in records:
        parts[group[step]].append(part)
    return [many[0].merge(*many[1:]) if many else None for many in parts]


def _lines(health: list[Health | None], gradients: list[GradHealth | None]) -> dict[str, Any]:
    """Statistic → head → value at each point; and per head its verdicts, a letter a point."""
    heads = next((part.shape[-1] for part in reversed(health) if part is not None), 0)
    series = _values(health, FIELDS, heads)
    if any(part is not None for part in gradients):
        series |= _values(gradients, GRADIENT_FIELDS, heads)
    return {"series": series, "verdicts": _letters(health, heads)}


def _values(
    parts: Sequence[PerHead | None], names: Iterable[str], heads: int
) -> dict[str, list[list[float | None]]]:
    points = [None if part is None else part.to_dict() for part in parts]
    return {
        name: [
            [None if point is None else _short(point[name][head]) for point in points]
            for head in range(heads)
        ]
        for name in names
    }


def _letters(parts: Sequence[Health | None], heads: int) -> list[str]:
    """A blank where the layer took no part."""
    unjudged = [" " if part is None else LEGEND["short"].letter for part in parts]
    letters = [list(unjudged) for _ in range(heads)]
    for place, part in enumerate(parts):
        for verdict in part.verdicts() if part is not None else ():
            letters[verdict.head][place] = LEGEND[verdict.verdict].letter
    return ["".join(line) for line in letters]


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
