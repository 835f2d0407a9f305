"""Two runs, or two models, side by side: what differs, and what got better or worse, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._health import LEVELS, GradHealth
from .._health.describe import Head, describe, judged_as, listed, needs_attention, plural
from .._health.describe import count as counted
from .._health.judge import judge
from .._health.numbers import number
from .._health.statistics import Statistic
from ..checkup._what_if import compared
from ..store import Run
from ._names import short_names
from ._points import Points, plan

MOST_NAMED = 3  # heads in a sentence
MUCH = 0.1  # of a number, from which a change is worth a word
_CHANGES = {True: "better", False: "worse"}


class CompareError(ValueError):
    """Two things that cannot be compared; the message says why."""


@dataclass(frozen=True)
class Side:
    """One of the two.

    layers:  name → its heads as `describe` gives them, as they are now
    scalars: what was logged: steps and values
    alerts:  how many were raised; None where nobody watched
    """

    name: str
    about: str
    layers: Mapping[str, Sequence[Head]]
    scalars: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    alerts: int | None = None
    run: Run | None = None
    points: Points | None = None


def side_of_run(run: Run, name: str) -> Side:
    """A run as it was last, with its course."""
    points = Points()
    points.read(run, plan(run).groups)
    if points.heads is None:
        raise CompareError(f"{name} has no recorded step to compare")
    seen = points.heads
    heads = describe(seen.evidence, judge(seen.evidence, seen.at))
    steps = f"{plural(len(run.steps), 'step')}, the last is {max(run.steps):,}"
    about = " · ".join(filter(None, (run.model, steps, plural(len(run.alerts), "alert"))))
    return Side(name, about, heads, run.scalars, len(run.alerts), run, points)


def side_of_checkup(result: Mapping[str, Any], about: str) -> Side:
    """A model as a checkup found it."""
    layers = {layer["name"]: layer["heads"] for layer in result["layers"]}
    return Side(result["model"], about, layers)


@dataclass(frozen=True)
class Pair:
    """A head in both: where it stands, and what it was and is."""

    layer: str
    head: int
    before: Head
    after: Head

    @property
    def name(self) -> str:
        return f"{self.layer}, head {self.head}"

    @property
    def gain(self) -> int:
        """Above 0 if it got better: by how many levels, where one of them calls for action."""
        was, now = (LEVELS.index(each["level"]) for each in (self.before, self.after))
        if not (needs_attention(self.before) or needs_attention(self.after)):
            return 0
        return now - was


@dataclass(frozen=True)
class Comparison:
    """Two sides, head by head; `before` is what `after` is measured by.

    layers: (name in before, name in after)
    """

    before: Side
    after: Side
    layers: list[tuple[str, str]]
    notes: tuple[str, ...] = ()

    def pairs(self) -> Iterator[Pair]:
        """Every head that both have."""
        for (old, new), short in zip(self.layers, self.names, strict=True):
            both = zip(self.before.layers[old], self.after.layers[new], strict=False)
            yield from (Pair(short, head, *each) for head, each in enumerate(both))

    @property
    def names(self) -> list[str]:
        """The layers' names, made short."""
        return short_names([new for _, new in self.layers])

    def better(self) -> list[str]:
        """What got better, a sentence each."""
        return [*self._heads(True), *self._numbers(True), *self._logged(True)]

    def worse(self) -> list[str]:
        """What got worse, a sentence each."""
        return [*self._heads(False), *self._numbers(False), *self._logged(False)]

    def headline(self) -> str:
        """The one sentence that a hurried reader takes along."""
        old, new = (sum(map(needs_attention, _all(side))) for side in (self.before, self.after))
        gains = [pair.gain for pair in self.pairs()]
        said = (
            f"{_none(new)} of {plural(len(_all(self.after)), 'head')} "
            f"{'needs' if new == 1 else 'need'} attention in "
            f"{self.after.name}, {_none(old)} of {len(_all(self.before)):,} in {self.before.name}"
        )
        if not any(gains):
            return f"Much the same: {said}."
        if min(gains) >= 0 or max(gains) <= 0:
            word = _CHANGES[max(gains) > 0]
            return f"{self.after.name} is {word} than {self.before.name}: {said}."
        up, down = (sum(1 for gain in gains if gain * sign > 0) for sign in (1, -1))
        return f"{plural(up, 'head')} better, {down} worse: {said}."

    def _heads(self, better: bool) -> Iterator[str]:
        """Heads that turned, together where they turned alike."""
        turned: dict[tuple[str, str], list[Pair]] = {}
        for pair in self.pairs():
            if pair.gain and (pair.gain > 0) == better:
                kinds = (judged_as(pair.before), judged_as(pair.after))
                turned.setdefault(kinds, []).append(pair)
        for (was, now), pairs in sorted(turned.items(), key=lambda item: -len(item[1])):
            names = "; ".join(pair.name for pair in pairs[:MOST_NAMED])
            more = f" and {len(pairs) - MOST_NAMED} more" if len(pairs) > MOST_NAMED else ""
            yield f"{plural(len(pairs), 'head')}: {was} → {now} ({names}{more})."

    def _numbers(self, better: bool) -> Iterator[str]:
        """The numbers that tell how a model is, where they have moved."""
        pairs = list(self.pairs())
        for each in (*compared(), GradHealth.survival):
            was, now = (
                _together(each, [getattr(pair, side) for pair in pairs])
                for side in ("before", "after")
            )
            if was is None or now is None or abs(now - was) <= MUCH * max(abs(was), abs(now)):
                continue
            if ((now > was) == (each.bad == "low")) == better:
                verb = "rose" if now > was else "fell"
                typical = "" if each.compared == "max" else ", the mean of the heads,"
                from_to = f"from {number(was, '.3g')} to {number(now, '.3g')}"
                yield f"{each.label[0].upper()}{each.label[1:]}{typical} {verb} {from_to}."

    def _logged(self, better: bool) -> Iterator[str]:
        """The loss, and how often something had to be told."""
        was, now = (_last(side, "loss") for side in (self.before, self.after))
        if was is not None and now is not None and was != now and (now < was) == better:
            verb = "lower" if now < was else "higher"
            yield f"The last loss is {verb}: {number(now)} instead of {number(was)}."
        old, new = self.before.alerts, self.after.alerts
        if old is not None and new is not None and old != new and (new < old) == better:
            yield f"{plural(new, 'alert')} instead of {old:,}."


