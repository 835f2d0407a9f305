"""The tables of a store. docs/store.md explains them and shows queries."""

from __future__ import annotations

import sqlite3

from .._records import TRAINING

APPLICATION_ID = 0x4C564C48  # "LVLH": tells a store from any other SQLite file
VERSION = 2  # PRAGMA user_version; grows with every change below

ALERT_COLUMNS = ("head", "verdict", "level", "previous", "value", "reason", "hint")

# SQLite has no NaN: a NULL among the numbers is one. Infinities it keeps.
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS runs (
    id       INTEGER PRIMARY KEY,
    name     TEXT NOT NULL,
    model    TEXT NOT NULL,
    meta     TEXT NOT NULL,        -- a JSON object
    version  TEXT NOT NULL,        -- of levelhead
    started  REAL NOT NULL,        -- seconds since 1970
    ended    REAL                  -- NULL: still running, or killed
);

CREATE TABLE IF NOT EXISTS steps (
    id       INTEGER PRIMARY KEY,  -- in order of writing
    run_id   INTEGER NOT NULL REFERENCES runs,
    step     INTEGER NOT NULL,     -- from 0 in training; below 0 before it
    time     REAL NOT NULL,
    phase    TEXT NOT NULL DEFAULT '{TRAINING}'  -- or 'inference', or 'before training'
);
CREATE INDEX IF NOT EXISTS steps_of_run ON steps (run_id);

CREATE TABLE IF NOT EXISTS layers (
    id       INTEGER PRIMARY KEY,  -- in order of first sight
    run_id   INTEGER NOT NULL REFERENCES runs,
    name     TEXT NOT NULL,        -- dotted module name; '' is outside any module
    UNIQUE (run_id, name)
);

-- Sums, not means, so that steps and runs merge exactly: Health.COLUMNS in their order.
-- The view "heads" has the means.
CREATE TABLE IF NOT EXISTS head_stats (
    step_id         INTEGER NOT NULL REFERENCES steps,
    layer_id        INTEGER NOT NULL REFERENCES layers,
    head            INTEGER NOT NULL,
    verdict         TEXT,          -- NULL: too few keys to judge
    level           TEXT,
    rows            REAL,
    pairs           REAL,
    empty_rows      REAL,
    nonfinite_rows  REAL,
    finite_rows     REAL,          -- rows that see a key and whose scores are all finite
    choice_rows     REAL,          -- finite rows that see more than one key
    widest_row      REAL,          -- a maximum
    score_count     REAL,          -- pairs of finite rows
    score_max       REAL,          -- -inf without any
    score_min       REAL,          -- +inf without any
    score_mean      REAL,          -- a mean
    score_m2        REAL,          -- sum of squared deviations from it
    large_scores    REAL,          -- over pairs of finite rows
    entropy         REAL,          -- over finite rows
    entropy_ratio   REAL,          -- over choice rows
    effective_keys  REAL,          -- over finite rows
    top_weight      REAL,          -- over finite rows
    saturated       REAL,          -- over choice rows
    signal          REAL,          -- over finite rows
    jacobian_norm   REAL,          -- over finite rows
    first_key       REAL,          -- over choice rows
    distance        REAL,          -- over finite rows
    null_mass       REAL,          -- over finite rows
    PRIMARY KEY (step_id, layer_id, head)
) WITHOUT ROWID;

-- GradHealth.COLUMNS, where a backward pass ran. A table of its own: there a NULL is a NaN.
CREATE TABLE IF NOT EXISTS gradient_stats (
    step_id         INTEGER NOT NULL REFERENCES steps,
    layer_id        INTEGER NOT NULL REFERENCES layers,
    head            INTEGER NOT NULL,
    weight_grad_sq  REAL,
    score_grad_sq   REAL,
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
    hint      TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS alerts_of_step ON alerts (step_id);

-- For people: every statistic of docs/health.md, one line a step, layer and head.
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
    CAST(h.rows AS INTEGER) AS rows,
    CAST(h.pairs AS INTEGER) AS pairs,
    CAST(h.empty_rows AS INTEGER) AS empty_rows,
    CAST(h.nonfinite_rows AS INTEGER) AS nonfinite_rows,
    CAST(h.widest_row AS INTEGER) AS widest_row,
    CASE WHEN h.score_count > 0 THEN h.score_max END AS score_max,
    CASE WHEN h.score_count > 0 THEN h.score_min END AS score_min,
    CASE WHEN h.score_count > 0 THEN h.score_mean END AS score_mean,
    h.score_m2 / h.score_count AS score_var,
    h.large_scores / h.score_count AS large_scores,
    h.entropy / h.finite_rows AS entropy,
    h.entropy_ratio / h.choice_rows AS entropy_ratio,
    h.effective_keys / h.finite_rows AS effective_keys,
    h.top_weight / h.finite_rows AS top_weight,
    h.saturated / h.choice_rows AS saturated,
    h.signal / h.finite_rows AS signal,
    h.jacobian_norm / h.finite_rows AS jacobian_norm,
    h.first_key / h.choice_rows AS first_key,
    h.distance / h.finite_rows AS distance,
    h.null_mass / h.finite_rows AS null_mass,
    sqrt(g.weight_grad_sq) AS weight_grad_norm,
    sqrt(g.score_grad_sq) AS score_grad_norm,
    sqrt(g.score_grad_sq) / sqrt(g.weight_grad_sq) AS survival
FROM head_stats AS h
JOIN steps ON steps.id = h.step_id
JOIN layers ON layers.id = h.layer_id
LEFT JOIN gradient_stats AS g
    ON g.step_id = h.step_id AND g.layer_id = h.layer_id AND g.head = h.head;

PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


def migration(connection: sqlite3.Connection) -> list[str]:
    """The statements that bring a file of an older version up to date; none where it is."""
    if "phase" in columns_of(connection, "steps"):
        return []
    added = f"ALTER TABLE steps ADD COLUMN phase TEXT NOT NULL DEFAULT '{TRAINING}'"
    return [added, f"PRAGMA user_version = {VERSION}"]


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """The columns that a table of a file has."""
    return {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
