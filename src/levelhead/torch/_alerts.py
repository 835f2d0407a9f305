"""When a head's verdict turns worse: one alert per change."""

from __future__ import annotations

from typing import NamedTuple

from .._health import Judgement
from .._health.verdicts import SHORT
from .._records import Alert, StepRecord


class _Last(NamedTuple):
    """How a head was when it was last judged."""

    rank: tuple[int, int]  # smaller is worse
    verdict: str
    level: str


class Changes:
    """Remembers how bad each head was, and tells when one gets worse."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], _Last] = {}  # by layer and head

    def alerts(self, record: StepRecord) -> tuple[Alert, ...]:
        """Alerts of one recorded step, the worst first."""
        found = []
        for layer, judged in record.judged.items():
            ranks = judged.ranks
            for head in judged.loud:
                last = self._last.get((layer, head))
                if last is None or ranks[head] < last.rank:
                    alert = _alert(record.step, layer, judged, head, last)
                    found.append((judged.severity(head), alert))
            for head, now in enumerate(zip(ranks, judged.names, judged.levels, strict=True)):
                if now[1] != SHORT:  # a head that cannot be judged for a while keeps its verdict
                    self._last[layer, head] = _Last(*now)
        return tuple(alert for _, alert in sorted(found, key=lambda entry: entry[0]))


def _alert(step: int, layer: str, judged: Judgement, head: int, last: _Last | None) -> Alert:
    verdict = judged[head]
    previous = "not seen before" if last is None else last.verdict
    if last is not None and last.verdict == verdict.verdict:
        previous = f"{last.verdict}, {last.level}"
    return Alert(
        step=step,
        layer=layer,
        head=head,
        verdict=verdict.verdict,
        level=verdict.level,
        previous=previous,
        value=judged.value(head),
        reason=verdict.reason,
        hint=verdict.hint,
    )
