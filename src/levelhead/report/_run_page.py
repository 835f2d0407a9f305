"""A watched run as a page, finished or still running."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from .._files import write_whole
from .._health import Evidence, GradHealth, Health, findings, judge
from .._health.describe import at_steps, describe, headline, plural
from .._health.findings import HEAD
from .._health.judge import severity
from .._health.numbers import plain
from .._health.verdicts import MARKS, SHARP, SHORT, VERDICTS
from ..store import Run
from ._names import short_names
from ._page import asset, page
from ._series import thinned
from ._tables import colours, fields, guides, legend, telling

MOST_ALERTS = 500


def write_run_page(path: str | os.PathLike[str], run: Run) -> None:
    """Write the page of a run to a file, whole or not at all."""
    write_whole(Path(path), run_page(run))


def run_page(run: Run) -> str:
    """The page of a run as one HTML file."""
    script = asset("map.js") + asset("run.js")
    title = f"Run {run.name}" if run.name else "A watched run"
    return page(title, asset("run.html"), run_data(run), script, colours() + asset("map.css"))


def run_data(run: Run) -> dict[str, Any]:
    """All that the page shows, words included: its script only draws."""
    steps, lines, scalars = thinned(run)
    latest, last_steps = run.latest()
    layers = list(latest.health)
    # Of all steps together: sharp heads are judged by how the run has gone until now.
    whole = Evidence(run.total(), run.total_gradients(), latest.course)
    found = findings(latest, run.thresholds)
    heads = describe(whole, judge(whole, run.thresholds))
    last = describe(latest, judge(latest, run.thresholds))
    now = [(place, head) for place, layer in enumerate(layers) for head in last[layer]]
    worst = min(now, key=lambda entry: severity(entry[1]), default=None)
    chart = telling(worst[1]) if worst else None
    return {
        "headline": headline([head for _, head in now], at_steps(last_steps), found)
        if now
        else "No step is recorded yet.",
        "about": _about(run),
        "findings": [
            {"mark": _mark(each.name), "level": each.level, "text": str(each)}
            for each in [
                *(each for each in found if each.scope != HEAD),
                *[each for each in found if each.scope == HEAD and each.forecast][:1],
            ]
        ],
        "made": f"Made by levelhead {__version__} at {clock(time.time())}.",
        "legend": legend(),
        "levels": MARKS,
        "unjudged": SHORT,
        "fields": fields(Health, GradHealth),
        "guides": guides(run.thresholds),
        "steps": steps,
        "scalars": scalars,
        "layers": [
            {"name": layer, "short": name, "heads": heads[layer], "last": last[layer]}
            | lines[layer]
            for layer, name in zip(layers, short_names(layers), strict=True)
        ],
        "worst": None if worst is None else {"layer": worst[0], "head": worst[1]["head"]},
        "statistic": chart.name if chart else None,
        "axis": "log" if chart and chart.log else "linear",
        "alerts": _alerts(run, layers),
        "alerts_left_out": max(0, len(run.alerts) - MOST_ALERTS),
    }


def _alerts(run: Run, layers: Sequence[str]) -> list[dict[str, Any]]:
    """The latest alerts, the newest first, each with the place of its layer."""
    places = {layer: place for place, layer in enumerate(layers)}
    return [
        plain(asdict(alert))
        | {"layer": places[alert.layer], "text": str(alert), "mark": _mark(alert.verdict)}
        for alert in reversed(run.alerts[-MOST_ALERTS:])
        if alert.layer in places
    ]


def _mark(verdict: str) -> str:
    """The head's verdict whose letter and colour a finding of the whole model takes."""
    return (
        verdict
        if verdict in VERDICTS
        else "saturated"
        if verdict in (*SHARP, "scale")
        else "uniform"
    )


def _about(run: Run) -> str:
    steps = run.steps
    parts = [run.name, run.model, plural(run.ranks, "rank") if run.ranks > 1 else ""]
    parts.append(plural(len(steps), "step") + " recorded")
    if steps:
        parts[-1] += f", {min(steps):,} to {max(steps):,}"
    parts.append(f"started {clock(run.started)}")
    parts.append(f"ended {clock(run.ended)}" if run.ended else "still running, or cut off")
    parts.append(plural(len(run.alerts), "alert"))
    return " · ".join(part for part in parts if part)


def clock(seconds: float) -> str:
    """Seconds since 1970 as a date and a time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