def compare(before: Side, after: Side, notes: Sequence[str] = ()) -> Comparison:
    """Bring the heads of two sides together, by their layers' names, or else by their order."""
    shared = [(name, name) for name in before.layers if name in after.layers]
    told = list(notes)
    if not shared and len(before.layers) == len(after.layers):
        shared = list(zip(before.layers, after.layers, strict=True))
        told.append("Their layers have different names and are compared in their order.")
    if not shared:
        raise CompareError(
            f"{before.name} and {after.name} have no layer in common: their layers are "
            f"{_few(before.layers)} and {_few(after.layers)}"
        )
    for side, place in ((before, 0), (after, 1)):
        alone = [name for name in side.layers if name not in {pair[place] for pair in shared}]
        if alone:
            told.append(f"Only in {side.name}: {_few(alone)}.")
    if any(len(before.layers[old]) != len(after.layers[new]) for old, new in shared):
        told.append("Some layers have more heads in one of them; the others are compared.")
    return Comparison(before, after, shared, tuple(told))


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """What the checkup's JSON says of the other model."""
    other = comparison.before
    return {
        "model": other.name,
        "headline": comparison.headline(),
        "better": comparison.better(),
        "worse": comparison.worse(),
        "notes": list(comparison.notes),
        "verdicts": dict(counted(_all(other))),
        "layers": [{"name": name, "heads": list(heads)} for name, heads in other.layers.items()],
    }


def comparison_text(comparison: Comparison) -> str:
    """The same for a terminal."""
    lines = [comparison.headline(), *comparison.notes]
    for side in (comparison.before, comparison.after):
        lines.append(f"  {side.name}: {listed(counted(_all(side)))}")
    for title, said in (("Better", comparison.better()), ("Worse", comparison.worse())):
        lines += [title, *(f"  {each}" for each in said)] if said else []
    return "\n".join(lines)


def _together(each: Statistic, heads: Sequence[Head]) -> float | None:
    """One number of all heads: their mean, or the largest where that is what counts."""
    values = [value for head in heads if (value := head.get(each.name)) is not None]
    if not values:
        return None
    return float(max(values) if each.compared == "max" else np.mean(values))


def _all(side: Side) -> list[Head]:
    return [head for heads in side.layers.values() for head in heads]


def _last(side: Side, name: str) -> float | None:
    """The last number of a scalar: the mean of its last tenth, for a single step is noisy."""
    if name not in side.scalars:
        return None
    values = np.asarray(side.scalars[name][1])
    values = values[-max(1, len(values) // 10) :]
    return float(values.mean()) if np.isfinite(values).all() else None


def _none(many: int) -> str:
    return f"{many:,}" if many else "none"


def _few(names: Sequence[str] | Mapping[str, Any]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
