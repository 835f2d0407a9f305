"""A run: read back from a store, finished or still being written, or still in memory."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._health import (
    Evidence,
    Finding,
    Floats,
    GradHealth,
    Health,
    PerHead,
    Thresholds,
    findings,
)
from .._health.describe import plural
from .._health.statistics import statistics_of
from .._hints import did_you_mean, shown
from .._records import INFERENCE, PHASES, TRAINING, Alert, StepRecord
from ..scaling import ScaleInUse
from ._check import file_path
from ._moments import Moment, aligned, moment_of, read_moment
from ._open import FilePath, StoreError, reading
from ._schema import ALERT_COLUMNS, SUMS, columns_of

Statistics = TypeVar("Statistics", bound=PerHead)
_Series = tuple[NDArray[np.int64], Floats]
_Course = tuple[Finding, ...] | None


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run: as it was when `read_run` looked at it, or of records that are still in memory.

    id, name, model, meta, ranks, arguments, start_step: as given to `Store`
    started, ended: seconds since 1970; ended is None for a run that goes on or was killed
    phase: which steps these are: of "training", of "inference", or "before training"
    steps, times: the recorded steps, in the order they were written
    layers: dotted module names, in the order they were first seen
    alerts: the heads that turned worse
    thresholds: those that its heads were judged with
    scalars: what was logged, by name, the loss first: its steps, and its values
    scales: per layer the scale rule in use, at the last step that it took part in

    The statistics of a run in a file are read when they are asked for.
    """

    id: int
    name: str
    model: str
    meta: Mapping[str, Any]
    started: float
    ended: float | None
    phase: str
    steps: list[int]
    times: list[float]
    layers: list[str]
    alerts: list[Alert]
    thresholds: Thresholds
    scalars: Mapping[str, _Series]
    _source: Callable[[str, type[PerHead]], _Series]
    _moment: Callable[[Sequence[int]], Moment]
    path: Path | None = None
    scales: Mapping[str, ScaleInUse] = field(default_factory=dict)
    ranks: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    start_step: int = 0
    _courses: Sequence[_Course] = ()  # at each of the steps
    _kept: dict[tuple[str, type[PerHead]], _Series] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls,
        records: Sequence[StepRecord],
        *,
        model: str = "",
        alerts: Sequence[Alert] | None = None,
        ended: float | None = None,
    ) -> Run:
        """The same without a file.

        alerts: by default those of the records
        """
        layers = dict.fromkeys(name for record in records for name in record.health)

        def source(layer: str, kind: type[PerHead]) -> _Series:
            of = "health" if kind is Health else "gradients"
            found = [(each.step, getattr(each, of).get(layer)) for each in records]
            return _aligned(kind, [(step, part.sums) for step, part in found if part is not None])

        return cls(
            id=0,
            name="",
            model=model,
            meta={},
            started=records[0].time if records else time.time(),
            ended=ended,
            phase=records[-1].phase if records else TRAINING,
            steps=[record.step for record in records],
            times=[record.time for record in records],
            layers=list(layers),
            alerts=[*alerts] if alerts is not None else [a for r in records for a in r.alerts],
            thresholds=Thresholds().changed(records[-1].thresholds if records else {}),
            scalars=_by_name(
                (record.step, *scalar) for record in records for scalar in record.scalars.items()
            ),
            _source=source,
            _moment=partial(moment_of, records),
            scales={name: each for record in records for name, each in record.scales.items()},
            _courses=_carried_on(record.course for record in records),
        )

    def health(self, layer: str) -> list[tuple[int, Health]]:
        """(step, Health) for every step that the layer took part in."""
        return self._parts(layer, Health)

    def gradients(self, layer: str) -> list[tuple[int, GradHealth]]:
        """(step, GradHealth) for every step with a backward pass through the layer."""
        return self._parts(layer, GradHealth)

    def series(self, layer: str, statistic: str) -> _Series:
        """One statistic over time: its steps, and an array of shape (steps, heads).

        statistic: of `Health` or `GradHealth`, such as "entropy", "largest_score" or "survival"
        """
        kind = GradHealth if statistic in statistics_of(GradHealth) else Health
        known(statistic, "statistic", (*statistics_of(Health), *statistics_of(GradHealth)))
        steps, sums = self._sums(layer, kind)
        return steps, np.asarray(getattr(kind(sums), statistic), np.float64)

    def total(self) -> dict[str, Health]:
        """Per layer the statistics of all steps together."""
        return {layer: self._total(layer, Health) for layer in self.layers}

    def total_gradients(self) -> dict[str, GradHealth]:
        """The same of the gradients, for layers that have some."""
        return {
            layer: self._total(layer, GradHealth)
            for layer in self.layers
            if len(self._sums(layer, GradHealth)[0])
        }

    def latest(self) -> tuple[Evidence, list[int]]:
        """Each layer at the last step that it took part in, and those steps."""
        health = {layer: parts[-1] for layer in self.layers if (parts := self.health(layer))}
        gradients = {
            layer: last
            for layer, (step, _) in health.items()
            for at, last in self.gradients(layer)[-1:]
            if at == step
        }
        steps = [step for step, _ in health.values()]
        course = self._courses[-1] if self._courses else None
        now = {layer: part for layer, (_, part) in health.items()}
        return Evidence(now, gradients, course, self.scales, self.phase == TRAINING), steps

    def together(self, places: Sequence[int]) -> Evidence:
        """Some steps together, by their places in `steps`; nothing of them is kept in memory."""
        course = self._courses[places[-1]]
        return Evidence(*self._moment(places), course, self.scales, self.phase == TRAINING)

    @property
    def courses(self) -> list[tuple[int, tuple[Finding, ...]]]:
        """(step, what the course of the run said from there on), where it changed."""
        found: list[tuple[int, tuple[Finding, ...]]] = []
        for step, course in zip(self.steps, self._courses, strict=True):
            if course is not None and not (found and found[-1][1] == course):
                found.append((step, course))
        return found

    def course_at(self, step: int) -> tuple[Finding, ...] | None:
        """What the course of the run said at a step; None if that is not known.

        Of a step that came twice, as after going back to a checkpoint, the later counts.
        """
        known = [(at, place) for place, at in enumerate(self.steps) if at <= step]
        return self._courses[max(known)[1]] if known else None

    def findings(self) -> list[Finding]:
        """What there is to say of the run as it was last, the worst first."""
        return findings(self.latest()[0], self.thresholds)

    def _repr_html_(self) -> str:
        from ..report._notebook import run_html  # noqa: PLC0415

        return run_html(self)

    def __repr__(self) -> str:
        name = f"run {self.id} {self.name!r} in {str(self.path)!r}" if self.path else "a run"
        of = f" of {self.model}" if self.model else ""
        steps = plural(len(self.steps), "step")
        if self.steps:
            steps += f" ({min(self.steps):,} to {max(self.steps):,})"
        parts = [steps, plural(len(self.layers), "layer"), plural(len(self.alerts), "alert")]
        return f"<Run: {name}{of}, {', '.join(parts)}{', ended' if self.ended else ''}>"

    def _parts(self, layer: str, kind: type[Statistics]) -> list[tuple[int, Statistics]]:
        steps, sums = self._sums(layer, kind)
        return list(zip(steps.tolist(), map(kind, sums), strict=True))

    def _total(self, layer: str, kind: type[Statistics]) -> Statistics:
        return kind(self._sums(layer, kind)[1]).over_batch()

    def _sums(self, layer: str, kind: type[PerHead]) -> _Series:
        """Steps, and sums of shape (steps, heads, columns), read once for all the series."""
        known(layer, "layer", self.layers)
        if (layer, kind) not in self._kept:
            self._kept[layer, kind] = self._source(layer, kind)
        return self._kept[layer, kind]


