"""The runs of a store: how one begins, goes on after a pause, and is listed."""

from __future__ import annotations

import logging
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from .._health.verdicts import LOUD
from .._records import TRAINING
from ._check import file_path
from ._open import FilePath, reading
from ._schema import columns_of

_log = logging.getLogger("levelhead")

_BEGIN = """
INSERT INTO runs (name, model, meta, version, started, ranks, arguments, start_step)
VALUES (coalesce(:name, 'run ' || (SELECT coalesce(max(id), 0) + 1 FROM runs)),
        :model, :meta, :version, :started, :ranks, :arguments, :start_step)
"""
_RESUMED = """
SELECT id, name FROM runs
WHERE coalesce(name = :name, model = :model) AND coalesce(start_step, 0) <= :start_step
ORDER BY id DESC LIMIT 1
"""
_GO_ON = """
UPDATE runs SET ended = NULL, version = :version, ranks = :ranks, arguments = :arguments
WHERE id = :run
"""
_REPEATED = f"FROM steps WHERE run_id = ? AND phase = '{TRAINING}' AND step >= ?"
_PARTS = ("head_stats", "gradient_stats", "alerts", "scalar_values")


@dataclass(frozen=True)
class Beginning:
    """What is said of a run when it begins; meta and arguments are JSON."""

    name: str | None
    model: str
    meta: str
    ranks: int
    arguments: str
    start_step: int

    def write(self, connection: sqlite3.Connection, path: Path) -> int:
        """The id of the run: a new one, or that of the training that goes on from a checkpoint."""
        values = vars(self) | {"version": __version__, "started": time.time()}
        found = self.start_step > 0 and connection.execute(_RESUMED, values).fetchone()
        if not found:
            return connection.execute(_BEGIN, values).lastrowid or 0
        run, name = found
        connection.execute(_GO_ON, values | {"run": run})
        dropped = _drop(connection, run, self.start_step)
        _log.log(
            logging.WARNING if dropped else logging.INFO,
            "%s: the run %r goes on at step %d%s",
            *(path, name, self.start_step, dropped),
        )
        return int(run)


def _drop(connection: sqlite3.Connection, run: int, start: int) -> str:
    """Delete the steps that a resumed training takes again; what to say of it."""
    repeated = (run, start)
    steps = f"SELECT count(*), min(step), max(step) {_REPEATED}"
    many, first, last = connection.execute(steps, repeated).fetchone()
    if not many:
        return ""
    for table in _PARTS:
        connection.execute(
            f"DELETE FROM {table} WHERE step_id IN (SELECT id {_REPEATED})", repeated
        )
    connection.execute(f"DELETE {_REPEATED}", repeated)
    steps = f"steps {first} to {last}, {many} recorded" if many > 1 else f"step {first}"
    return f"; what it has from there on is dropped: {steps}"


def layers_of(connection: sqlite3.Connection, run: int) -> dict[str, int]:
    """The ids of the layers that a run has, by name."""
    found = connection.execute("SELECT name, id FROM layers WHERE run_id = ?", (run,))
    return dict(found.fetchall())


@dataclass(frozen=True)
class RunEntry:
    """One line of the list of runs.

    steps: how many are recorded; first, last: the first and the last of them, None without any
    ranks: how many processes trained; 1 where an older version did not say
    alerts: those at level warning or worse
    """

    id: int
    name: str
    model: str
    started: float
    ended: float | None
    steps: int
    first: int | None
    last: int | None
    ranks: int
    alerts: int


def list_runs(path: FilePath) -> list[RunEntry]:
    """The runs of a store, in the order in which they began.

    >>> import tempfile
    >>> from levelhead.store import Store, list_runs
    >>> path = tempfile.mkdtemp() + "/run.db"
    >>> for name in ("first", "second"):
    ...     Store(path, name=name, model="GPT2").close()
    >>> [(run.id, run.name, run.model, run.steps) for run in list_runs(path)]
    [(1, 'first', 'GPT2', 0), (2, 'second', 'GPT2', 0)]
    """
    path = file_path(path)
    with reading(path) as connection:
        ranks = "coalesce(r.ranks, 1)" if "ranks" in columns_of(connection, "runs") else "1"
        loud = ", ".join(f"'{level}'" for level in LOUD)
        rows = connection.execute(
            f"""
            SELECT r.id, r.name, r.model, r.started, r.ended,
                count(s.id), min(s.step), max(s.step), {ranks},
                (SELECT count(*) FROM alerts AS a JOIN steps AS s ON s.id = a.step_id
                 WHERE s.run_id = r.id AND a.level IN ({loud}))
            FROM runs AS r LEFT JOIN steps AS s ON s.run_id = r.id GROUP BY r.id ORDER BY r.id
            """
        ).fetchall()
    return [RunEntry(*row) for row in rows]
