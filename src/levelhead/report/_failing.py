"""Whether a result is bad enough for a pipeline to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._health.describe import count, listed, plural
from .._health.verdicts import LOUD, VERDICTS, ranked


def failing(result: Mapping[str, Any], verdict: str) -> str | None:
    """The sentence to fail with if a head has that verdict or a worse one; else None.

    Of verdicts that ask someone to act, those count that do: a head that is sharp because of its
    pattern is not ill.
    """
    order = list(ranked())
    bad, asks = order[: order.index(verdict) + 1], VERDICTS[verdict].cases[0].level in LOUD
    all_heads = (head for layer in result["layers"] for head in layer["heads"])
    heads = [h for h in all_heads if h["verdict"] in bad and (h["level"] in LOUD or not asks)]
    if not heads:
        return None
    return f"--fail-on {verdict}: {plural(len(heads), 'head')} ({listed(count(heads))})"
