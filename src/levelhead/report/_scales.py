"""The counterfactual: what the other scales would have made of the same queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._legend import Head

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


def mean_of(heads: Sequence[Head], field: str) -> float:
    """The mean of a statistic over the heads that have it; NaN where none has."""
    values = [head[field] for head in heads if head[field] is not None]
    return sum(values) / len(values) if values else math.nan
