"""The counterfactual: what the other scales would have made of the same queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._health import Health
from .._health.describe import Head
from .._health.statistics import Statistic, statistics_of

LABELS = {"none": "none", "dk": "1/d_k", "sqrt_dmodel": "1/√d_model"}


def scale_views(result: Mapping[str, Any]) -> Iterator[tuple[str, list[Head] | None]]:
    """(rule, all heads as that scale leaves them); "used" first; None where it is not known."""
    layers = result["layers"]
    yield "used", [head for layer in layers for head in layer["heads"]]
    for rule in LABELS:
        known = all(rule in layer["scales"] for layer in layers)
        heads = (
            [head for layer in layers for head in layer["scales"][rule]["heads"]] if known else None
        )
        yield rule, heads


def scale_label(result: Mapping[str, Any], rule: str) -> str:
    """How a scale is called; for the one in use its formula, where it is one of ours."""
    if rule != "used":
        return LABELS[rule]
    used = {_formula(layer) for layer in result["layers"]}
    return f"as it is ({used.pop()})" if len(used) == 1 else "as it is"


def _formula(layer: Mapping[str, Any]) -> str:
    if layer["scale"] is None:
        return "not known"
    known: dict[str, float] = {"1/√d_k": 1 / math.sqrt(layer["d_k"])} | {
        LABELS[rule]: view["scale"] for rule, view in layer["scales"].items()
    }
    for label, scale in known.items():
        if math.isclose(scale, layer["scale"], rel_tol=1e-4):
            return label
    return f"{layer['scale']:.4g}"


def compared() -> list[Statistic]:
    """What scales are compared by."""
    return [each for each in statistics_of(Health).values() if each.compared]


def of_all(heads: Sequence[Head], statistic: Statistic) -> float:
    """One number for all heads that have the statistic; NaN where none has."""
    values: list[float] = [
        head[statistic.name] for head in heads if head[statistic.name] is not None
    ]
    if not values:
        return math.nan
    return max(values) if statistic.compared == "max" else sum(values) / len(values)
