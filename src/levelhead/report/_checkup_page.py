"""A checkup as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import __version__
from .._health import Health
from .._health.describe import (
    Head,
    count,
    headline,
    judged_as,
    missing_calls,
    needs_attention,
)
from .._health.judge import severity
from ..checkup._what_if import IN_USE, compared, with_scale
from . import _scales
from ._names import short_names
from ._page import asset, page
from ._tables import colours, fields, legend, main_statistics
from ._words import findings_of, subtitle

Result = Mapping[str, Any]
MOST_LISTED = 12


def checkup_json(result: Result) -> str:
    """The result as JSON, without the pictures."""
    kept = {name: value for name, value in result.items() if name != "pictures"}
    return json.dumps({"levelhead": __version__, **kept}, indent=1, allow_nan=False) + "\n"


def checkup_page(result: Result) -> str:
    """The result as one HTML file."""
    script = asset("map.js") + asset("checkup.js")
    title = f"Checkup of {result['model']}"
    return page(
        title, asset("checkup.html"), page_data(result), script, colours() + asset("map.css")
    )


def page_data(result: Result) -> dict[str, Any]:
    """All that the page shows, words included: its script only draws."""
    names = short_names([layer["name"] for layer in result["layers"]])
    heads = [head for layer in result["layers"] for head in layer["heads"]]
    worst = worst_first(result)
    return {
        "headline": headline(heads, findings=findings_of(result)),
        "about": subtitle(result),
        "missing": " ".join(missing_calls(result["not_understood"])),
        "scale": list(_scales.in_use(result)),
        "made": f"Made by levelhead {__version__}. A verdict is a rule of thumb with a source, "
        "listed in levelhead's docs/health.md.",
        "inputs": _inputs(result),
        "nopicture": "The attention of this layer was not kept: its input is too long to draw.",
        "legend": legend(),
        "fields": fields(Health),
        "main": main_statistics(),
        "compared": {each.name: each.label for each in compared()},
        "layers": [
            {**layer, "short": name} for layer, name in zip(result["layers"], names, strict=True)
        ],
        "scales": [_scale(scale) for scale in result["scales"]],
        "scales_about": " ".join(
            [_scales.ABOUT, *([] if _scales.is_known(result) else [_scales.NOT_KNOWN])]
        ),
        "moved_meaning": "The share of each row's weight that another scale moves to other keys.",
        "pictures": result["pictures"],
        "worst": {"layer": worst[0][0], "head": worst[0][1]["head"]},
        "list": _list(worst, names),
    }


def worst_first(result: Result) -> list[tuple[int, Head]]:
    """(place of the layer, head), the worst first."""
    heads = [(place, h) for place, layer in enumerate(result["layers"]) for h in layer["heads"]]
    return sorted(heads, key=lambda entry: severity(entry[1]))


def _list(worst: list[tuple[int, Head]], names: list[str]) -> dict[str, Any]:
    """Every head that needs attention; of the others the strongest of each kind."""
    ill = [entry for entry in worst if needs_attention(entry[1])]
    benign = [entry for entry in worst if not needs_attention(entry[1])]
    kinds = count(head for _, head in benign)
    strongest = [next(e for e in benign if e[1]["verdict"] == kind) for kind in kinds]
    more = f", {MOST_LISTED} of {len(ill)}" if len(ill) > MOST_LISTED else ""

    def item(layer: int, head: Head, lead: str) -> dict[str, Any]:
        kept = {name: head[name] for name in ("head", "verdict", "reason", "hint")}
        return {"layer": layer, "lead": lead, **kept}

    return {
        "title": f"Worst first{more}" if ill else "Nothing to repair; worth knowing",
        "heads": [
            item(layer, head, f"{names[layer]}, head {head['head']}: {judged_as(head)}")
            for layer, head in ill[:MOST_LISTED]
        ]
        + [
            item(
                layer,
                head,
                f"{kinds[head['verdict']]} {head['verdict']}, "
                f"such as {names[layer]}, head {head['head']}",
            )
            for layer, head in strongest
        ],
    }


def _scale(scale: _scales.Scale) -> dict[str, Any]:
    used = scale["rule"] == IN_USE
    return {
        **scale,
        "rule": "used" if used else scale["rule"],
        "label": _scales.label(scale),
        "with": "" if used else with_scale(scale["rule"]).lower(),
        "headline": _scales.headline(scale),
        "short": "".join(_scales.in_short(scale)),
    }


def _inputs(result: Result) -> str:
    texts = [given["text"] for given in result["inputs"]]
    shown = " · ".join(texts[:10])
    more = f" · and {len(texts) - 10} more" if len(texts) > 10 else ""
    return f"Measured on: {shown}{more}"
