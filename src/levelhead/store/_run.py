"""Reading a run back, finished or still being written."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._health import GradHealth, Health
from .._hints import did_you_mean, shown
from .._per_head import Floats, PerHead
from .._records import Alert
from ._check import file_path
from ._open import FilePath, StoreError, reading
from ._schema import ALERT_COLUMNS

_Series = tuple[NDArray[np.int64], Floats]
_TABLES: dict[type[PerHead], str] = {Health: "head_stats", GradHealth: "gradient_stats"}


@dataclass(frozen=True, eq=False)
class Run:
    """A run as it was when `read_run` looked at it. The statistics are read when asked for.

    id, name, model, meta: as given to `Store`
    started, ended: seconds since 1970; ended is None for a run that goes on or was killed
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
    steps: list[int] = field(repr=False)
    times: list[float] = field(repr=False)
    layers: list[str] = field(repr=False)
    alerts: list[Alert] = field(repr=False)
    _last: int = field(repr=False)  # id of its last step: later ones came after the look
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
                SELECT s.id, s.step, h.head, {", ".join("h." + name for name in kind.COLUMNS)}
                FROM steps AS s JOIN {_TABLES[kind]} AS h ON h.step_id = s.id
                WHERE s.run_id = ? AND s.id <= ?
                AND h.layer_id = (SELECT id FROM layers WHERE run_id = ? AND name = ?)
                ORDER BY s.id, h.head
                """,
                (self.id, self._last, self.id, layer),
            ).fetchall()
        table = np.array(rows, np.float64).reshape(len(rows), 3 + len(kind.COLUMNS))  # NULL is NaN
        _, first, place = np.unique(table[:, 0], return_index=True, return_inverse=True)
        head = table[:, 2].astype(np.int64)
        # A step with fewer heads than another is filled up with heads that saw nothing.
        nothing = kind._combine(np.empty((0, head.max(initial=-1) + 1, len(kind.COLUMNS))))
        sums = np.repeat(nothing[None], len(first), axis=0)
        sums[place, head] = table[:, 3:]
        return table[first, 1].astype(np.int64), sums


def read_run(path: FilePath, run: int | str | None = None) -> Run:
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
    """
    path = file_path(path)
    if not isinstance(run, int | str | np.integer | None):
        raise TypeError(f"run: expected an id or a name, got {shown(run)}")
    with reading(path) as connection:
        found = _find(connection, path, run)
        steps = connection.execute(
            "SELECT id, step, time FROM steps WHERE run_id = ? ORDER BY id", (found["id"],)
        ).fetchall()
        layers = connection.execute(
            "SELECT name FROM layers WHERE run_id = ? ORDER BY id", (found["id"],)
        ).fetchall()
        alerts = connection.execute(
            f"""
            SELECT s.step, l.name, {", ".join("a." + name for name in ALERT_COLUMNS)}
            FROM alerts AS a
            JOIN steps AS s ON s.id = a.step_id
            JOIN layers AS l ON l.id = a.layer_id
            WHERE s.run_id = ? ORDER BY a.id
            """,
            (found["id"],),
        ).fetchall()
    return Run(
        path=path,
        **found,
        steps=[step for _, step, _ in steps],
        times=[time for _, _, time in steps],
        layers=[name for (name,) in layers],
        alerts=[_alert(*values) for values in alerts],
        _last=steps[-1][0] if steps else 0,
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
        raise StoreError(f"{path} holds no run {shown(run)}; its runs are: {listed}")
    return matching[-1] | {"meta": json.loads(matching[-1]["meta"])}


def _alert(step: int, layer: str, *values: Any) -> Alert:
    fields = dict(zip(ALERT_COLUMNS, values, strict=True))
    fields["value"] = math.nan if fields["value"] is None else fields["value"]
    return Alert(step=step, layer=layer, **fields)


def known(name: str, what: str, names: tuple[str, ...] | list[str]) -> None:
    """Raise for a name that is not among those."""
    if name not in names:
        meant = did_you_mean(name, names, "did you mean {!r}? ")
        raise StoreError(f"no {what} {shown(name)}: {meant}there are: {', '.join(names)}")
