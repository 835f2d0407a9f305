"""The alerts of a run, together where they are of one kind: its advice is then said once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._health import LEVELS, Finding
from .._health.describe import plural
from .._health.findings import HEAD, LAYER
from .._health.verdicts import SHARP, VERDICTS
from .._records import Alert
from ._points import Point

MOST_ALERTS = 500


def alert_groups(alerts: Sequence[Alert], layers: Mapping[str, str]) -> list[dict[str, Any]]:
    """By verdict, the worst first; in each the latest alerts, the newest first.

    layers: name → short name; an alert of another layer is left out
    """
    found: dict[str, list[Alert]] = {}
    for alert in alerts:
        if alert.layer in layers:
            found.setdefault(alert.verdict, []).append(alert)
    groups = [_group(name, of, list(layers), layers) for name, of in found.items()]
    return sorted(groups, key=lambda group: LEVELS.index(group["level"]))


def _group(
    verdict: str, alerts: list[Alert], order: Sequence[str], layers: Mapping[str, str]
) -> dict[str, Any]:
    steps = [alert.step for alert in alerts]
    when = f"at step {steps[0]:,}"
    if min(steps) < max(steps):
        when = f"steps {min(steps):,} to {max(steps):,}"
    return {
        "verdict": verdict,
        "mark": mark(verdict),
        "level": min((alert.level for alert in alerts), key=LEVELS.index),
        "title": f"{verdict}: {plural(len(alerts), 'alert')}, {when}",
        "hint": next((alert.hint for alert in reversed(alerts) if alert.hint), ""),
        "left_out": max(0, len(alerts) - MOST_ALERTS),
        "alerts": [
            {
                "step": alert.step,
                "layer": order.index(alert.layer),
                "head": alert.head,
                "level": alert.level,
                "where": _where(alert, layers[alert.layer]),
                "reason": alert.reason,
            }
            for alert in reversed(alerts[-MOST_ALERTS:])
        ],
    }


def _where(alert: Alert, layer: str) -> str:
    if alert.scope != HEAD:
        return layer if alert.scope == LAYER else "the model"
    head = f"{layer}, head {alert.head}"
    return f"{alert.heads} heads, the worst {head}" if alert.heads > 1 else head


def finding_spans(points: Sequence[Point]) -> list[dict[str, Any]]:
    """From which point to which one a finding of the model or a layer was there."""
    spans: list[dict[str, Any]] = []
    going: dict[Any, dict[str, Any]] = {}
    for place, point in enumerate(points):
        found = {each.key: each for each in point.findings if each.scope != HEAD}
        going = {key: span for key, span in going.items() if key in found}
        for key, finding in found.items():
            if key not in going:
                going[key] = {"name": finding.name, "from": place, "level": finding.level}
                spans.append(going[key])
            worse = min(going[key]["level"], finding.level, key=LEVELS.index)
            going[key] |= {"to": place, "level": worse, **said_of(finding)}
    return spans


def said_of(finding: Finding) -> dict[str, str]:
    """A finding as the page shows it."""
    return {"mark": mark(finding.name), "level": finding.level, "text": str(finding)}


def mark(verdict: str) -> str:
    """The head's verdict whose letter and colour a finding of the whole model takes."""
    if verdict in VERDICTS:
        return verdict
    return "saturated" if verdict in (*SHARP, "scale") else "uniform"
