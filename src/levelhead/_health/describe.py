"""Words and numbers for people: the same on a terminal, on a page, in an alert and in a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .findings import HEAD, Finding
from .judge import Evidence, Judgement, judge, severity
from .numbers import number, place, plain
from .statistics import Derived, statistics_of
from .table import GAP, table
from .verdicts import LOUD, SHORT, ranked

if TYPE_CHECKING:
    from .health import GradHealth, Health, PerHead

Head = Mapping[str, Any]
MOST_IN_REPR = 8  # heads
MOST_NAMED = 8  # modules
WIDEST = 100  # columns of a printed table


# ------------------------------------------------------------ heads as plain dicts


def describe(
    evidence: Evidence, judged: Mapping[str, Judgement] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Per layer its heads in order, each a dict that JSON can hold: verdict, words, statistics.

    >>> import numpy as np, levelhead as lh
    >>> q = np.eye(4)[None]
    >>> health = lh.reference(q, q, q, return_health=True).health
    >>> head, = describe(Evidence({"attn": health}))["attn"]
    >>> head["verdict"], head["rows"]
    ('short', 4)

    judged: what the judge said of it; by default it is asked
    """
    judged = judge(evidence) if judged is None else judged
    return {layer: _heads(judged[layer], _values(evidence, layer)) for layer in evidence.health}


