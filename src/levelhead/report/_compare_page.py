"""A comparison as a page: maps of differences, curves over each other, and what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import __version__
from .._health import LEVELS, Thresholds
from .._health.verdicts import ranked
from ._compare import Comparison, Side
from ._packed import pack_floats
from ._page import asset, page
from ._points import ROOM
from ._scalars import scalar_lines
from ._tables import charted, colours, explained, guides, legend

SCRIPTS = ("packed.js", "draw.js", "compare.js")


def compare_page(comparison: Comparison) -> str:
    """The page as one HTML file."""
    title = f"{comparison.before.name} and {comparison.after.name}, compared"
    style = colours() + asset("map.css") + asset("run.css") + asset("compare.css")
    script = "".join(map(asset, SCRIPTS))
    return page(title, asset("compare.html"), compare_data(comparison), script, style, plotly=False)


def compare_data(comparison: Comparison) -> dict[str, Any]:
    """All that the page shows, words included: its script only draws."""
    pairs = list(comparison.pairs())
    turned = max(range(len(pairs)), key=lambda at: abs(pairs[at].gain), default=0)
    after = comparison.after
    names = comparison.names
    return {
        "headline": comparison.headline(),
        "better": comparison.better(),
        "worse": comparison.worse(),
        "notes": comparison.notes,
        "made": f"Made by levelhead {__version__}.",
        "legend": legend(),
        "levels": LEVELS,
        "fields": explained(),
        "guides": guides(after.run.thresholds if after.run else Thresholds()),
        "layers": [
            {
                "names": [old, new],
                "short": short,
                "heads": min(len(comparison.before.layers[old]), len(after.layers[new])),
            }
            for (old, new), short in zip(comparison.layers, names, strict=True)
        ],
        "sides": [_side(side) for side in (comparison.before, after)],
        "chosen": {"layer": names.index(pairs[turned].layer), "head": pairs[turned].head},
        "statistic": charted()[0].name,
    }


def _side(side: Side) -> dict[str, Any]:
    heads = [head for layer in side.layers.values() for head in layer]
    order = list(ranked())
    found: dict[str, Any] = {
        "name": side.name,
        "about": side.about,
        "layers": {name: len(layer) for name, layer in side.layers.items()},
        "codes": [
            order.index(head["verdict"]) * len(LEVELS) + LEVELS.index(head["level"])
            for head in heads
        ],
        "reasons": [head["reason"] for head in heads] if len(heads) <= 2000 else None,
        "now": {
            each.name: pack_floats(np.array([[_number(head, each.name) for head in heads]]))
            for each in charted()
        },
        "course": None,
    }
    if side.points is not None and side.run is not None:
        packed, _ = side.points.packed(room=ROOM // 2)
        del packed["codes"]
        found["course"] = {
            "layers": side.points.layout(),
            "steps": [point.step for point in side.points.points],
            "packed": packed,
            "scalars": scalar_lines(side.run),
        }
    return found


def _number(head: Any, name: str) -> float:
    value = head.get(name)
    return np.nan if value is None else float(value)
