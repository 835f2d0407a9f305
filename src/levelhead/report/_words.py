"""What a checkup examined, in words: the terminal and the page share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._health import Finding
from .._health.describe import plural


def subtitle(result: Mapping[str, Any]) -> str:
    """What was examined, in one line."""
    heads = sum(len(layer["heads"]) for layer in result["layers"])
    tokens = [given["tokens"] for given in result["inputs"] if given["tokens"]]
    parts = [
        result["model"],
        plural(len(result["layers"]), "layer"),
        plural(heads, "head"),
        plural(len(result["inputs"]), "text" if tokens else "input"),
        *([plural(sum(tokens), "token")] if tokens else []),
        *result["notes"],
    ]
    return " · ".join(parts)


def findings_of(result: Mapping[str, Any]) -> list[Finding]:
    """What the judge had to say of the whole model."""
    return [Finding.from_dict(found) for found in result["findings"]]
