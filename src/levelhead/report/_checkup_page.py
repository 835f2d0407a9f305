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
from .._health.numbers import plain
from .._health.verdicts import HEALTHY, SHORT, VERDICTS
from ..checkup._scores import NEAR, ONE, pack
from ..checkup._what_if import IN_USE, compared, with_scale
from . import _scales
from ._names import short_names
from ._page import asset, page
from ._slider import DIGITS, MOST_LISTED, judged, marks
from ._tables import colours, fields, legend, main_statistics
from ._words import findings_of, subtitle

Result = Mapping[str, Any]
_NO_PICTURES: Result = {"inputs": [], "layers": [], "scores": pack(b"")}
# In their order; checkup.js puts the parts together.
SCRIPTS = ("paint", "map", "attention", "heat", "checkup")


def checkup_json(result: Result) -> str:
    """The result as JSON, without what only a page shows."""
    kept = {name: value for name, value in result.items() if name not in ("pictures", "slider")}
    return json.dumps({"levelhead": __version__, **kept}, indent=1, allow_nan=False) + "\n"


def checkup_page(result: Result) -> str:
    """The result as one HTML file."""
    data, pictures = page_data(result), result["pictures"] or _NO_PICTURES
    others = judged(result, data["fields"] | data["compared"])
    return page(
        f"Checkup of {result['model']}",
        asset("checkup.html"),
        data,
        "".join(asset(f"{name}.js") for name in SCRIPTS),
        colours() + asset("map.css") + asset("checkup.css"),
        plotly=False,
        packed={
            "judged": pack(json.dumps(others, allow_nan=False).encode()),
            "scores": pictures["scores"],
        },
    )


def page_data(result: Result) -> dict[str, Any]:
    """All that the page shows of the model as trained, words included: its script only draws."""
    names = short_names([layer["name"] for layer in result["layers"]])
    heads = [head for layer in result["layers"] for head in layer["heads"]]
    worst, pictures = worst_first(result), result["pictures"] or _NO_PICTURES
    return {
        "headline": headline(heads, findings=findings_of(result)),
        "model": result["model"],
        "about": subtitle(result),
        "missing": " ".join(missing_calls(result["not_understood"])),
        "scale": list(_scales.in_use(result)),
        "made": f"Made by levelhead {__version__}. A verdict is a rule of thumb with a source, "
        "listed in levelhead's docs/health.md.",
        "inputs": _inputs(result),
        "texts": pictures["inputs"],
        "pictures": pictures["layers"],
        "legend": legend(),
        "fields": fields(Health),
        "main": main_statistics(),
        "compared": {each.name: each.label for each in compared()},
        "layers": [
            {
                **{part: layer[part] for part in ("name", "d_k", "scale")},
                **{"short": name, "heads": [_head(head) for head in layer["heads"]]},
            }
            for layer, name in zip(result["layers"], names, strict=True)
        ],
        "marks": marks(result),
        "codes": {"near": NEAR, "one": ONE},
        "scales": [_scale(scale) for scale in result["scales"]],
        "scales_about": " ".join(
            [_scales.ABOUT, *([] if _scales.is_known(result) else [_scales.NOT_KNOWN])]
        ),
        "worst": {"layer": worst[0][0], "head": worst[0][1]["head"]},
        "list": _list(worst, names),
    }


def _head(head: Head) -> dict[str, Any]:
    """A head with what its card says: whether it is benign, and the line of code that helps."""
    loud = needs_attention(head)
    if head["benign"]:
        benign = f"Yes: {head['benign']}."
    elif head["verdict"] == SHORT:
        benign = "It cannot be told from rows this short."
    elif loud:
        benign = "No, as far as these texts show."
    else:
        benign = "Yes." if head["verdict"] == HEALTHY else "Yes: it is information, not an alarm."
    hint = "Nothing" if head["benign"] else f"{head['hint'][0].upper()}{head['hint'][1:]}"
    code = "" if head["benign"] else VERDICTS[head["verdict"]].code
    card = {"is_benign": benign, "to_do": f"{hint}.", "code": code}
    return {**plain(head, DIGITS), "judged_as": judged_as(head), **card}


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
