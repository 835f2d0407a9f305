"""Store: the sink that keeps a run in SQLite."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from .._health import GradHealth, Health, Judgement, PerHead, Thresholds
from .._health.findings import HEAD
from .._health.verdicts import SHORT
from .._hints import shown
from .._records import BEFORE_TRAINING, INFERENCE, TRAINING, StepRecord
from ..scaling import ScaleInUse
from ._check import check_record, check_scalars, check_step, count, file_path, text
from ._open import FilePath, StoreError, advice, opening, transaction
from ._outage import Outage
from ._runs import Beginning, layers_of
from ._schema import ALERT_COLUMNS, SUMS, insert
from ._sink import Sink

_PATIENCE = 200  # milliseconds that a step waits for another writer

_THRESHOLDS = "UPDATE runs SET thresholds = ? WHERE id = ?"
_STEP = insert("steps", "run_id", "step", "time", "phase", "course")
_LAYER = insert("layers", "run_id", "name")
_SCALE = "UPDATE layers SET scale = ? WHERE id = ?"
_ALERT = insert("alerts", "step_id", "layer_id", *ALERT_COLUMNS)
_SCALAR = insert("scalar_values", "step_id", "name", "value")
_LATE_SCALAR = """
INSERT OR REPLACE INTO scalar_values (step_id, name, value)
SELECT id, :name, :value FROM steps
WHERE run_id = :run AND step = :step AND phase = :phase ORDER BY id DESC LIMIT 1
"""
# Steps of inference that training came after, numbered back from -1 (or from those before them).
_BEFORE = f"""
UPDATE steps SET phase = '{BEFORE_TRAINING}', step = step - :back
WHERE run_id = :run AND phase = '{INFERENCE}'
"""
_BEFORE_ALERTS = f"""
UPDATE alerts SET since = since - :back
WHERE step_id IN (SELECT id FROM steps WHERE run_id = :run AND phase = '{INFERENCE}')
"""
_COURSES = f"""
SELECT id, course FROM steps WHERE run_id = ? AND phase = '{INFERENCE}' AND length(course) > 2
"""
_COURSE = "UPDATE steps SET course = ? WHERE id = ?"
_LAST = f"SELECT max(step) FROM steps WHERE run_id = ? AND phase = '{INFERENCE}'"
_FIRST = "SELECT min(0, min(step)) FROM steps WHERE run_id = ?"


# What makes one course another. Of single heads' findings the numbers are in the statistics.
Said = tuple[Any, ...]


def _said(record: StepRecord) -> Said | None:
    if record.course is None:
        return None
    return record.phase, *(
        (each.key, each.level) if each.scope == HEAD and not each.forecast else each
        for each in record.course
    )


class Store(Sink):
    """A new run in an SQLite file, which is made if there is none; call it with each step's record.

    >>> import tempfile, time, numpy as np, levelhead as lh
    >>> from levelhead.store import StepRecord, Store, read_run
    >>> path = tempfile.mkdtemp() + "/run.db"
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 32, 64))
    >>> health = lh.attention(q, k, v, return_health=True).health
    >>> with Store(path, name="first try") as store:
    ...     store(StepRecord(step=0, time=time.time(), health={"layers.0.attn": health}))
    >>> run = read_run(path)
    >>> run.name, run.steps, run.layers
    ('first try', [0], ['layers.0.attn'])
    >>> run.total()["layers.0.attn"] == health
    True

    path:  the file; one file may hold many runs, also of several processes at once
    name:  of the run; None numbers it: "run 1"
    model: what was watched, in words
    meta:  anything else to remember, kept as JSON (what JSON does not know, as its str)
    ranks: how many processes train together; only one of them has a store
    arguments: of the training, such as its learning rate; kept as meta is
    start_step: of a training that goes on from a checkpoint, the step it goes on at. The latest
        run of that name (without a name: of that model) goes on, if there is one; the steps that
        it has from there on will be taken again and are dropped.

    The thresholds of the verdicts come with the steps and are kept with the run. When the first
    step of training comes, the steps of inference before it become steps "before training", with
    numbers below 0.

    Each step is one transaction: a killed process loses at most the step being written. A step
    that cannot be written (full disk, locked file) is logged once and lost; training goes on.
    Only opening raises, a `StoreError`; and a record that no sink could write.
    """

    def __init__(
        self,
        path: FilePath,
        *,
        name: str | None = None,
        model: str = "",
        meta: Mapping[str, Any] | None = None,
        ranks: int = 1,
        arguments: Mapping[str, Any] | None = None,
        start_step: int = 0,
    ) -> None:
        self.path = file_path(path)
        beginning = Beginning(
            name=None if name is None else text("name", name),
            model=text("model", model),
            meta=_described("meta", meta),
            ranks=count("ranks", ranks, least=1),
            arguments=_described("arguments", arguments),
            start_step=count("start_step", start_step),
        )
        self._lock = threading.Lock()
        self._outage = Outage(str(self.path))
        self._thresholds = ""  # as written
        self._course: Said | None = None  # as written
        self._scales: dict[str, ScaleInUse] = {}  # as written
        self._inferred = False  # the last step written was one of inference
        with opening(self.path) as self._connection, transaction(self._connection):
            self.run = beginning.write(self._connection, self.path)
            self._layers = layers_of(self._connection, self.run)
        self._open = True
        self._wait(_PATIENCE)

    def __call__(self, record: StepRecord) -> None:
        """Write one step."""
        with self._lock:
            self._check_open()
            check_record(record)
            if self._try(record.step, self._write, record):
                if self._outage.lost:
                    self._wait(_PATIENCE)
                self._outage.worked(record.step)

    def log(self, step: int, scalars: Mapping[str, float], phase: str = TRAINING) -> None:
        """Add scalars to a step that is written; what it has under the same name is replaced."""
        with self._lock:
            self._check_open()
            check_step(step)
            check_scalars(scalars)
            if not self._outage.lost:  # if it is, there is no step to add them to
                self._try(step, self._write_late, int(step), scalars, text("phase", phase))

    def close(self) -> None:
        """Mark the end of the run. A second call does nothing."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            try:
                self._wait(_PATIENCE)
                end = (time.time(), self.run)
                self._connection.execute("UPDATE runs SET ended = ? WHERE id = ?", end)
            except sqlite3.Error as error:
                self._outage.closed(error)
            else:
                self._outage.closed()
            # Leaves one plain file, readable from read-only places and without the -wal and -shm
            # that a reader of a WAL file leaves behind. Refused while others have it open.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA journal_mode = DELETE")
            self._connection.close()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<Store {str(self.path)!r}: run {self.run}, {state}>"

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError(f"the store {self.path} is closed: open a new one")

    def _try(self, step: int, write: Callable[..., None], *given: Any) -> bool:
        """Whether it was written."""
        try:
            write(*given)
        except sqlite3.ProgrammingError:  # nothing that a disk does
            raise
        except sqlite3.Error as error:
            self._outage.failed(step, error, advice(error))
            self._wait(0)  # what is broken is probed, not waited for
            return False
        return True

    def _write_late(self, step: int, scalars: Mapping[str, float], phase: str) -> None:
        values = (
            {"run": self.run, "step": step, "phase": phase, "name": name, "value": float(value)}
            for name, value in scalars.items()
        )
        with transaction(self._connection):
            self._connection.executemany(_LATE_SCALAR, values)

    def _write(self, record: StepRecord) -> None:
        layers = dict(self._layers)
        thresholds = json.dumps(asdict(Thresholds().changed(record.thresholds)))
        write = self._connection.executemany
        with transaction(self._connection):
            if thresholds != self._thresholds:
                self._connection.execute(_THRESHOLDS, (thresholds, self.run))
            if self._inferred and record.phase == TRAINING:
                self._mark_as_before_training()
            when = (int(record.step), float(record.time), record.phase)
            said, course = _said(record), None
            if record.course is not None and said != self._course:
                course = json.dumps([finding.to_dict() for finding in record.course])
            step = self._insert(_STEP, (self.run, *when, course))
            for name in (*record.health, *record.gradients, *(a.layer for a in record.alerts)):
                if name not in layers:
                    layers[name] = self._insert(_LAYER, (self.run, name))
            scales = (
                (json.dumps(scale), layers[name])
                for name, scale in record.scales.items()
                if name in layers and scale != self._scales.get(name)
            )
            write(_SCALE, scales)
            verdicts = {layer: _verdicts(judged) for layer, judged in record.judged.items()}
            heads = (
                (step, layers[name], head, *verdicts[name][head], *sums)
                for name, head, sums in _by_head(record.health)
            )
            write(_statement(Health, "verdict", "level"), heads)
            gradients = (
                (step, layers[name], head, *sums) for name, head, sums in _by_head(record.gradients)
            )
            write(_statement(GradHealth), gradients)
            alerts = (
                (step, layers[alert.layer], *(getattr(alert, name) for name in ALERT_COLUMNS))
                for alert in record.alerts
            )
            write(_ALERT, alerts)
            write(_SCALAR, ((step, name, float(v)) for name, v in record.scalars.items()))
        # Only now: a transaction that failed has written none of it.
        self._layers, self._thresholds, self._course = layers, thresholds, said
        self._scales |= record.scales
        self._inferred = record.phase == INFERENCE

    def _mark_as_before_training(self) -> None:
        (last,) = self._connection.execute(_LAST, (self.run,)).fetchone()
        (first,) = self._connection.execute(_FIRST, (self.run,)).fetchone()
        back = last + 1 - first
        for step, course in self._connection.execute(_COURSES, (self.run,)).fetchall():
            found = json.loads(course)
            for finding in found:
                if finding["since"] is not None:
                    finding["since"] -= back
            self._connection.execute(_COURSE, (json.dumps(found), step))
        for statement in (_BEFORE_ALERTS, _BEFORE):
            self._connection.execute(statement, {"run": self.run, "back": back})

    def _insert(self, statement: str, values: tuple[object, ...]) -> int:
        """The id of the new row."""
        return self._connection.execute(statement, values).lastrowid or 0

    def _wait(self, milliseconds: int) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {milliseconds}")


def _described(name: str, value: Any) -> str:
    try:
        given = dict(value or {})
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a dict, got {shown(value)}") from None
    try:
        return json.dumps(given, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: expected what JSON can hold, got the error: {error}") from None


def _by_head(layers: Mapping[str, PerHead]) -> Iterator[tuple[str, int, list[float]]]:
    for name, statistics in layers.items():
        for head, sums in enumerate(statistics.sums.tolist()):
            yield name, head, sums


def _statement(kind: type[PerHead], *more: str) -> str:
    return insert(SUMS[kind], "step_id", "layer_id", "head", *more, *kind.COLUMNS)


def _verdicts(judged: Judgement) -> list[tuple[str | None, str | None]]:
    """Name and level of each head's verdict; none where it could not be judged."""
    named = zip(judged.names, judged.levels, strict=True)
    return [(None, None) if name == SHORT else (name, level) for name, level in named]
