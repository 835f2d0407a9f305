"""Telling of findings: once, together, and again only when they get worse or are over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..._health import Evidence, Finding, History, Thresholds
from ..._health.findings import worst_first
from ..._health.judge import Heads
from ..._health.verdicts import LEVELS
from ..._records import TRAINING, Alert, StepRecord

_MANY_MORE = 2  # an alert is repeated when so many times as many heads are concerned


@dataclass(frozen=True)
class _Told:
    """What was said last of a kind of finding."""

    level: str
    heads: int
    worst: Finding


class Alerts:
    """Judges the steps of a phase as they come, and tells of what turns bad or recovers.

    course: what holds now, by the course of the phase
    """

    def __init__(self, phase: str, thresholds: Thresholds) -> None:
        self._history = History(thresholds, trains=phase == TRAINING)
        self._thresholds = thresholds
        self._told: dict[str, _Told] = {}
        self._advised: set[str] = set()

    @property
    def course(self) -> tuple[Finding, ...]:
        return self._history.findings

    def of(self, record: StepRecord, loss: float | None = None) -> tuple[Alert, ...]:
        """Alerts of one recorded step, the worst first; heads with one verdict make one alert."""
        evidence = Evidence(record.health, record.gradients, (), record.scales)
        self._history.observe(record.step, Heads(evidence, self._thresholds), loss)
        kinds: dict[str, list[Finding]] = {}
        for finding in worst_first([each for each in self.course if each.is_loud]):
            kinds.setdefault(finding.name, []).append(finding)
        alerts = [alert for name, kind in kinds.items() if (alert := self._new(record, name, kind))]
        alerts.sort(key=lambda alert: LEVELS.index(alert.level))
        over = [name for name in self._told if name not in kinds]
        return (*alerts, *(self._recovery(record, name) for name in over))

    def _new(self, record: StepRecord, name: str, kind: Sequence[Finding]) -> Alert | None:
        worst, heads = kind[0], sum(finding.heads for finding in kind)
        told = self._told.get(name)
        worse = told is None or LEVELS.index(worst.level) < LEVELS.index(told.level)
        if told and not worse and heads < _MANY_MORE * told.heads:
            return None
        self._told[name] = _Told(worst.level, heads, worst)
        advice = "" if name in self._advised else worst.hint
        self._advised.add(name)
        previous = "" if told is None else f"{told.level}, {told.heads}"
        reason = f"{worst.reason}. {worst.forecast}" if worst.forecast else worst.reason
        return _alert(record, worst, worst.level, heads, previous, reason, advice)

    def _recovery(self, record: StepRecord, name: str) -> Alert:
        told = self._told.pop(name)
        reason = f"recovered: what was told at level {told.level} is over"
        return _alert(record, told.worst, "ok", told.heads, told.level, reason, "")


def _alert(
    record: StepRecord,
    worst: Finding,
    level: str,
    heads: int,
    previous: str,
    reason: str,
    hint: str,
) -> Alert:
    return Alert(
        step=record.step,
        layer=worst.layer,
        head=worst.head or 0,
        verdict=worst.name,
        level=level,
        previous=previous,
        value=worst.evidence[0].value if worst.evidence else math.nan,
        reason=reason,
        hint=hint,
        phase=record.phase,
        scope=worst.scope,
        heads=heads,
        since=record.step if worst.since is None else worst.since,
    )
