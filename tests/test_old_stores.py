"""Stores that earlier versions wrote: they open, are read, make their page, and take new runs.

tests/data/run-0.1.db holds three watched steps of a model of two layers with two heads each. At
step 2 the queries of layers.1's second head were multiplied by 4,000.
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from page_support import unpacked

from levelhead import StepRecord, Thresholds
from levelhead.report import run_page
from levelhead.report._run_page import run_data
from levelhead.store import Store, read_run
from levelhead.store._schema import VERSION, migration

OLD = Path(__file__).parent / "data" / "run-0.1.db"


@pytest.fixture
def path(tmp_path):
    """A copy: the file of the tests stays what the old version wrote."""
    return Path(shutil.copy(OLD, tmp_path / "run.db"))


def test_a_run_of_0_1_is_read(path):
    run = read_run(path)
    assert (run.name, run.model, run.steps) == ("run 1", "Stack", [0, 1, 2])
    assert run.layers == ["layers.0", "layers.1"]
    _, scores = run.series("layers.1", "score_max")
    np.testing.assert_allclose(
        scores,
        [[1.864172308, 5.727792789], [1.861981798, 5.721175151], [1.859805004, 19154.02575]],
        rtol=1e-9,
    )
    _, survival = run.series("layers.1", "survival")
    np.testing.assert_allclose(survival[-1], [0.09778095609, 4.594493447e-08], rtol=1e-9)
    assert run.scalars == {}
    (alert,) = run.alerts
    assert (alert.step, alert.layer, alert.head) == (2, "layers.1", 1)
    assert (alert.verdict, alert.level, alert.previous) == ("exploding", "critical", "sharp")
    assert alert.reason == "the largest |score| is 19,154 (critical from 10,000)"
    assert run.total()["layers.0"].rows.tolist() == [72, 72]


def test_a_run_of_0_1_has_its_page(path):
    run = read_run(path)
    data = run_data(run)
    assert "1 of 4 heads needs attention: 1 exploding." in data["headline"]
    assert [layer["verdicts"] for layer in unpacked(data)] == [["···", "···"], ["···", "ppX"]]
    assert "layers.1" in run_page(run)


def test_a_store_of_0_1_takes_a_new_run(path):
    old = read_run(path)
    (_, last) = old.health("layers.1")[-1]
    with Store(path, name="new") as store:
        assert store.run == 2
        thresholds, scalars = {"exploding": 2.0}, {"loss": 1.5}
        store(StepRecord(0, 0.0, {"layers.1": last}, thresholds=thresholds, scalars=scalars))
    again = read_run(path, 1)
    assert again.health("layers.1") == old.health("layers.1")
    assert (again.alerts, again.thresholds, again.scalars) == (old.alerts, Thresholds(), {})
    new = read_run(path)
    assert (new.name, new.thresholds) == ("new", Thresholds(exploding=2.0))
    assert [part.tolist() for part in new.scalars["loss"]] == [[0], [1.5]]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
        counts = "SELECT count(entropy), count(survival) FROM heads GROUP BY run ORDER BY run"
        assert connection.execute(counts).fetchall() == [(12, 12), (2, 0)]
        assert connection.execute("SELECT * FROM scalars").fetchall() == [
            (2, "training", 0, "loss", 1.5)
        ]


def test_two_processes_may_bring_a_store_up_to_date_at_once(path):
    with closing(sqlite3.connect(path)) as other:
        (first, *_) = migration(other)
        assert "ALTER TABLE runs ADD COLUMN thresholds" in first
        Store(path).close()
        assert migration(other) == []


def test_reading_changes_nothing(path):
    before = path.read_bytes()
    run_page(read_run(path))
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["run.db"]


def test_a_store_without_scalars_is_brought_up_to_date(tmp_path):
    """As schema 2 left it."""
    path = tmp_path / "run.db"
    Store(path, name="old").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "DROP VIEW scalars; DROP TABLE scalar_values; PRAGMA user_version = 2;"
        )
    assert read_run(path).scalars == {}
    with Store(path) as store:
        store(StepRecord(0, 0.0, {}, scalars={"loss": 2.0}))
    assert list(read_run(path).scalars) == ["loss"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert migration(connection) == []
