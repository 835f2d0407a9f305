"""A watched run as a page, finished or still running."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from .. import __version__
from .._files import write_whole
from .._health import GradHealth, Health, Thresholds
from .._records import Alert
from ..checkup._describe import describe
from ._fields import FIELDS, GRADIENT_FIELDS
from ._legend import LEGEND, severity
from ._names import short_names
from ._page import asset, page
from ._series import thinned
from ._words import headline, plural

MOST_ALERTS = 500
# Where verdicts begin, as lines in the chart of the statistic they rest on.
GUIDES = {
    "score_max": [
        Thresholds.exploding_warning,
        Thresholds.exploding,
        Thresholds.exploding_critical,
    ],
    "saturated": [Thresholds.saturated],
    "entropy_ratio": [Thresholds.collapsed, Thresholds.sharp_entropy],
    "first_key": [Thresholds.sink],
}
# The statistic to look at first, by the verdict of the worst head.
_TELLING = {
    "nonfinite": "nonfinite_rows",
    "exploding": "score_max",
    "saturated": "saturated",
    "sink": "first_key",
}


class RunLike(Protocol):
    """What `levelhead.store.read_run` gives; a watch can look like it too."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def started(self) -> float: ...
    @property
    def ended(self) -> float | None: ...
    @property
    def steps(self) -> Sequence[int]: ...
    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def alerts(self) -> Sequence[Alert]: ...
    def health(self, layer: str) -> Sequence[tuple[int, Health]]: ...
    def gradients(self, layer: str) -> Sequence[tuple[int, GradHealth]]: ...
    def total(self) -> dict[str, Health]: ...


def write_run_page(path: str | os.PathLike[str], run: RunLike) -> None:
    """Write the page of a run to a file, whole or not at all."""
    write_whole(Path(path), run_page(run))


def run_page(run: RunLike) -> str:
    """The page of a run as one HTML file."""
    script = asset("map.js") + asset("run.js")
    title = f"Run {run.name}" if run.name else "A watched run"
    return page(title, asset("run.html"), run_data(run), script, asset("map.css"))


def run_data(run: RunLike) -> dict[str, Any]:
    """All that the page shows, words included: its script only draws."""
    steps, lines = thinned(run)
    totals = run.total()
    names = short_names(run.layers)
    whole = {layer: describe(totals[layer]) for layer in run.layers}
    last = {layer: describe(_last(run, layer)) for layer in run.layers}
    now = [head for heads in last.values() for head in heads]
    worst = min(
        ((place, head) for place, layer in enumerate(run.layers) for head in last[layer]),
        key=lambda entry: severity(entry[1]),
        default=None,
    )
    return {
        "headline": f"At step {run.steps[-1]:,}: {headline(now)}"
        if now
        else "No step is recorded yet.",
        "about": _about(run),
        "made": f"Made by levelhead {__version__} at {_clock(time.time())}.",
        "legend": {name: mark._asdict() for name, mark in LEGEND.items()},
        "fields": {n: field._asdict() for n, field in (FIELDS | GRADIENT_FIELDS).items()},
        "guides": GUIDES,
        "steps": steps,
        "layers": [
            {"name": layer, "short": name, "heads": whole[layer], "last": last[layer]}
            | lines[layer]
            for layer, name in zip(run.layers, names, strict=True)
        ],
        "worst": None if worst is None else {"layer": worst[0], "head": worst[1]["head"]},
        "statistic": _TELLING.get(worst[1]["verdict"], "entropy_ratio") if worst else None,
        "axis": "log" if worst and worst[1]["verdict"] == "exploding" else "linear",
        "alerts": _alerts(run),
        "alerts_left_out": max(0, len(run.alerts) - MOST_ALERTS),
    }


def _last(run: RunLike, layer: str) -> Health:
    return run.health(layer)[-1][1]


def _alerts(run: RunLike) -> list[dict[str, Any]]:
    """The latest alerts, the newest first, each with the place of its layer."""
    places = {layer: place for place, layer in enumerate(run.layers)}
    return [
        asdict(alert)
        | {
            "layer": places[alert.layer],
            "value": alert.value if math.isfinite(alert.value) else None,
        }
        for alert in reversed(run.alerts[-MOST_ALERTS:])
        if alert.layer in places
    ]


def _about(run: RunLike) -> str:
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
