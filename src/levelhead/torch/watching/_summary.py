"""What a watch found, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ..._health import GradHealth, findings, judge
from ..._health.describe import (
    Head,
    at_steps,
    describe,
    headline,
    in_words,
    needs_attention,
    plural,
)
from ..._health.findings import HEAD
from ..._health.judge import severity
from ..._health.numbers import number, place
from ..._health.verdicts import MARKS, SHORT

if TYPE_CHECKING:
    from ...store import Run

_WORST = 5


def summarise(run: Run, calls: int) -> str:
    """A line per layer with a mark per head and the worst one, then the worst heads in words.

    It speaks of the last recorded step of each layer: of how the model is, not how it was.
    """
    latest, steps = run.latest()
    if not steps:
        return "no attention call was seen"
    layers = describe(latest, judge(latest, run.thresholds))
    heads = [(layer, head) for layer, many in layers.items() for head in many]
    heads.sort(key=lambda entry: severity(entry[1]))
    counts = {"attention call": calls, "layer": len(layers), "head": len(heads)}
    lines = [", ".join(plural(many, noun) for noun, many in counts.items())]
    width = max(len(place(layer)) for layer in layers)
    for layer, many in layers.items():
        marks = "".join(" " if h["verdict"] == SHORT else MARKS[h["level"]] for h in many)
        lines.append(f"  {place(layer):<{width}}  {marks}  {_worst(many)}")
    found = findings(latest, run.thresholds)
    lines.append(headline([head for _, head in heads], at_steps(steps), found))
    lines += [str(finding) for finding in found if finding.scope != HEAD and finding.is_loud]
    ill = [entry for entry in heads if needs_attention(entry[1])]
    for hint, alike in groupby(ill[:_WORST], key=lambda entry: entry[1]["hint"]):
        lines += [in_words(f"{place(layer)}, head {head['head']}", head) for layer, head in alike]
        lines.append(f"  What to do: {hint}")
    if len(ill) > _WORST:
        lines.append(f"and {len(ill) - _WORST} more; report() shows them all")
    return "\n".join(lines)


def _worst(heads: Sequence[Head]) -> str:
    """The worst head of a layer, with the share of gradient that it lets through."""
    judged = [head for head in heads if head["verdict"] != SHORT]
    if not judged:
        return "too few keys to judge"
    worst, survival = min(judged, key=severity), GradHealth.survival
    share = worst.get(survival.name)
    through = "" if share is None else f", {survival.label} {number(share, survival.form)}"
    return f"head {worst['head']}: {worst['verdict']}{through}"
