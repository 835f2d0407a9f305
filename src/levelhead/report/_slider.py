"""What the checkup's page shows at each scale that its slider has been judged at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .._health.describe import Head, plural
from .._health.numbers import plain
from ..checkup._what_if import IN_USE, scale_words
from ..scaling import FORMULAS, SAME
from . import _scales
from ._names import short_names

Result = Mapping[str, Any]
MOST_LISTED = 12
MOST_HEADS = 20_000  # of all scales together: a page has no room for more
DIGITS = 4  # of a statistic on the page


def judged(result: Result, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every other scale at which all heads have been judged, from small to large."""
    slider = result["slider"] or {
        "scales": result["scales"],
        "layers": [layer["scales"] for layer in result["layers"]],
    }
    names = short_names([layer["name"] for layer in result["layers"]])
    before = [head for layer in result["layers"] for head in layer["heads"]]
    factors = dict(_factors(slider))
    kept = _thinned(factors, len(before))
    found = []
    for scale in slider["scales"]:
        if scale["rule"] not in kept:
            continue
        layers = [layer[scale["rule"]]["heads"] for layer in slider["layers"]]
        found.append(
            {
                "factor": factors[scale["rule"]],
                "words": scale["words"],
                "headline": _scales.headline(scale),
                "sentence": scale["sentence"],
                "moved": scale["weight_moved"],
                "heads": [[_head(head, fields) for head in heads] for heads in layers],
                "list": _list(layers, before, names),
            }
        )
    return sorted(found, key=lambda each: float(each["factor"]))


def marks(result: Result) -> list[dict[str, Any]]:
    """The places on the slider that have a name: the rules, and the scale in use."""
    used = {scale_words(layer) for layer in result["layers"]}
    there = dict(_factors({"layers": [layer["scales"] for layer in result["layers"]]}))
    trained = used.pop() if len(used) == 1 and used <= {*FORMULAS.values()} else "as trained"
    words: dict[float, list[str]] = {1.0: ["no scale" if trained == FORMULAS["none"] else trained]}
    for name in there.keys() & FORMULAS.keys():
        near = (mark for mark in words if math.isclose(mark, there[name], rel_tol=SAME))
        place = words.setdefault(next(near, there[name]), [])
        if place is not words[1.0]:
            place.append("no scale" if name == "none" else FORMULAS[name])
    return [
        {"factor": factor, "words": ", ".join(sorted(names))}
        for factor, names in sorted(words.items())
    ]


def _factors(slider: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """By name the multiples of the scale in use that are the same in all layers."""
    first, *others = slider["layers"]
    for name, scaled in first.items():
        factor = scaled["factor"]
        same = (
            name in layer and math.isclose(layer[name]["factor"], factor, rel_tol=SAME)
            for layer in others
        )
        if factor > 0 and name != IN_USE and all(same):
            yield name, factor


def _thinned(factors: Mapping[str, float], heads: int) -> set[str]:
    """All of them, or of a very large model every second, third, … beside the rules."""
    grid = sorted((name for name in factors if name not in FORMULAS), key=factors.__getitem__)
    most = max(MOST_HEADS // heads - len(FORMULAS), 3)
    return {*(factors.keys() & FORMULAS.keys()), *grid[:: max(1, -(-len(grid) // most))]}


def _head(head: Head, fields: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = plain({name: head[name] for name in fields}, DIGITS)
    words = {name: head[name] for name in ("verdict", "reason")}
    return {**words, "weight_moved": plain(head["weight_moved"], DIGITS), **values}


def _list(layers: list[list[Head]], before: list[Head], names: list[str]) -> dict[str, Any]:
    """The heads that move most."""
    heads = [(place, head) for place, layer in enumerate(layers) for head in layer]
    pairs = sorted(
        zip(heads, before, strict=True), key=lambda pair: -(pair[0][1]["weight_moved"] or 0.0)
    )
    items = []
    for (place, head), was in pairs[:MOST_LISTED]:
        then, now, moved = was["verdict"], head["verdict"], head["weight_moved"]
        items.append(
            {
                **{"layer": place, "head": head["head"], "verdict": now},
                "lead": f"{names[place]}, head {head['head']}: "
                + (now if now == then else f"{then} → {now}"),
                "reason": (f"{moved:.0%} of its weight moves; " if moved is not None else "")
                + head["reason"],
            }
        )
    return {"title": f"Moved most, of {plural(len(heads), 'head')}", "heads": items}
