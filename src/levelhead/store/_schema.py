"""The tables of a store, from the table of statistics. docs/store.md explains them."""

from __future__ import annotations

import sqlite3

from .._health import GradHealth, Health, PerHead
from .._health.statistics import Count, Statistic, statistics_of
from .._records import TRAINING

APPLICATION_ID = 0x4C564C48  # "LVLH": tells a store from any other SQLite file
# PRAGMA user_version. It grows when older versions could not use the file. A new statistic does
# not need that: its column is NULL in rows that do not have it, and others pass over it.
VERSION = 4

ALERT_COLUMNS = (
    *("head", "verdict", "level", "previous", "value", "reason", "hint"),
    *("scope", "heads", "since"),
)
_PHASE = f"TEXT NOT NULL DEFAULT '{TRAINING}'"
SUMS: dict[type[PerHead], str] = {Health: "head_stats", GradHealth: "gradient_stats"}

_SCALARS = """
-- What was logged with a step, such as its loss. NULL is NaN.
CREATE TABLE IF NOT EXISTS scalar_values (
    step_id  INTEGER NOT NULL REFERENCES steps,
    name     TEXT NOT NULL,
    value    REAL,
    PRIMARY KEY (step_id, name)
) WITHOUT ROWID;
"""
_SCALARS_VIEW = """
-- The same for people.
CREATE VIEW IF NOT EXISTS scalars AS
SELECT steps.run_id AS run, steps.phase, steps.step, v.name, v.value
FROM scalar_values AS v JOIN steps ON steps.id = v.step_id;
"""


