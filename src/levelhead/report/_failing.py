"""Whether a result is bad enough for a pipeline to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._legend import LEGEND, ORDER
from ._words import count, listed, plural

# Every verdict that says something; worst first.
FAILABLE = tuple(verdict for verdict in LEGEND if verdict not in ("healthy", "short"))


def failing(result: Mapping[str, Any], verdict: str) -> str | None:
    """The sentence to fail with if a head has that verdict or a worse one; else None."""
    heads = [
        head
        for layer in result["layers"]
        for head in layer["heads"]
        if ORDER[head["verdict"]] <= ORDER[verdict]
    ]
    if not heads:
        return None
    return f"--fail-on {verdict}: {plural(len(heads), 'head')} ({listed(count(heads))})"
