"""Text tables: how Health prints itself, and what the checkup shows on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

GAP = "  "  # between columns
_ROOM = 20  # wanted for the last column: headings break into words to make it
_LEAST = 12  # for a word; with less it stands below the others


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], align: str, width: int | None = None
) -> tuple[list[list[str]], list[list[str]]]:
    """The lines of the headings and those of the rows: cells to be joined by GAP.

    >>> from levelhead._health.table import GAP, table
    >>> top, lines = table(["head", "verdict"], [["3", "healthy"], ["12", "sharp"]], "><")
    >>> for line in top + lines:
    ...     print(GAP.join(line).rstrip())
    head  verdict
       3  healthy
      12  sharp

    align: "<" or ">" for each column
    width: that the lines should fit into: the last column is wrapped
    """
    top, body = [[*headings]], [[*row] for row in rows]
    widths, below = _widths(top + body), False
    if width is not None:
        if _room(widths, width) < _ROOM:
            top = _broken(headings)
            widths = _widths(top + body)
        room = _room(widths, width)
        below = room < min(_LEAST, widths[-1])
        widths[-1] = width - len(GAP) if below else min(widths[-1], room)

    def padded(cells: list[str]) -> list[str]:
        return [f"{x:{side}{size}}" for x, side, size in zip(cells, align, widths, strict=False)]

    def lines(row: list[str]) -> list[list[str]]:
        *cells, last = row
        parts, blank = textwrap.wrap(last, widths[-1]), [""] * len(cells)
        if below:
            return [[*padded(cells), ""], *([GAP + part, *blank] for part in parts)]
        first, *more = parts or [""]
        return [padded([*cells, first]), *(padded([*blank, part]) for part in more)]

    return [x for row in top for x in lines(row)], [x for row in body for x in lines(row)]


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _room(widths: Sequence[int], width: int) -> int:
    """For the last column, beside the others."""
    return width - sum(size + len(GAP) for size in widths[:-1])


def _broken(headings: Sequence[str]) -> list[list[str]]:
    """Headings but the last word by word, on as many lines as it takes."""
    words = [*(heading.split() for heading in headings[:-1]), [headings[-1]]]
    tall = max(map(len, words))
    return [[*line] for line in zip(*([""] * (tall - len(w)) + w for w in words), strict=True)]
