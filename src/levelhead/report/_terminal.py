"""A checkup on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .._health.describe import (
    Head,
    count,
    headline,
    in_words,
    judged_as,
    missing_calls,
    needs_attention,
    plural,
)
from .._health.judge import severity
from .._health.numbers import number
from .._health.table import GAP, table
from .._health.verdicts import HEALTHY, LOUD, VERDICTS, ranked
from ..checkup._what_if import compared
from ._names import cut, short_names
from ._scales import ABOUT, NOT_KNOWN, in_short, in_use, is_known, label
from ._words import findings_of, subtitle

Result = Mapping[str, Any]
MOST_HEADS_IN_WORDS = 8


def checkup_text(result: Result, width: int) -> RenderableType:
    """The result as rich draws it: the map, the worst heads in words, the other scales.

    width: of the window
    """
    names = dict(zip((layer["name"] for layer in result["layers"]), _short(result), strict=True))
    heads = [(names[layer["name"]], head) for layer in result["layers"] for head in layer["heads"]]
    heads.sort(key=lambda entry: severity(entry[1]))
    parts: list[RenderableType] = [
        Text(subtitle(result), style="dim"),
        Text(headline([head for _, head in heads], findings=findings_of(result)), style="bold"),
        *map(Text, missing_calls(result["not_understood"])),
        *map(Text, in_use(result)),
        "",
        *_map(result, names, width),
        Padding(_legend({head["verdict"] for _, head in heads}), (0, 0, 1, 2)),
        *_worst(heads),
        Text("The same queries and keys at other scales", style="bold"),
        Text(f"  {ABOUT}", style="dim"),
        *_scales(result, width),
        *([] if is_known(result) else [Text(f"  {NOT_KNOWN}", style="dim")]),
    ]
    return Group(*parts)


def _short(result: Result) -> list[str]:
    return short_names([layer["name"] for layer in result["layers"]])


def _map(result: Result, names: Mapping[str, str], width: int) -> Iterator[Text]:
    """One line per layer: one block per head, then the worst head in words."""
    cell = 3 if max(len(layer["heads"]) for layer in result["layers"]) <= 16 else 1
    styles = {VERDICTS[verdict].letter: style_of(verdict) for verdict in VERDICTS}
    rows = []
    for layer in result["layers"]:
        letters = [VERDICTS[head["verdict"]].letter for head in layer["heads"]]
        worst = min(layer["heads"], key=severity)
        words = f"{worst['head']} {worst['verdict']}: {worst['reason']}"
        rows.append([cut(names[layer["name"]]), "".join(x.center(cell) for x in letters), words])
    top, lines = table(["layer", "heads", "worst head"], rows, "<<<", width - len(GAP))
    yield from (_line(*line, style="dim") for line in top)
    for name, blocks, words in lines:
        coloured = Text(blocks)
        for at in range(0, len(blocks), cell):
            coloured.stylize(styles.get(blocks[at : at + cell].strip(), ""), at, at + cell)
        worst, *reason = words.partition(":") if blocks.strip() else ("", words)
        yield _line(name, coloured, Text.assemble((worst, "bold"), *reason))


def _line(*cells: str | Text, style: str = "") -> Text:
    """A line of a table, indented; cut where the window is too narrow for it."""
    line = Text("", style, no_wrap=True, overflow="ellipsis")
    for cell in cells:
        line.append(GAP).append(cell)
    line.rstrip()
    return line


def _legend(verdicts: set[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for verdict, rule in ranked().items():
        if verdict in verdicts:
            table.add_row(_mark(verdict), Text(f"{verdict}: {rule.meaning}", style="dim"))
    return table


def _mark(verdict: str) -> Text:
    return Text(f" {VERDICTS[verdict].letter} ", style=style_of(verdict))


def style_of(verdict: str) -> str:
    """The verdict's colours as rich writes them, bold if it can call for action."""
    rule = VERDICTS[verdict]
    if rule.colour is None:
        return "dim"
    fill, ink = rule.colour.light
    loud = any(case.level in LOUD for case in rule.cases)
    return f"{'bold ' if loud else ''}{ink} on {fill}"


def _worst(heads: list[tuple[str, Head]]) -> Iterator[RenderableType]:
    """Each head that needs attention, then each benign verdict once."""
    ill = [entry for entry in heads if needs_attention(entry[1])]
    if ill:
        yield Text("Worst first", style="bold")
    for hint, alike in groupby(ill[:MOST_HEADS_IN_WORDS], lambda entry: entry[1]["hint"]):
        for name, head in alike:
            yield _in_words(f"{name}, head {head['head']}", head)
        yield _hint(hint)  # once for all heads that it is for
    if len(ill) > MOST_HEADS_IN_WORDS:
        more = len(ill) - MOST_HEADS_IN_WORDS
        yield Text(f"  and {more} more; --html and --json show them all", style="dim")
    benign = [entry for entry in heads if not needs_attention(entry[1])]
    noted = [verdict for verdict in count(h for _, h in benign) if verdict != HEALTHY]
    if noted:
        yield ""
        yield Text("Worth knowing", style="bold")
    for verdict in noted:
        kind = [entry for entry in benign if entry[1]["verdict"] == verdict]
        name, head = kind[0]
        which = f"{plural(len(kind), 'head')}, most of all {name}, head {head['head']}"
        yield _in_words(which, head)
        yield _hint(head["hint"])
    yield ""


def _in_words(which: str, head: Head) -> RenderableType:
    text = Text(in_words(which, head))
    text.stylize("bold", len(which) + 2, len(which) + 2 + len(judged_as(head)))
    table = Table.grid(padding=(0, 1))
    table.add_row(_mark(head["verdict"]), text)
    return Padding(table, (0, 0, 0, 2))


def _hint(hint: str) -> RenderableType:
    return Padding(Text(f"→ {hint}"), (0, 0, 0, 6))


def _scales(result: Result, width: int) -> Iterator[Text]:
    statistics = [each for each in compared() if each.compared == "mean"]
    rows = []
    for scale in result["scales"]:
        values = [scale[name] for name in ("weight_moved", *(each.name for each in statistics))]
        forms = [".0%", *(each.form for each in statistics)]
        cells = (
            "-" if value is None else number(value, form)
            for value, form in zip(values, forms, strict=True)
        )
        rows.append([label(scale), *cells, "".join(in_short(scale))])
    headings = ["scale", "weight moved", *(each.label for each in statistics), "what goes wrong"]
    align = "<" + ">" * (len(statistics) + 1) + "<"
    top, lines = table(headings, rows, align, width - len(GAP))
    yield from (_line(*line, style="dim") for line in top)
    yield from (_line(*line) for line in lines)
