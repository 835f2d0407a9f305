"""When a head's verdict turns worse: one alert a change."""

from __future__ import annotations

from collections.abc import Mapping

from .._health import Health
from .._records import Alert
from .._verdicts import LEVELS, Verdict

_LOUD = LEVELS[:3]  # critical, error, warning


class Judge:
    """Remembers how bad each head was, and tells when one gets worse."""

    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self._thresholds = thresholds
        self._last: dict[tuple[str, int], Verdict] = {}

    def judge(self, step: int, health: Mapping[str, Health]) -> tuple[Alert, ...]:
        """Alerts of one recorded step, the worst first."""
        alerts = []
        for layer, heads in health.items():
            for verdict in heads.verdicts(**self._thresholds):
                place = layer, verdict.head
                last, self._last[place] = self._last.get(place), verdict
                before = LEVELS.index(last.level) if last else len(LEVELS)
                if verdict.level in _LOUD and LEVELS.index(verdict.level) < before:
                    alerts.append(_alert(step, layer, verdict, last, heads))
        return tuple(sorted(alerts, key=lambda alert: LEVELS.index(alert.level)))


def _alert(step: int, layer: str, verdict: Verdict, last: Verdict | None, heads: Health) -> Alert:
    at = verdict.head
    value = {
        "nonfinite": heads.nonfinite_rows[at],
        "exploding": max(abs(heads.score_max[at]), abs(heads.score_min[at])),
        "saturated": heads.saturated[at],
        "collapsed": heads.entropy_ratio[at],
    }[verdict.verdict]
    return Alert(
        step=step,
        layer=layer,
        head=at,
        verdict=verdict.verdict,
        level=verdict.level,
        previous=last.verdict if last else "not seen before",
        value=float(value),
        reason=verdict.reason,
        hint=verdict.hint,
    )
