"""Results in words: the sentences that the terminal and the pages share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._legend import LEGEND, Head, needs_attention


def count(heads: Iterable[Head]) -> dict[str, int]:
    """How many heads have each verdict, worst first, those without any left out."""
    found = Counter(head["verdict"] for head in heads)
    return {verdict: found[verdict] for verdict in LEGEND if found[verdict]}


def listed(counts: Mapping[str, int]) -> str:
    """Counts in words: '2 saturated, 1 sharp'."""
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items())


def judged(head: Head) -> str:
    """The verdict, with its level where it calls for action: 'saturated (warning)'."""
    return f"{head['verdict']} ({head['level']})" if needs_attention(head) else head["verdict"]


def headline(heads: Sequence[Head]) -> str:
    """The one sentence that a hurried reader takes along."""
    ill = [head for head in heads if needs_attention(head)]
    judged = [head for head in heads if head["verdict"] != "short"]
    if ill:
        verb = "needs" if len(ill) == 1 else "need"
        return f"{len(ill)} of {plural(len(heads), 'head')} {verb} attention: {listed(count(ill))}."
    if not judged:
        return f"None of the {plural(len(heads), 'head')} could be judged: the rows are too short."
    if len(judged) == 1:
        return "The one head that could be judged is well."
    unjudged = len(heads) - len(judged)
    short = f" that could be judged ({unjudged} could not)" if unjudged else ""
    return f"All {plural(len(judged), 'head')}{short} are well."


def plural(number: int, noun: str) -> str:
    """'1 head', '1,024 heads'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