def _aligned(kind: type[PerHead], steps: Sequence[tuple[int, Floats]]) -> _Series:
    sums = aligned(kind, [part for _, part in steps])
    return np.array([step for step, _ in steps], np.int64), sums


def _carried_on(courses: Iterable[_Course]) -> list[_Course]:
    """The course at every record: where nothing is said, that of the record before."""
    found: list[_Course] = []
    for course in courses:
        found.append(found[-1] if course is None and found else course)
    return found


def _by_name(scalars: Iterable[tuple[int, str, float | None]]) -> dict[str, _Series]:
    """Steps and values of each name; None is NaN."""
    found: dict[str, list[tuple[int, float | None]]] = {}
    for step, name, value in scalars:
        found.setdefault(name, []).append((step, value))
    return {
        name: (
            np.array([step for step, _ in found[name]], np.int64),
            np.array([value for _, value in found[name]], np.float64),
        )
        for name in sorted(found, key=lambda name: (name != "loss", name))
    }


def _read(
    path: Path, run: int, steps: Mapping[int, int], layer: str, kind: type[PerHead]
) -> _Series:
    """From a file; steps: by their ids, as others are of other phases or came after the look."""
    table = SUMS[kind]
    with reading(path) as connection:
        there = columns_of(connection, table)  # an older version's lacks the newer statistics
        columns = ", ".join(f"h.{name}" if name in there else "NULL" for name in kind.COLUMNS)
        rows = connection.execute(
            f"""
            SELECT s.id, h.head, {columns}
            FROM steps AS s JOIN {table} AS h ON h.step_id = s.id
            WHERE s.run_id = ? AND s.id <= ?
            AND h.layer_id = (SELECT id FROM layers WHERE run_id = ? AND name = ?)
            ORDER BY s.id, h.head
            """,
            (run, max(steps, default=0), run, layer),
        ).fetchall()
    found = np.array(rows, np.float64).reshape(len(rows), 2 + len(kind.COLUMNS))  # NULL is NaN
    found = found[np.isin(found[:, 0], list(steps))]
    ids, first = np.unique(found[:, 0], return_index=True)
    parts = np.split(found[:, 2:], first[1:])
    return _aligned(kind, [(steps[int(i)], part) for i, part in zip(ids, parts, strict=False)])


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
    path = file_path(path)
    if not isinstance(run, int | str | np.integer | None):
        raise TypeError(f"run: expected an id or a name, got {shown(run)}")
    if phase is not None:
        known(phase, "phase", PHASES)
    with reading(path) as connection:
        found = _find(connection, path, run)
        values = (found["id"],)
        # The first version's files have no phases.
        phases = "phase" if "phase" in columns_of(connection, "steps") else f"'{TRAINING}'"
        courses = "course" if "course" in columns_of(connection, "steps") else "NULL"
        steps = connection.execute(
            f"SELECT id, step, time, {courses}, {phases} FROM steps WHERE run_id = ? ORDER BY id",
            values,
        ).fetchall()
        there = {each for *_, each in steps}
        if phase is None:
            phase = INFERENCE if there and TRAINING not in there else TRAINING
        steps = [step for step in steps if step[-1] == phase]
        scale = "scale" if "scale" in columns_of(connection, "layers") else "NULL"
        layers = connection.execute(
            f"SELECT id, name, {scale} FROM layers WHERE run_id = ? ORDER BY id", values
        ).fetchall()
        if there - {phase}:
            took_part = f"""
                SELECT 1 FROM steps JOIN head_stats AS h ON h.step_id = steps.id
                WHERE run_id = ? AND layer_id = ? AND {phases} = ? LIMIT 1
                """
            layers = [
                (layer, name, scale)
                for layer, name, scale in layers
                if connection.execute(took_part, (*values, layer, phase)).fetchone()
            ]
        there = columns_of(connection, "alerts")
        told = ", ".join(f"a.{name}" if name in there else "NULL" for name in ALERT_COLUMNS)
        alerts = connection.execute(
            f"""
            SELECT s.id, s.step, l.name, {told}
            FROM alerts AS a
            JOIN steps AS s ON s.id = a.step_id
            JOIN layers AS l ON l.id = a.layer_id
            WHERE s.run_id = ? ORDER BY a.id
            """,
            values,
        ).fetchall()
        scalars = []
        if columns_of(connection, "scalar_values"):  # older versions' files have none
            scalars = connection.execute(
                """
                SELECT s.id, v.name, v.value
                FROM steps AS s JOIN scalar_values AS v ON v.step_id = s.id
                WHERE s.run_id = ? ORDER BY s.id
                """,
                values,
            ).fetchall()
    numbers = {key: step for key, step, *_ in steps}
    return Run(
        path=path,
        **found,
        phase=phase,
        steps=list(numbers.values()),
        times=[at for _, _, at, _, _ in steps],
        layers=[name for _, name, _ in layers],
        alerts=[_alert(phase, *values) for key, *values in alerts if key in numbers],
        scalars=_by_name((numbers[key], *rest) for key, *rest in scalars if key in numbers),
        _source=partial(_read, path, found["id"], numbers),
        _moment=partial(read_moment, path, found["id"], list(numbers)),
        scales={name: ScaleInUse(*json.loads(used)) for _, name, used in layers if used},
        _courses=_carried_on(
            None if course is None else tuple(map(Finding.from_dict, json.loads(course)))
            for _, _, _, course, _ in steps
        ),
    )