def schema() -> str:
    """The statements that make a new store."""
    return f"""
CREATE TABLE IF NOT EXISTS runs (
    id          INTEGER PRIMARY KEY,
    name        TEXT NOT NULL,
    model       TEXT NOT NULL,
    meta        TEXT NOT NULL,        -- a JSON object
    version     TEXT NOT NULL,        -- of levelhead
    started     REAL NOT NULL,        -- seconds since 1970
    ended       REAL,                 -- NULL: still running, or killed
    thresholds  TEXT,                 -- of the verdicts, a JSON object; NULL: the usual ones
    ranks       INTEGER,              -- how many processes trained; NULL: not known
    arguments   TEXT,                 -- of the watch and of the training, a JSON object
    start_step  INTEGER               -- the number of the first step; NULL: not known
);

CREATE TABLE IF NOT EXISTS steps (
    id       INTEGER PRIMARY KEY,  -- in order of writing
    run_id   INTEGER NOT NULL REFERENCES runs,
    step     INTEGER NOT NULL,     -- from 0 in training; below 0 before it
    time     REAL NOT NULL,
    phase    {_PHASE},  -- or 'inference', or 'before training'
    course   TEXT                  -- what the course of the run says from here on, a JSON list of
                                   -- findings; NULL: the same as at the step before
);
CREATE INDEX IF NOT EXISTS steps_of_run ON steps (run_id);

CREATE TABLE IF NOT EXISTS layers (
    id       INTEGER PRIMARY KEY,  -- in order of first sight
    run_id   INTEGER NOT NULL REFERENCES runs,
    name     TEXT NOT NULL,        -- dotted module name; '' is outside any module
    scale    TEXT,                 -- the scale rule in use at its last step, a JSON list: rule,
                                   -- scale, d_k, d_model
    UNIQUE (run_id, name)
);

-- Sums, not means, so that steps and runs merge exactly: Health.COLUMNS in their order.
-- The view "heads" has the means. SQLite has no NaN: a NULL among the numbers is one.
CREATE TABLE IF NOT EXISTS head_stats (
    step_id         INTEGER NOT NULL REFERENCES steps,
    layer_id        INTEGER NOT NULL REFERENCES layers,
    head            INTEGER NOT NULL,
    verdict         TEXT,          -- NULL: too few keys to judge
    level           TEXT,
{_columns(Health)}
    PRIMARY KEY (step_id, layer_id, head)
) WITHOUT ROWID;

-- GradHealth.COLUMNS, where a backward pass ran. A table of its own: there a NULL is a NaN.
CREATE TABLE IF NOT EXISTS gradient_stats (
    step_id         INTEGER NOT NULL REFERENCES steps,
    layer_id        INTEGER NOT NULL REFERENCES layers,
    head            INTEGER NOT NULL,
{_columns(GradHealth)}
    PRIMARY KEY (step_id, layer_id, head)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS alerts (
    id        INTEGER PRIMARY KEY,
    step_id   INTEGER NOT NULL REFERENCES steps,
    layer_id  INTEGER NOT NULL REFERENCES layers,
    head      INTEGER NOT NULL,
    verdict   TEXT NOT NULL,
    level     TEXT NOT NULL,
    previous  TEXT NOT NULL,
    value     REAL,
    reason    TEXT NOT NULL,
    hint      TEXT NOT NULL,
    scope     TEXT,                 -- 'head', 'layer' or 'model'; layer and head are the worst one
    heads     INTEGER,              -- how many are concerned
    since     INTEGER               -- the first step at which it was so
);
CREATE INDEX IF NOT EXISTS alerts_of_step ON alerts (step_id);

{_SCALARS}
{_view()}
{_SCALARS_VIEW}

PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


def migration(connection: sqlite3.Connection) -> list[str]:
    """The statements that bring a file of an older version up to date; none where it is.

    Rows stay as they are: a number that is new is NULL in them, which reads as NaN, not known.
    """
    wanted = {
        "runs": {
            "thresholds": "TEXT",
            "ranks": "INTEGER",
            "arguments": "TEXT",
            "start_step": "INTEGER",
        },
        "steps": {"phase": _PHASE, "course": "TEXT"},
        "layers": {"scale": "TEXT"},
        "alerts": {"scope": "TEXT", "heads": "INTEGER", "since": "INTEGER"},
    } | {table: dict.fromkeys(kind.COLUMNS, "REAL") for kind, table in SUMS.items()}
    added = [
        f"ALTER TABLE {table} ADD COLUMN {name} {kind}"
        for table, columns in wanted.items()
        for name, kind in columns.items()
        if name not in columns_of(connection, table)
    ]
    if not columns_of(connection, "scalar_values"):
        added += [_SCALARS, _SCALARS_VIEW]
    found = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'heads'").fetchone()
    if not added and found and _words(found[0]) == _words(_view()):
        return []
    return [*added, "DROP VIEW IF EXISTS heads", _view(), f"PRAGMA user_version = {VERSION}"]


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """The columns that a table of a file has."""
    return {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}


def insert(table: str, *columns: str) -> str:
    """A statement that names its columns: others that the file has stay NULL."""
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _columns(kind: type[PerHead]) -> str:
    return "\n".join(
        f"    {each.column + ' ':<15} REAL,{_comment(kind, each)}"
        for each in statistics_of(kind).values()
        if each.column
    )


def _comment(kind: type[PerHead], each: Statistic) -> str:
    table = statistics_of(kind)
    said = {
        "max": "a maximum" if isinstance(each, Count) else "-inf without any",
        "min": "+inf without any",
        "mean": "a mean",
        "squares": "sum of squared deviations from the mean",
    }.get(each.merge, f"over {table[each.over].label}" if each.over else "")
    said = said or (each.meaning if not each.is_field else "")
    return f"          -- {said}" if said else ""


def _view() -> str:
    statistics = [
        f"    {each.sql(table)} AS {each.name}"
        for kind, table in ((Health, "h"), (GradHealth, "g"))
        for each in statistics_of(kind).values()
        if each.is_field
    ]
    lines = ",\n".join(statistics)
    return f"""
-- For people: every statistic of docs/health.md, one line per step, layer and head.
-- x / 0.0 is NULL in SQLite, which is right here: nothing to average.
CREATE VIEW IF NOT EXISTS heads AS
SELECT
    steps.run_id AS run,
    steps.step,
    steps.time,
    layers.name AS layer,
    h.head,
    h.verdict,
    h.level,
{lines}
FROM head_stats AS h
JOIN steps ON steps.id = h.step_id
JOIN layers ON layers.id = h.layer_id
LEFT JOIN gradient_stats AS g
    ON g.step_id = h.step_id AND g.layer_id = h.layer_id AND g.head = h.head;
"""


def _words(statement: str) -> list[str]:
    """A statement without its comments and its line breaks, to compare it."""
    lines = (line.partition("--")[0] for line in statement.splitlines())
    return " ".join(lines).replace("IF NOT EXISTS ", "").rstrip("; ").split()
