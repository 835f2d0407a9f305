"""Runs of a store: what is kept of each, going on after a pause, and their list."""

import logging
import sqlite3
from contextlib import closing

import pytest
from store_support import LAYERS, alert, record, rows

from levelhead.report import run_list
from levelhead.report._run_page import run_data
from levelhead.store import Store, list_runs, read_run

TABLES = ("head_stats", "gradient_stats", "alerts", "scalar_values")

SCHEMA_3 = """
ALTER TABLE runs RENAME TO newer;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, model TEXT NOT NULL, meta TEXT NOT NULL,
    version TEXT NOT NULL, started REAL NOT NULL, ended REAL, thresholds TEXT
);
INSERT INTO runs SELECT id, name, model, meta, version, started, ended, thresholds FROM newer;
PRAGMA foreign_keys = OFF;
DROP TABLE newer;
PRAGMA user_version = 3;
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


def write(path, steps, **about):
    with Store(path, **about) as store:
        for step in steps:
            store(record(step, alerts=(alert(step),)))
            store.log(step, {"loss": float(step)})
        return store.run


def test_what_is_said_of_a_run_is_kept(path):
    about = {"ranks": 4, "arguments": {"lr": 0.1}, "meta": {"data": "books"}, "start_step": 30}
    write(path, [30], name="big", model="GPT2", **about)
    run = read_run(path)
    assert (run.name, run.model) == ("big", "GPT2")
    assert {name: getattr(run, name) for name in about} == about
    assert "big · GPT2 · 4 ranks · 1 step recorded" in run_data(run)["about"]


def test_what_is_not_said_has_plain_values(path):
    write(path, [0])
    run = read_run(path)
    assert (run.ranks, run.arguments, run.start_step) == (1, {}, 0)
    assert "rank" not in run_data(run)["about"]


@pytest.mark.parametrize(
    "given, error, said",
    [
        ({"ranks": 0}, ValueError, "ranks: expected an integer of at least 1, got 0"),
        ({"ranks": "two"}, TypeError, "ranks: expected an integer, got 'two'"),
        ({"start_step": -1}, ValueError, "start_step: expected an integer of at least 0, got -1"),
        ({"arguments": 3}, TypeError, "arguments: expected a dict, got 3"),
    ],
)
def test_bad_descriptions_are_refused_before_a_file_is_made(path, given, error, said):
    with pytest.raises(error, match=said):
        Store(path, **given)
    assert not path.exists()


def test_a_resumed_training_goes_on_in_its_run(path, caplog):
    first = write(path, [0, 50, 100], name="a", ranks=2)
    caplog.set_level(logging.INFO, "levelhead")
    again = write(path, [150, 200], name="a", start_step=120, ranks=4, arguments={"lr": 1})
    run = read_run(path)
    assert first == again == run.id
    assert run.steps == [0, 50, 100, 150, 200]
    assert (run.ranks, run.arguments, run.start_step) == (4, {"lr": 1}, 0)
    assert run.layers == list(LAYERS)
    assert [step for step, _ in run.health(LAYERS[1])] == run.steps
    assert [r.getMessage() for r in caplog.records] == [f"{path}: the run 'a' goes on at step 120"]


def test_what_is_trained_again_is_dropped_and_told(path, caplog):
    write(path, [0, 50, 100, 150], name="a")
    write(path, [100], name="a", start_step=100)
    run = read_run(path)
    assert run.steps == [0, 50, 100]
    assert [a.step for a in run.alerts] == [0, 50, 100]
    assert run.scalars["loss"][0].tolist() == [0, 50, 100]
    left = "SELECT count(*) FROM {} WHERE step_id NOT IN (SELECT id FROM steps)"
    assert all(rows(path, left.format(table)) == [(0,)] for table in TABLES)
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.endswith(
        "goes on at step 100; what it has from there on is dropped: steps 100 to 150, 2 recorded"
    )


def test_the_run_is_open_again_until_it_is_closed(path):
    write(path, [0], name="a")
    with Store(path, name="a", start_step=1):
        assert read_run(path).ended is None
    assert read_run(path).ended is not None


def test_which_run_goes_on(path):
    write(path, [0, 10], name="a", model="GPT2")
    write(path, [0, 10], name="b", model="GPT2")
    write(path, [0, 10], name="c", model="Bert")
    assert write(path, [20], name="a", start_step=20) == 1
    assert write(path, [20], model="GPT2", start_step=20) == 2
    assert write(path, [20], name="d", start_step=20) == 4  # there is none of that name: a new one
    assert read_run(path).start_step == 20
    assert write(path, [10], name="d", start_step=10) == 5  # nor one that began so early
    assert write(path, [0], name="a") == 6  # from the start: another training


def test_a_store_of_schema_3_is_read_listed_and_gone_on_with(path):
    write(path, [0, 5], name="old", model="GPT2")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA_3)
    run = read_run(path)
    assert (run.ranks, run.arguments, run.start_step) == (1, {}, 0)
    assert list_runs(path)[0].ranks == 1
    assert write(path, [10], name="old", start_step=10, ranks=2) == 1
    assert (read_run(path).ranks, read_run(path).steps) == (2, [0, 5, 10])


def test_the_list_of_runs(path):
    write(path, [0, 1500], name="first", model="GPT2", ranks=2)
    store = Store(path)
    (first, second) = list_runs(path)
    assert (first.steps, first.first, first.last, first.alerts) == (2, 0, 1500, 2)
    assert (second.steps, second.first, second.last, second.ended) == (0, None, None, None)
    top, *lines = run_list([first, second]).splitlines()
    assert top.split()[:7] == ["run", "name", "model", "ranks", "steps", "from", "to"]
    assert lines[0].split()[:8] == ["1", "first", "GPT2", "2", "2", "0", "1,500", "2"]
    assert lines[1].split()[:9] == ["2", "run", "2", "-", "1", "0", "-", "-", "0"]
    assert lines[1].endswith("-")
    store.close()
    assert run_list([]) == "no run yet"
