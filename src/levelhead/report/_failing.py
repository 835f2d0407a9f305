"""Whether a result is bad enough for a pipeline to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._health.describe import count, listed, plural
from .._health.verdicts import ranked


def failing(result: Mapping[str, Any], verdict: str) -> str | None:
    """The sentence to fail with if a head has that verdict or a worse one; else None."""
    order = list(ranked())
    bad = order[: order.index(verdict) + 1]
    heads = [h for layer in result["layers"] for h in layer["heads"] if h["verdict"] in bad]
    if not heads:
        return None
    return f"--fail-on {verdict}: {plural(len(heads), 'head')} ({listed(count(heads))})"
