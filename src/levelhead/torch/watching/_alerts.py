"""Telling of findings: once, together, and again only when they get worse or are over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..._health import Finding, History, Judgement, Thresholds
from ..._health.findings import HEAD, worst_first
from ..._health.judge import Heads
from ..._health.trends import Loss
from ..._health.verdicts import LEVELS, SHARP
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

    @property
    def loss(self) -> Loss:
        return self._history.loss

    def judge(self, record: StepRecord, loss: float | None = None) -> StepRecord:
        """A recorded step with its course, its verdicts and its alerts."""
        evidence = replace(record.evidence, course=())
        heads = Heads(evidence, self._thresholds)
        self._history.observe(record.step, heads, loss)
        heads = heads.seen_in(self.course)
        alerts = self._alerts(record, heads)
        return replace(record, alerts=alerts, course=self.course).judged_by(heads)

    def _alerts(self, record: StepRecord, heads: Heads) -> tuple[Alert, ...]:
        """Those of one step, the worst first; heads with one verdict make one alert."""
        kinds: dict[str, list[Finding]] = {}
        for finding in worst_first([each for each in self.course if each.is_loud]):
            kinds.setdefault(_kind(finding), []).append(finding)
        news = (self._news(record, heads, name, kind) for name, kind in kinds.items())
        alerts = sorted(filter(None, news), key=lambda alert: LEVELS.index(alert.level))
        # What has become NaN has not recovered; nor has what goes on in another way.
        going_on = {_kind(each) for each in self._history.pending if each.is_loud}
        over = (
            [name for name in self._told if name not in kinds.keys() | going_on]
            if "nonfinite" not in kinds
            else []
        )
        return (*alerts, *(self._recovery(record, name) for name in over))

    def _news(
        self, record: StepRecord, heads: Heads, name: str, kind: Sequence[Finding]
    ) -> Alert | None:
        level, many = kind[0].level, sum(finding.heads for finding in kind)
        told = self._told.get(name)
        worse = told is None or LEVELS.index(level) < LEVELS.index(told.level)
        if told and not worse and many < _MANY_MORE * told.heads:
            return None
        worst = _worst(heads, [finding for finding in kind if finding.level == level])
        self._told[name] = _Told(level, many, worst)
        advice = "" if name in self._advised else worst.hint
        self._advised.add(name)
        previous = "" if told is None else told.level
        reason = f"{worst.reason}. {worst.forecast}" if worst.forecast else worst.reason
        return _alert(record, worst, level, many, previous, reason, advice)

    def _recovery(self, record: StepRecord, name: str) -> Alert:
        told = self._told.pop(name)
        reason = f"recovered: what was told at level {told.level} is over"
        return _alert(record, told.worst, "ok", told.heads, told.level, reason, "")


def _kind(finding: Finding) -> str:
    """What is told together: that heads are sharp is one thing, whichever way they came to it."""
    return SHARP[0] if finding.name in SHARP else finding.name


def _worst(heads: Heads, findings: Sequence[Finding]) -> Finding:
    """The first that is not of a single head, else the worst head, in words of now."""
    if findings[0].scope != HEAD:
        return findings[0]
    judged = {layer: Judgement(heads, place) for layer, place in heads.places.items()}
    here = [
        (judged[each.layer].severity(each.head or 0), place)
        for place, each in enumerate(findings)
        if each.layer in judged
    ]
    worst = findings[min(here)[1] if here else 0]
    if worst.forecast or worst.layer not in judged:
        return worst
    now = judged[worst.layer][worst.head or 0]
    if (now.verdict, now.level) != (worst.name, worst.level):
        return worst
    return replace(heads.finding(worst.layer, now), since=worst.since)


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
