"""What the page of a run shows, point by point: its steps, thinned to what a page can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._health import LEVELS, Evidence, Finding, GradHealth, Health, judge
from .._health.describe import at_steps, headline
from .._health.findings import worst_first
from .._health.judge import Heads, wide_findings
from ..store import Run
from ._packed import DIGITS, FEW_DIGITS, pack_bytes, pack_floats
from ._tables import charted

MOST_POINTS = 300  # a screen has hardly more pixels for them
FEWEST_POINTS = 60
MOST_READ = 1_280_000  # heads × steps: more would take long to read, and make a large page
ROOM = 1_800_000  # characters of packed numbers
OnPoint = Callable[[int, int], None]  # points read, points in all
NOT_THERE = 255  # the code of a head whose layer took no part


@dataclass(frozen=True)
class Point:
    """A step of the page, which may stand for those since the point before it.

    layers:   where the heads of each layer stand in what follows
    findings: of the model and its layers, and the nearest forecast of a head
    codes:    verdict and level of each head in one number, as `_head` reads it
    values:   statistic → of each head
    """

    step: int
    headline: str
    findings: tuple[Finding, ...]
    layers: dict[str, slice]
    codes: NDArray[np.uint8]
    values: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Plan:
    """Which steps are read, by their places in `Run.steps`: a list for every point.

    steps: how many the run has
    most:  points that a page of it can hold
    """

    groups: list[list[int]]
    steps: int
    most: int = MOST_POINTS

    def with_more(self, groups: list[list[int]]) -> Plan:
        """The same with points for steps that have come since."""
        return Plan([*self.groups, *groups], self.steps + len(groups), self.most)

    @property
    def words(self) -> str:
        """What is left out, in words; "" if nothing is."""
        shown, read = len(self.groups), sum(map(len, self.groups))
        if shown == self.steps:
            return ""
        kept = "the first, the last, those with alerts, and others evenly between"
        if read == self.steps:
            return (
                f"{shown:,} of {self.steps:,} steps are shown: {kept}. Each stands for itself and "
                "those since the one before it, and keeps their largest score."
            )
        return (
            f"{shown:,} of {self.steps:,} steps are shown: {kept}. The run is so large that "
            f"{read:,} of its steps were read; what happened only between them, and raised no "
            "alert, is not seen."
        )


def plan(run: Run) -> Plan:
    """The points of a run: its first and last step, those with alerts, and others between."""
    order = sorted(range(len(run.steps)), key=run.steps.__getitem__)
    if not order:
        return Plan([], 0)
    heads = sum(part.shape[-1] for part in run.together(order[-1:]).health.values())
    readable = max(FEWEST_POINTS, MOST_READ // max(1, heads))
    points = min(MOST_POINTS, readable)
    if len(order) <= points:
        return Plan([[place] for place in order], len(order), points)
    ends = {0, len(order) - 1}
    at = {run.steps[place]: rank for rank, place in enumerate(order)}
    for alert in sorted(run.alerts, key=lambda each: LEVELS.index(each.level)):
        if len(ends) < points // 2 and alert.step in at:
            ends.add(at[alert.step])
    even = np.linspace(0, len(order) - 1, points - len(ends) + 2).round().astype(int)
    last = sorted(ends.union(even.tolist()))
    groups = [order[start + 1 : end + 1] for start, end in zip([-1, *last], last, strict=False)]
    most = max(1, readable // len(groups))
    return Plan([_evenly(group, most) for group in groups], len(order), points)


def _evenly(places: list[int], most: int) -> list[int]:
    """So many of them, the last among them."""
    if len(places) <= most:
        return places
    chosen = np.linspace(len(places) - 1, 0, most, endpoint=False).round().astype(int)
    return [places[at] for at in sorted(chosen.tolist())]


class Points:
    """The points of a run, read in the order of their steps; more can be added as it goes on."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.heads: Heads | None = None  # at the last point
        # Each layer at the last step that it took part in.
        self._health: dict[str, Health] = {}
        self._gradients: dict[str, GradHealth] = {}
        self._seen: dict[str, int] = {}

    def read(
        self, run: Run, groups: Sequence[Sequence[int]], on_point: OnPoint = lambda *_: None
    ) -> None:
        """Add a point for every group of steps, given by their places in the run."""
        for done, places in enumerate(groups):
            on_point(done, len(groups))
            self._add(run, run.together(places), run.steps[places[-1]])

    def _add(self, run: Run, now: Evidence, step: int) -> None:
        for layer, part in now.health.items():
            self._health[layer], self._seen[layer] = part, step
            self._gradients.pop(layer, None)
            if layer in now.gradients:
                self._gradients[layer] = now.gradients[layer]
        if not self._health:  # all that was seen were gradients
            return
        health, gradients = dict(self._health), dict(self._gradients)
        evidence = replace(now, health=health, gradients=gradients)
        heads = Heads(evidence, run.thresholds)
        codes = (heads.chosen * len(LEVELS) + heads.worst).astype(np.uint8)
        here = np.zeros(heads.count, np.bool_)
        for layer in now.health:
            here[heads.places[layer]] = True
        wide = wide_findings(heads)
        known = {code: _head(heads.order, code) for code in set(codes.tolist())}
        judged = [known[code] for code in codes.tolist()]
        said = headline(judged, at_steps(self._seen.values()), wide)
        values = {each.name: heads.values(each.name).astype(np.float32) for each in charted()}
        for each in values.values():
            each[~here] = np.nan
        codes[~here] = NOT_THERE
        foretold = worst_first(heads.told.values())[:1]
        found = (*wide, *foretold)
        self.points.append(Point(step, said, found, heads.places, codes, values))
        self.heads = heads

    def worst(self) -> tuple[str, int, str] | None:
        """Layer, head and verdict of the worst head at the last point."""
        if self.heads is None:
            return None
        judged = judge(self.heads.evidence, self.heads.at)
        layer, head = min(
            ((layer, head) for layer, said in judged.items() for head in range(len(said))),
            key=lambda entry: judged[entry[0]].severity(entry[1]),
        )
        return layer, head, judged[layer].names[head]

    def layout(self) -> dict[str, int]:
        """Every layer that was seen, and how many heads it has."""
        found: dict[str, int] = {}
        for point in self.points:
            for layer, place in point.layers.items():
                found[layer] = max(found.get(layer, 0), place.stop - place.start)
        return found

    def packed(self, start: int = 0, room: int = ROOM) -> tuple[dict[str, str], int]:
        """The numbers of the points from `start` on, for assets/packed.js.

        Statistics come in the order of `charted` as long as there is room; the second number
        says how many there was none for.
        """
        layout, points = self.layout(), self.points[start:]
        count = sum(layout.values())
        digits = DIGITS if count * len(points) <= MOST_READ // 4 else FEW_DIGITS
        codes = _laid_out([point.codes for point in points], points, layout, NOT_THERE)
        packed = {"codes": pack_bytes(np.ascontiguousarray(codes.T))}
        measured = [
            each.name
            for each in charted()
            if not all(np.isnan(point.values[each.name]).all() for point in points)
        ]
        for place, name in enumerate(measured):
            numbers = [point.values[name] for point in points]
            text = pack_floats(_laid_out(numbers, points, layout, np.nan), digits)
            if place > 1 and sum(map(len, packed.values())) + len(text) > room:
                return packed, len(measured) - place
            packed[name] = text
        return packed, 0


def _laid_out(
    parts: Sequence[NDArray[Any]], points: Sequence[Point], layout: dict[str, int], nothing: float
) -> NDArray[Any]:
    """Of shape (points, heads): every layer at its place, whichever there were at a point."""
    starts = dict(zip(layout, np.cumsum([0, *layout.values()]).tolist(), strict=False))
    everywhere = {layer: slice(starts[layer], starts[layer] + n) for layer, n in layout.items()}
    dtype = parts[0].dtype if parts else np.float32
    together = np.full((len(parts), sum(layout.values())), nothing, dtype)
    for line, part, point in zip(together, parts, points, strict=True):
        if point.layers == everywhere:  # nearly always
            line[:] = part
            continue
        for layer, place in point.layers.items():
            line[starts[layer] :][: place.stop - place.start] = part[place]
    return together


def _head(order: Sequence[str], code: int) -> dict[str, str]:
    """Verdict and level of a code."""
    verdict, level = divmod(code, len(LEVELS))
    return {"verdict": order[verdict], "level": LEVELS[level]}
