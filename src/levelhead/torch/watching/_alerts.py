"""When a head's verdict turns worse: one alert per change."""

from __future__ import annotations

from typing import NamedTuple

from ..._health import Judgement
from ..._health.verdicts import SHORT
from ..._records import Alert, StepRecord


class _Was(NamedTuple):
    """How a head was judged."""

    rank: tuple[int, int]  # smaller is worse
    verdict: str
    level: str


class Changes:
    """Remembers how bad each head was, and says when one gets worse."""

    def __init__(self) -> None:
        self._last: dict[str, Judgement] = {}  # of each layer, when it was last seen
        self._bad: dict[tuple[str, int], _Was] = {}  # heads that have been reported

    def alerts(self, record: StepRecord) -> tuple[Alert, ...]:
        """Alerts of one recorded step, the worst first."""
        before, self._last = self._last, {**self._last, **record.judged}
        found = []
        for layer, judged in record.judged.items():
            loud = judged.loud
            if not loud and not self._bad:
                continue  # as nearly always
            past, now = _all(before.get(layer)), _all(judged)
            for head, is_now in now.items():
                was = self._bad.pop((layer, head), past.get(head))
                if head not in loud:
                    continue
                self._bad[layer, head] = is_now
                if was is None or is_now.rank < was.rank:
                    alert = _alert(record, layer, judged, head, was)
                    found.append((judged.severity(head), alert))
        return tuple(alert for _, alert in sorted(found, key=lambda entry: entry[0]))


def _all(judged: Judgement | None) -> dict[int, _Was]:
    """Every head of a layer; one that cannot be judged now stays as it was, so it is left out."""
    if judged is None:
        return {}
    heads = zip(judged.ranks, judged.names, judged.levels, strict=True)
    return {head: _Was(*was) for head, was in enumerate(heads) if was[1] != SHORT}


def _alert(
    record: StepRecord, layer: str, judged: Judgement, head: int, last: _Was | None
) -> Alert:
    verdict = judged[head]
    previous = "not seen before" if last is None else last.verdict
    if last is not None and last.verdict == verdict.verdict:
        previous = f"{last.verdict}, {last.level}"
    return Alert(
        step=record.step,
        layer=layer,
        head=head,
        verdict=verdict.verdict,
        level=verdict.level,
        previous=previous,
        value=judged.value(head),
        reason=verdict.reason,
        hint=verdict.hint,
        phase=record.phase,
    )
