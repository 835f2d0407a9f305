"""A watched run as a page, finished or still running."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .. import __version__
from .._files import write_whole
from .._health import LEVELS
from .._health.describe import plural
from .._health.verdicts import ranked
from ..store import Run
from ._alerts import alert_groups, finding_spans, said_of
from ._names import short_names
from ._page import asset, page
from ._points import NOT_THERE, OnPoint, Plan, Points, plan
from ._scalars import scalar_lines
from ._tables import colours, explained, guides, telling

SCRIPTS = ("packed.js", "draw.js", "run.js", "timeline.js", "heads.js", "layers.js")


def write_run_page(
    path: str | os.PathLike[str], run: Run, on_point: OnPoint = lambda *_: None
) -> None:
    """Write the page of a run to a file, whole or not at all.

    on_point: called with (points read, points in all)
    """
    write_whole(Path(path), run_page(run, on_point))


def run_page(run: Run, on_point: OnPoint = lambda *_: None) -> str:
    """The page of a run as one HTML file."""
    title = f"Run {run.name}" if run.name else "A watched run"
    return _framed(title, run_data(run, on_point), "begin.js")


def live_page(name: str) -> str:
    """The page of a run that is followed: it asks its server for all that it shows."""
    return _framed(f"Live: {name}", {}, "live.js", served=True)


def _framed(title: str, data: dict[str, Any], begin: str, *, served: bool = False) -> str:
    script = "".join(map(asset, (*SCRIPTS, begin)))
    style = colours() + asset("map.css") + asset("run.css")
    return page(title, asset("run.html"), data, script, style, plotly=False, served=served)


def run_data(run: Run, on_point: OnPoint = lambda *_: None) -> dict[str, Any]:
    """All that the page shows, words included: its script only draws."""
    planned, points = plan(run), Points()
    points.read(run, planned.groups, on_point)
    return points_data(run, planned, points)


def points_data(run: Run, planned: Plan, points: Points, start: int = 0) -> dict[str, Any]:
    """The same of points that were read; of their numbers those from a point on."""
    layout, worst = points.layout(), points.worst()
    names = dict(zip(layout, short_names(list(layout)), strict=True))
    told = {str(each): said_of(each) for point in points.points for each in point.findings}
    which = {text: place for place, text in enumerate(told)}
    packed, left_out = points.packed(start)
    no_room = f"{plural(left_out, 'statistic')} had no room on this page." if left_out else ""
    return {
        "headline": points.points[-1].headline if points.points else "No step is recorded yet.",
        "about": _about(run),
        "made": f"Made by levelhead {__version__} at {_clock(time.time())}.",
        "thinned": " ".join(filter(None, [planned.words, no_room])),
        "legend": {
            name: {"letter": rule.letter, "meaning": rule.meaning, "hint": rule.hint}
            for name, rule in ranked().items()
        },
        "levels": LEVELS,
        "not_there": NOT_THERE,
        "fields": explained(),
        "guides": guides(run.thresholds),
        "steps": [point.step for point in points.points],
        "headlines": [point.headline for point in points.points],
        "told": list(told.values()),
        "said": [[which[str(each)] for each in point.findings] for point in points.points],
        "spans": finding_spans(points.points),
        "scalars": scalar_lines(run),
        "layers": [
            {"name": layer, "short": names[layer], "heads": heads}
            for layer, heads in layout.items()
        ],
        "worst": worst and {"layer": list(layout).index(worst[0]), "head": worst[1]},
        "statistic": worst and telling({"verdict": worst[2]}).name,
        "alerts": alert_groups(run.alerts, names),
        "start": start,
        "packed": packed,
    }


def _about(run: Run) -> str:
    steps = run.steps
    parts = [run.name, run.model, plural(len(steps), "step") + " recorded"]
    if steps:
        parts[-1] += f", {min(steps):,} to {max(steps):,}"
    parts.append(f"started {_clock(run.started)}")
    parts.append(f"ended {_clock(run.ended)}" if run.ended else "still running, or cut off")
    parts.append(plural(len(run.alerts), "alert"))
    return " · ".join(part for part in parts if part)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
