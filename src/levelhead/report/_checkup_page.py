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
    listed,
    missing_calls,
    needs_attention,
    plural,
)
from .._health.judge import severity
from .._health.numbers import plain
from ._names import short_names
from ._page import asset, page
from ._scales import compared, of_all, scale_label, scale_views
from ._tables import colours, fields, legend, main_statistics
from ._words import subtitle

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
        "headline": headline(heads),
        "about": subtitle(result),
        "missing": " ".join(missing_calls(result["not_understood"])),
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
        "scales": [_scale(result, rule, scaled) for rule, scaled in scale_views(result)],
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


def _scale(result: Result, rule: str, heads: list[Head] | None) -> dict[str, Any]:
    label = scale_label(result, rule)
    if heads is None:
        return {"rule": rule, "label": label, "known": False}
    counts = count(heads)
    ill = sum(needs_attention(head) for head in heads)
    would = "" if rule == "used" else " would"
    need = "needs" if ill == 1 and not would else "need"
    return {
        "rule": rule,
        "label": label,
        "known": True,
        "counts": counts,
        "numbers": plain({each.name: of_all(heads, each) for each in compared()}),
        "words": f"{'As it is' if rule == 'used' else f'Scale {label}'}: {listed(counts)}. "
        f"{ill} of {plural(len(heads), 'head')}{would} {need} attention.",
    }


def _inputs(result: Result) -> str:
    texts = [given["text"] for given in result["inputs"]]
    shown = " · ".join(texts[:10])
    more = f" · and {len(texts) - 10} more" if len(texts) > 10 else ""
    return f"Measured on: {shown}{more}"