def _find(connection: sqlite3.Connection, path: Path, run: int | str | None) -> dict[str, Any]:
    names = ["id", "name", "model", "meta", "started", "ended"]
    there = columns_of(connection, "runs")
    names += [name for name in ("thresholds", "ranks", "arguments", "start_step") if name in there]
    rows = connection.execute(f"SELECT {', '.join(names)} FROM runs ORDER BY id").fetchall()
    runs = [dict(zip(names, row, strict=True)) for row in rows]
    if not runs:
        raise StoreError(f"{path} holds no run yet")
    matching = [r for r in runs if run is None or run == r["id"] or run == r["name"]]
    if not matching:
        listed = ", ".join(f"{r['id']} ({r['name']})" for r in runs[-10:])
        raise StoreError(f"{path} holds no run {shown(run)}; its runs are: {listed}")
    found = matching[-1]
    return found | {
        "meta": json.loads(found["meta"]),
        "thresholds": Thresholds.stored(json.loads(found.get("thresholds") or "{}")),
        "ranks": found.get("ranks") or 1,
        "arguments": json.loads(found.get("arguments") or "{}"),
        "start_step": found.get("start_step") or 0,
    }


def _alert(phase: str, step: int, layer: str, *values: Any) -> Alert:
    fields = dict(zip(ALERT_COLUMNS, values, strict=True))
    fields["value"] = math.nan if fields["value"] is None else fields["value"]
    given = {name: value for name, value in fields.items() if value is not None}
    return Alert(step=step, layer=layer, phase=phase, **given)


def known(name: str, what: str, names: tuple[str, ...] | list[str]) -> None:
    """Raise for a name that is not among those."""
    if name not in names:
        meant = did_you_mean(name, names, "did you mean {!r}? ")
        raise StoreError(f"no {what} {shown(name)}: {meant}there are: {', '.join(names)}")
