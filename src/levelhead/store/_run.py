"""Reading a run back, finished or still being written."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._health import GradHealth, Health
from .._per_head import Floats, PerHead
from .._records import INFERENCE, PHASES, TRAINING, Alert
from ._open import FilePath, StoreError, reading
from ._schema import ALERT_COLUMNS, columns_of

_Series = tuple[NDArray[np.int64], Floats]
_TABLES: dict[type[PerHead], str] = {Health: "head_stats", GradHealth: "gradient_stats"}


@dataclass(frozen=True, eq=False)
class Run:
    """A run as it was when `read_run` looked at it. The statistics are read when asked for.

    id, name, model, meta: as given to `Store`
    started, ended: seconds since 1970; ended is None for a run that goes on or was killed
    phase: which steps these are: of "training", of "inference", or "before training"
    steps, times: the recorded steps, in the order they were written
    layers: dotted module names, in the order they were first seen
    alerts: the heads that turned worse
    """

    path: Path
    id: int
    name: str
    model: str
    meta: Mapping[str, Any]
    started: float
    ended: float | None
    phase: str
    steps: list[int] = field(repr=False)
    times: list[float] = field(repr=False)
    layers: list[str] = field(repr=False)
    alerts: list[Alert] = field(repr=False)
    _ids: list[int] = field(repr=False)  # of its steps: others are of other phases, or came later
    _kept: dict[tuple[str, type[PerHead]], _Series] = field(default_factory=dict, repr=False)

    def health(self, layer: str) -> list[tuple[int, Health]]:
        """(step, Health) for every step that the layer took part in."""
        steps, sums = self._sums(layer, Health)
        return list(zip(steps.tolist(), map(Health, sums), strict=True))

    def gradients(self, layer: str) -> list[tuple[int, GradHealth]]:
        """(step, GradHealth) for every step with a backward pass through the layer."""
        steps, sums = self._sums(layer, GradHealth)
        return list(zip(steps.tolist(), map(GradHealth, sums), strict=True))

    def series(self, layer: str, statistic: str) -> _Series:
        """One statistic over time: its steps, and an array of shape (steps, heads).

        statistic: a field of `Health` or `GradHealth`, such as "entropy" or "survival"
        """
        kind = GradHealth if statistic in GradHealth.FIELDS else Health
        known(statistic, "statistic", (*Health.FIELDS, *GradHealth.FIELDS))
        steps, sums = self._sums(layer, kind)
        return steps, np.asarray(getattr(kind(sums), statistic), np.float64)

    def total(self) -> dict[str, Health]:
        """Per layer the statistics of all steps together."""
        return {layer: Health(self._sums(layer, Health)[1]).over_batch() for layer in self.layers}

    def _sums(self, layer: str, kind: type[PerHead]) -> _Series:
        """Steps, and sums of shape (steps, heads, columns), read once for all the series."""
        known(layer, "layer", self.layers)
        if (layer, kind) not in self._kept:
            self._kept[layer, kind] = self._read(layer, kind)
        return self._kept[layer, kind]

    def _read(self, layer: str, kind: type[PerHead]) -> _Series:
        with reading(self.path) as connection:
            rows = connection.execute(
                f"""
                SELECT s.id, h.head, {", ".join("h." + name for name in kind.COLUMNS)}
                FROM steps AS s JOIN {_TABLES[kind]} AS h ON h.step_id = s.id
                WHERE s.run_id = ? AND s.id <= ?
                AND h.layer_id = (SELECT id FROM layers WHERE run_id = ? AND name = ?)
                ORDER BY s.id, h.head
                """,
                (self.id, max(self._ids, default=0), self.id, layer),
            ).fetchall()
        table = np.array(rows, np.float64).reshape(len(rows), 2 + len(kind.COLUMNS))  # NULL is NaN
        table = table[np.isin(table[:, 0], self._ids)]
        ids, place = np.unique(table[:, 0], return_inverse=True)
        head = table[:, 1].astype(np.int64)
        # A step with fewer heads than another is filled up with heads that saw nothing.
        nothing = kind._combine(np.empty((0, head.max(initial=-1) + 1, len(kind.COLUMNS))))
        sums = np.repeat(nothing[None], len(ids), axis=0)
        sums[place, head] = table[:, 2:]
        steps = np.array(self.steps, np.int64)
        return steps[np.searchsorted(self._ids, ids)], sums


def read_run(path: FilePath, run: int | str | None = None, phase: str | None = None) -> Run:
    """A run of a store, which may be in use; the latest by default.

    >>> import tempfile, time, numpy as np, levelhead as lh
    >>> from levelhead.store import StepRecord, Store, read_run
    >>> path = tempfile.mkdtemp() + "/run.db"
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 32, 64))
    >>> store = Store(path)
    >>> for step, scale in enumerate((0.1, 1.0)):
    ...     health = lh.attention(q, k, v, scale=scale, return_health=True).health
    ...     store(StepRecord(step, time.time(), {"attn": health}))
    >>> run = read_run(path)                              # while it is still written
    >>> steps, entropy = run.series("attn", "entropy")    # shapes (steps,) and (steps, heads)
    >>> entropy.shape, bool((entropy[1] < entropy[0]).all()), run.ended
    ((2, 2), True, None)
    >>> store.close()

    path: the file; it is opened read-only, and nothing is created
    run:  its id or its name (the latest of that name)
    phase: of its steps, "training", "inference" or "before training"; by default training, or
        inference if nothing was trained
    """
    path = Path(path)
    if phase is not None:
        known(phase, "phase", PHASES)
    with reading(path) as connection:
        found = _find(connection, path, run)
        values = (found["id"],)
        # The first version's files have no phases.
        phases = "phase" if "phase" in columns_of(connection, "steps") else f"'{TRAINING}'"
        steps = connection.execute(
            f"SELECT id, step, time, {phases} FROM steps WHERE run_id = ? ORDER BY id", values
        ).fetchall()
        there = {each for *_, each in steps}
        if phase is None:
            phase = INFERENCE if there and TRAINING not in there else TRAINING
        steps = [step for step in steps if step[-1] == phase]
        layers = connection.execute(
            "SELECT id, name FROM layers WHERE run_id = ? ORDER BY id", values
        ).fetchall()
        if there - {phase}:
            took_part = f"""
                SELECT 1 FROM steps JOIN head_stats AS h ON h.step_id = steps.id
                WHERE run_id = ? AND layer_id = ? AND {phases} = ? LIMIT 1
                """
            layers = [
                (layer, name)
                for layer, name in layers
                if connection.execute(took_part, (*values, layer, phase)).fetchone()
            ]
        alerts = connection.execute(
            f"""
            SELECT s.id, s.step, l.name, {", ".join("a." + name for name in ALERT_COLUMNS)}
            FROM alerts AS a
            JOIN steps AS s ON s.id = a.step_id
            JOIN layers AS l ON l.id = a.layer_id
            WHERE s.run_id = ? ORDER BY a.id
            """,
            values,
        ).fetchall()
    ids = [key for key, *_ in steps]
    kept = set(ids)
    return Run(
        path=path,
        **found,
        phase=phase,
        steps=[step for _, step, *_ in steps],
        times=[time for _, _, time, _ in steps],
        layers=[name for _, name in layers],
        alerts=[_alert(phase, *values) for key, *values in alerts if key in kept],
        _ids=ids,
    )


def _find(connection: sqlite3.Connection, path: Path, run: int | str | None) -> dict[str, Any]:
    names = ("id", "name", "model", "meta", "started", "ended")
    rows = connection.execute(f"SELECT {', '.join(names)} FROM runs ORDER BY id").fetchall()
    runs = [dict(zip(names, row, strict=True)) for row in rows]
    if not runs:
        raise StoreError(f"{path} holds no run yet")
    matching = [r for r in runs if run is None or run == r["id"] or run == r["name"]]
    if not matching:
        listed = ", ".join(f"{r['id']} ({r['name']})" for r in runs[-10:])
        raise StoreError(f"{path} holds no run {run!r}; its runs are: {listed}")
    return matching[-1] | {"meta": json.loads(matching[-1]["meta"])}


def _alert(phase: str, step: int, layer: str, *values: Any) -> Alert:
    fields = dict(zip(ALERT_COLUMNS, values, strict=True))
    fields["value"] = math.nan if fields["value"] is None else fields["value"]
    return Alert(step=step, layer=layer, phase=phase, **fields)


def known(name: str, what: str, names: tuple[str, ...] | list[str]) -> None:
    """Raise for a name that is not among those."""
    if name not in names:
        near = get_close_matches(name, names, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise StoreError(f"no {what} {name!r}: {meant}there are: {', '.join(names)}")