def _heads(judged: Judgement, values: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [
        {
            **verdict._asdict(),
            "also": list(verdict.also),
            **{name: each[verdict.head] for name, each in values.items()},
        }
        for verdict in judged
    ]


def _values(evidence: Evidence, layer: str) -> dict[str, list[Any]]:
    """Every field, and what is derived of them, as lists over the heads."""
    parts: list[PerHead] = [evidence.health[layer].over_batch()]
    if layer in evidence.gradients:
        parts.append(evidence.gradients[layer].over_batch())
    return {
        name: plain(each.of(part))
        for part in parts
        for name, each in statistics_of(type(part)).items()
        if each.is_field or isinstance(each, Derived)
    }


# ------------------------------------------------------------ words


def plural(count: int, noun: str) -> str:
    """'1 head', '1,024 heads'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def needs_attention(head: Head) -> bool:
    """Whether a person should act: a warning or worse."""
    return head["level"] in LOUD


def judged_as(head: Head) -> str:
    """The verdict, with its level where it calls for action: 'saturated (warning)'."""
    return f"{head['verdict']} ({head['level']})" if needs_attention(head) else head["verdict"]


def in_words(which: str, head: Head) -> str:
    """One head in a sentence."""
    return f"{which}: {judged_as(head)}; {head['reason']}."


def count(heads: Iterable[Head]) -> dict[str, int]:
    """How many heads have each verdict, worst first, those without any left out."""
    found = Counter(head["verdict"] for head in heads)
    return {verdict: found[verdict] for verdict in ranked() if found[verdict]}


def listed(counts: Mapping[str, int]) -> str:
    """Counts in words: '2 saturated, 1 sharp'."""
    return ", ".join(f"{many:,} {verdict}" for verdict, many in counts.items())


def at_steps(steps: Iterable[int]) -> str:
    """'At step 20', or 'At steps 10 to 20' where layers took part last at different ones."""
    first, last = min(steps := list(steps)), max(steps)
    return f"At step {last:,}" if first == last else f"At steps {first:,} to {last:,}"


def headline(heads: Sequence[Head], when: str = "", findings: Sequence[Finding] = ()) -> str:
    """The one sentence that a hurried reader takes along.

    when:     what the sentence begins with, such as "At step 20"
    findings: of the model and its layers; a loud one is what is said first
    """
    ill = [head for head in heads if needs_attention(head)]
    short = sum(head["verdict"] == SHORT for head in heads)
    wide = [finding for finding in findings if finding.scope != HEAD]
    if loud := [finding for finding in wide if finding.is_loud]:
        said = f"{loud[0].name}: {loud[0].reason}."
    elif ill:
        need = "needs" if len(ill) == 1 else "need"
        many = f"{len(ill):,} of {plural(len(heads), 'head')}"
        said = f"{many} {need} attention: {listed(count(ill))}."
    elif short == len(heads):
        said = f"none of the {plural(short, 'head')} could be judged: the rows are too short."
    elif short:
        said = (
            f"no problems found in {plural(len(heads) - short, 'head')}; "
            f"{plural(short, 'head')} could not be judged."
        )
    else:
        said = f"no problems found in {plural(len(heads), 'head')}."
    if not (loud or ill):
        said += "".join(f" {each.reason[0].upper()}{each.reason[1:]}." for each in wide)
    return f"{when}: {said}" if when else said[0].upper() + said[1:]


def missing_calls(not_understood: Mapping[str, int]) -> list[str]:
    """The line that names the modules whose attention was not understood, if there are any."""
    if not not_understood:
        return []
    names = [f"{place(layer)} ({plural(many, 'call')})" for layer, many in not_understood.items()]
    more = f" and {len(names) - MOST_NAMED} more modules" if len(names) > MOST_NAMED else ""
    return [f"Attention was seen but not understood in {', '.join(names[:MOST_NAMED])}{more}."]


def in_brief(health: PerHead) -> str:
    """The number of heads, and the worst one if they can be judged."""
    heads = plural(health.shape[-1], "head")
    for verdict in getattr(health, "verdicts", list)()[:1]:
        heads += f", the worst is {verdict.head}: {judged_as(verdict._asdict())}"
    return heads


def seen_in(heads: Sequence[Head]) -> list[str]:
    """What was seen, for a list: '4 heads', '128 rows', '1,024 visible pairs'."""
    seen = [plural(len(heads), "head")]
    for name, noun in _SEEN.items():
        total = sum(head[name] or 0 for head in heads)
        seen += [plural(total, noun)] if total or name == "rows" else []
    return seen


# ------------------------------------------------------------ tables


def health_table(health: Health, most: int | None = None) -> str:
    """What was seen in one line, then a line per head, the worst first."""
    heads = describe(Evidence({"": health}))[""]
    heads.sort(key=severity)
    names = [f"{judged_as(head)}{_FEW if head['verdict'] == SHORT else ''}" for head in heads]
    lines = _lines(type(health), heads, {"verdict": names}, most)
    return "\n".join([", ".join(seen_in(heads)), *lines])


def gradient_table(gradients: GradHealth, most: int | None = None) -> str:
    """A line per head, the one that lets least gradient through first."""
    values = gradients.over_batch().to_dict()
    heads = [
        {"head": head, **{name: each[head] for name, each in values.items()}}
        for head in range(gradients.shape[-1])
    ]
    heads.sort(key=lambda head: (head["survival"] is None, head["survival"]))
    return "\n".join(_lines(type(gradients), heads, {}, most))


_SEEN = {
    "rows": "row",
    "pairs": "visible pair",
    "empty_rows": "empty row",
    "nonfinite_rows": "nonfinite row",
}
_FEW = " (few keys)"


def _lines(
    kind: type, heads: Sequence[Head], words: Mapping[str, Sequence[str]], most: int | None
) -> list[str]:
    """Headings and a line per head: words, then the statistics that have a heading."""
    if not heads:
        return []
    columns = {name: each.heading for name, each in statistics_of(kind).items() if each.heading}
    rows = [
        [
            str(head["head"]),
            *(each[at] for each in words.values()),
            *(number(math.nan if head[x] is None else head[x], ".3g") for x in columns),
        ]
        for at, head in enumerate(heads[:most])
    ]
    headings = ["head", *words, *columns.values()]
    align = ">" + "<" * len(words) + ">" * len(columns)
    top, below = table(headings, rows, align)
    gap = GAP if len(GAP.join(top[0])) <= WIDEST else " "
    lines = [gap.join(line) for line in top + below]
    if most is not None and len(heads) > most:
        lines.append(f"… and {plural(len(heads) - most, 'more head')}")
    return lines
