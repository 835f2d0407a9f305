"""A checkup on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ._legend import LEGEND, Head, largest_score, needs_attention, severity
from ._names import short_names
from ._scales import mean_of, scale_label, scale_views
from ._words import count, headline, judged, listed, plural, subtitle

Result = Mapping[str, Any]
MOST_HEADS_IN_WORDS = 8


def checkup_text(result: Result) -> RenderableType:
    """The result as rich draws it: the map, the worst heads in words, the other scales."""
    names = dict(zip((layer["name"] for layer in result["layers"]), _short(result), strict=True))
    heads = [(names[layer["name"]], head) for layer in result["layers"] for head in layer["heads"]]
    heads.sort(key=lambda entry: severity(entry[1]))
    parts: list[RenderableType] = [
        Text(subtitle(result), style="dim"),
        Text(headline([head for _, head in heads]), style="bold"),
        "",
        _map(result, names),
        Padding(_legend({head["verdict"] for _, head in heads}), (0, 0, 1, 2)),
        *_worst(heads),
        Text("The same queries and keys at other scales", style="bold"),
        _scales(result),
    ]
    return Group(*parts)


def _short(result: Result) -> list[str]:
    return short_names([layer["name"] for layer in result["layers"]])


def _map(result: Result, names: Mapping[str, str]) -> RenderableType:
    """A line a layer: a block a head, then the worst head in words."""
    widest = max(len(layer["heads"]) for layer in result["layers"])
    cell = 3 if widest <= 16 else 1
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("  layer", no_wrap=True, max_width=44)
    table.add_column("heads", no_wrap=True, min_width=cell * widest)
    table.add_column("worst head", ratio=1)
    for layer in result["layers"]:
        blocks = Text()
        for head in layer["heads"]:
            mark = LEGEND[head["verdict"]]
            blocks.append(mark.letter.center(cell), style=mark.style)
        worst = min(layer["heads"], key=severity)
        words = Text.assemble(
            (f"{worst['head']} ", "bold"), (worst["verdict"], "bold"), f": {worst['reason']}"
        )
        table.add_row(Text(f"  {names[layer['name']]}"), blocks, words)
    return table


def _legend(verdicts: set[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for verdict, mark in LEGEND.items():
        if verdict in verdicts:
            table.add_row(_mark(verdict), Text(f"{verdict}: {mark.meaning}", style="dim"))
    return table


def _mark(verdict: str) -> Text:
    return Text(f" {LEGEND[verdict].letter} ", style=LEGEND[verdict].style)


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
    noted = [verdict for verdict in count(h for _, h in benign) if verdict != "healthy"]
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
    text = Text.assemble(
        f"{which}: ",
        (judged(head), "bold"),
        f"; {head['reason']}.",
    )
    table = Table.grid(padding=(0, 1))
    table.add_row(_mark(head["verdict"]), text)
    return Padding(table, (0, 0, 0, 2))


def _hint(hint: str) -> RenderableType:
    return Padding(Text(f"→ {hint}"), (0, 0, 0, 6))


def _scales(result: Result) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("  scale", no_wrap=True)
    for title in ("largest |score|", "saturated rows", "entropy", "signal"):
        table.add_column(title, justify="right")
    table.add_column("verdicts", ratio=1)
    for rule, heads in scale_views(result):
        label = scale_label(result, rule)
        if heads is None:
            table.add_row(f"  {label}", "", "", "", "", "the scale in use is not known")
            continue
        table.add_row(
            f"  {label}",
            f"{max(largest_score(head) for head in heads):,.3g}",
            _number(mean_of(heads, "saturated"), ".0%"),
            _number(mean_of(heads, "entropy_ratio"), ".2f"),
            _number(mean_of(heads, "signal"), ".2f"),
            listed(count(heads)),
        )
    return table


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)
