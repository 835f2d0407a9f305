"""When a head's verdict turns worse: one alert a change."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .._health import HEALTH_SUMS, Health
from .._per_head import Floats
from .._records import Alert
from .._verdicts import _ORDER, LEVELS, Thresholds, Verdict

_LOUD = LEVELS[:3]  # critical, error, warning
_SLACK = 1e-9
_AT = {name: column for column, name in enumerate(HEALTH_SUMS)}


class Judge:
    """Remembers how bad each head was, and tells when one gets worse."""

    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self._changed = thresholds
        self._thresholds = Thresholds().changed(thresholds)
        self._bad: dict[tuple[str, int], Verdict] = {}
        self._last: dict[str, Health] = {}

    def judge(self, step: int, health: Mapping[str, Health]) -> tuple[Alert, ...]:
        """Alerts of one recorded step, the worst first."""
        before, self._last = self._last, {**self._last, **health}
        # Nearly always all is well; a look at all heads at once is much quicker than verdicts.
        if not self._bad and not self._may_be_bad([part.sums for part in health.values()]):
            return ()
        found = []
        for layer, heads in health.items():
            for verdict in heads.verdicts(**self._changed):
                last = self._bad.pop((layer, verdict.head), None)
                if verdict.level not in _LOUD:
                    continue
                self._bad[layer, verdict.head] = verdict
                if last is None:
                    last = self._verdict(before.get(layer), verdict.head)
                if last is None or _rank(verdict) < _rank(last):
                    found.append((_rank(verdict), _alert(step, layer, verdict, last, heads)))
        return tuple(alert for _, alert in sorted(found, key=lambda entry: entry[0]))

    def _may_be_bad(self, layers: list[Floats]) -> bool:
        """Whether any head could get a verdict that is loud; rounding must not hide one."""
        at, sums = self._thresholds, np.concatenate(layers)
        column = {name: sums[:, place] for name, place in _AT.items()}
        score = min(at.exploding_warning, at.exploding, at.exploding_critical)
        return bool(
            (column["nonfinite_rows"] > 0).any()
            or (column["score_max"] >= score).any()
            or (column["score_min"] <= -score).any()
            or (column["saturated"] > at.saturated * (1 - _SLACK) * column["choice_rows"]).any()
            or (column["entropy_ratio"] < at.collapsed * (1 + _SLACK) * column["choice_rows"]).any()
        )

    def _verdict(self, heads: Health | None, head: int) -> Verdict | None:
        verdicts = [] if heads is None else heads.verdicts(**self._changed)
        return next((verdict for verdict in verdicts if verdict.head == head), None)


def _rank(verdict: Verdict) -> tuple[int, int]:
    """Smaller is worse: by level, then by rule."""
    return LEVELS.index(verdict.level), _ORDER[verdict.verdict]


def _alert(step: int, layer: str, verdict: Verdict, last: Verdict | None, heads: Health) -> Alert:
    at = verdict.head
    value = {
        "nonfinite": heads.nonfinite_rows[at],
        "exploding": max(abs(heads.score_max[at]), abs(heads.score_min[at])),
        "saturated": heads.saturated[at],
        "collapsed": heads.entropy_ratio[at],
    }[verdict.verdict]
    previous = last.verdict if last else "not seen before"
    return Alert(
        step=step,
        layer=layer,
        head=at,
        verdict=verdict.verdict,
        level=verdict.level,
        previous=f"{previous}, {last.level}" if last and previous == verdict.verdict else previous,
        value=float(value),
        reason=verdict.reason,
        hint=verdict.hint,
    )
