"""What a watch found, as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby

from .._health import GradHealth, Health
from .._verdicts import LEVELS

_MARKS = {"critical": "#", "error": "E", "warning": "!", "info": "-", "ok": "."}
_WORST = 5
_NAMED = 8


def summarise(
    health: Mapping[str, Health],
    gradients: Mapping[str, GradHealth],
    calls: int,
    thresholds: Mapping[str, float],
    not_understood: Mapping[str, int],
) -> str:
    """A line per layer with a mark per head and the worst one, then the worst heads in words."""
    missing = missing_calls(not_understood)
    if not health:
        return "\n".join(["no attention call was seen", *missing])
    width = max(len(_name(layer)) for layer in health)
    heads = sum(part.shape[-1] for part in health.values())
    lines = [f"{calls:,} attention calls, {len(health)} layers, {heads} heads"]
    found = []
    for layer, part in health.items():
        verdicts = {verdict.head: verdict for verdict in part.verdicts(**thresholds)}
        marks = "".join(
            _MARKS[verdicts[head].level] if head in verdicts else " "
            for head in range(part.shape[-1])
        )
        worst = next(iter(verdicts.values()), None)
        word = "too few keys to judge" if worst is None else f"head {worst.head}: {worst.verdict}"
        through = ""
        if layer in gradients and worst is not None:
            share = gradients[layer].survival[worst.head]
            through = "" if math.isnan(share) else f", gradient survival {share:.2g}"
        lines.append(f"  {_name(layer):<{width}}  {marks}  {word}{through}")
        found += [(layer, verdict) for verdict in verdicts.values() if verdict.level in LEVELS[:3]]
    found.sort(key=lambda entry: LEVELS.index(entry[1].level))
    for hint, heads_with_it in groupby(found[:_WORST], key=lambda entry: entry[1].hint):
        lines += [
            f"{_name(layer)}, head {verdict.head}: {verdict.verdict}. {verdict.reason}."
            for layer, verdict in heads_with_it
        ]
        lines.append(f"  What to do: {hint}")
    if len(found) > _WORST:
        lines.append(f"and {len(found) - _WORST} more heads that need attention")
    if not found:
        lines.append("No head needs attention.")
    return "\n".join([*lines, *missing])


def missing_calls(not_understood: Mapping[str, int]) -> list[str]:
    """The line that names the modules whose attention was not understood, if there are any."""
    if not not_understood:
        return []
    names = [
        f"{_name(layer)} ({count:,} call{'s' * (count > 1)})"
        for layer, count in not_understood.items()
    ]
    more = f" and {len(names) - _NAMED} more modules" if len(names) > _NAMED else ""
    return [f"Attention was seen but not understood in {', '.join(names[:_NAMED])}{more}."]


def _name(layer: str) -> str:
    return layer or "(outside any submodule)"
