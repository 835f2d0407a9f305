"""A run moment by moment: all heads of some steps at once, read in the order of the file.

A run that is too large to be held is read this way, as far as a page can show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from .._health import Floats, GradHealth, Health, PerHead
from .._records import StepRecord
from ._open import reading
from ._schema import SUMS, columns_of

Statistics = TypeVar("Statistics", bound=PerHead)


class Moment(NamedTuple):
    """Per layer the statistics of some steps together."""

    health: dict[str, Health]
    gradients: dict[str, GradHealth]


def moment_of(records: Sequence[StepRecord], places: Iterable[int]) -> Moment:
    """Of records in memory."""
    chosen = [records[place] for place in places]
    return Moment(
        _merged(Health, [(layer, part.sums) for r in chosen for layer, part in r.health.items()]),
        _merged(
            GradHealth,
            [(layer, part.sums) for r in chosen for layer, part in r.gradients.items()],
        ),
    )


def read_moment(path: Path, run: int, steps: Sequence[int], places: Iterable[int]) -> Moment:
    """Of a file; steps: their ids."""
    chosen = [steps[place] for place in places]
    with reading(path) as connection:
        found = connection.execute("SELECT id, name FROM layers WHERE run_id = ?", (run,))
        layers = dict(found.fetchall())

        def read(kind: type[Statistics]) -> dict[str, Statistics]:
            # An older version's file lacks the newer statistics.
            there = columns_of(connection, SUMS[kind])
            columns = ", ".join(name if name in there else "NULL" for name in kind.COLUMNS)
            statement = f"""
                SELECT layer_id, {columns} FROM {SUMS[kind]} WHERE step_id = ?
                ORDER BY layer_id, head
                """
            parts = []
            for step in chosen:
                rows = connection.execute(statement, (step,)).fetchall()
                sums = np.array(rows, np.float64).reshape(len(rows), 1 + len(kind.COLUMNS))
                ids, first = np.unique(sums[:, 0], return_index=True)  # NULL has become NaN
                split = np.split(sums[:, 1:], first[1:])
                named = [layers[int(i)] for i in ids]
                parts += list(zip(named, split, strict=False))
            return _merged(kind, parts)

        return Moment(read(Health), read(GradHealth))


def _merged(kind: type[Statistics], parts: Iterable[tuple[str, Floats]]) -> dict[str, Statistics]:
    """Per layer all its parts together; one with fewer heads gets some that saw nothing."""
    found: dict[str, list[Floats]] = {}
    for layer, sums in parts:
        found.setdefault(layer, []).append(sums)
    return {
        layer: kind(several[0]) if len(several) == 1 else kind(aligned(kind, several)).over_batch()
        for layer, several in found.items()
    }


def aligned(kind: type[PerHead], parts: Sequence[Floats]) -> Floats:
    """Sums of several steps as one array; a step with fewer heads gets some that saw nothing."""
    heads = max(map(len, parts), default=0)
    nothing = kind._combine(np.empty((0, heads, len(kind.COLUMNS))))
    together = np.repeat(nothing[None], len(parts), axis=0)
    for place, sums in enumerate(parts):
        together[place, : len(sums)] = sums
    return together
