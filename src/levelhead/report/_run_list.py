"""The runs of a store as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .._health.table import GAP, table
from ..store import RunEntry
from ._run_page import clock

_COLUMNS = {  # and to which side
    "run": ">",
    "name": "<",
    "model": "<",
    "ranks": ">",
    "steps": ">",
    "from": ">",
    "to": ">",
    "alerts": ">",
    "started": "<",
    "ended": "<",
}


def run_list(runs: Sequence[RunEntry]) -> str:
    """One line per run, the latest last."""
    if not runs:
        return "no run yet"
    top, body = table(list(_COLUMNS), map(_cells, runs), "".join(_COLUMNS.values()))
    return "\n".join(GAP.join(line).rstrip() for line in top + body)


def _cells(run: RunEntry) -> list[str]:
    counts = (run.ranks, run.steps, run.first, run.last, run.alerts)
    return [
        str(run.id),
        run.name,
        run.model or "-",
        *("-" if each is None else f"{each:,}" for each in counts),
        clock(run.started),
        clock(run.ended) if run.ended else "-",
    ]
