"""Scalars in the store and the other sinks: with the record of their step, or after it."""

import json
import logging
import math
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from watch_support import Stack, lively, randn

import levelhead.torch
from levelhead.store import JsonLines, Run, StepRecord, Store, StoreError, TensorBoard, read_run


def record(step, phase="training", **scalars):
    return StepRecord(step, 1000.0 + step, {}, phase=phase, scalars=scalars)


def series(run):
    """As lists; NaN as None, to be compared."""
    return {
        name: [(s, None if math.isnan(v) else v) for s, v in zip(*map(list, part), strict=True)]
        for name, part in run.scalars.items()
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


# ---------------------------------------------------------------- the store


def test_scalars_come_back_by_name_the_loss_first(path):
    records = [record(0, loss=2.5, accuracy=0.5), record(5, loss=1.5), record(10, accuracy=1)]
    with Store(path) as store:
        for each in records:
            store(each)
    expected = {"loss": [(0, 2.5), (5, 1.5)], "accuracy": [(0, 0.5), (10, 1.0)]}
    for run in (read_run(path), Run.from_records(records)):
        assert series(run) == expected
        assert list(run.scalars) == ["loss", "accuracy"]
        steps, values = run.scalars["loss"]
        assert (steps.dtype, values.dtype) == (np.int64, np.float64)


def test_whatever_number_it_is_it_is_kept(path):
    values = [math.nan, math.inf, -math.inf, -2.5, 1e-300]
    with Store(path) as store:
        for step, value in enumerate(values):
            store(record(step, loss=value))
        store.log(4, {"other": math.nan})
    run = read_run(path)
    np.testing.assert_array_equal(run.scalars["loss"][1], values)
    np.testing.assert_array_equal(run.scalars["other"][1], [math.nan])


def test_what_comes_late_is_added_to_its_step(path):
    with Store(path) as store:
        store(record(0, loss=1))
        store.log(0, {"loss": 3, "lr": np.float32(0.5)})
        store(record(5))
        store.log(np.int64(5), {"loss": 2})
        store.log(0, {"late": 4})
        store.log(7, {"loss": 9})  # there is no such step
        store.log(0, {"loss": 9}, "inference")
        assert series(read_run(path)) == {
            "loss": [(0, 3), (5, 2)],
            "late": [(0, 4)],
            "lr": [(0, 0.5)],
        }
    with pytest.raises(StoreError, match="is closed: open a new one"):
        store.log(0, {"loss": 1})


def test_scalars_stay_with_steps_that_were_before_training(path):
    with Store(path) as store:
        store(record(0, "inference", loss=9))
        store(record(4, "inference"))
        store.log(4, {"loss": 8}, "inference")
        assert series(read_run(path)) == {"loss": [(0, 9), (4, 8)]}
        store(record(0, loss=1))
    assert series(read_run(path)) == {"loss": [(0, 1)]}
    assert series(read_run(path, phase="before training")) == {"loss": [(-5, 9), (-1, 8)]}
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT * FROM scalars ORDER BY step").fetchall()
    assert found == [
        (1, "before training", -5, "loss", 9.0),
        (1, "before training", -1, "loss", 8.0),
        (1, "training", 0, "loss", 1.0),
    ]


def test_runs_keep_their_scalars_apart(path):
    with Store(path, name="one") as one, Store(path, name="two") as two:
        one(record(0, loss=1))
        two(record(0, loss=2))
        one.log(0, {"lr": 0.1})
    assert series(read_run(path, "one")) == {"loss": [(0, 1)], "lr": [(0, 0.1)]}
    assert series(read_run(path, "two")) == {"loss": [(0, 2)]}


def test_a_locked_file_loses_what_came_late_and_says_so_once(path, caplog):
    with Store(path) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        store(record(0))
        other.execute("BEGIN IMMEDIATE")
        store.log(0, {"loss": 1})
        store(record(1))
        store.log(1, {"loss": 1})
        other.execute("ROLLBACK")
        store(record(2))
        store.log(2, {"loss": 2})
    assert series(read_run(path)) == {"loss": [(2, 2)]}
    failed, again = (entry.getMessage() for entry in caplog.records)
    assert "step 0 could not be written (database is locked)" in failed
    assert "written again from step 2 on" in again


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((1.5, {}), TypeError, "step: expected an integer, got 1.5"),
        ((0, None), TypeError, "scalars: expected a dict of numbers, got None"),
        ((0, {"loss": None}), TypeError, "scalars: loss: expected a number, got None"),
    ],
)
def test_what_no_sink_takes(path, tmp_path, given, error, text):
    sinks = (Store(path), JsonLines(tmp_path / "run.jsonl"), TensorBoard(tmp_path / "tb"))
    for sink in sinks:
        with sink, pytest.raises(error) as told:
            sink.log(*given)
        assert str(told.value) == text
    assert (tmp_path / "run.jsonl").read_text() == ""


# ---------------------------------------------------------------- JSON lines, TensorBoard


def test_lines_have_scalars(tmp_path):
    with JsonLines(tmp_path / "run.jsonl") as sink:
        sink(record(5, loss=0.5, bad=math.nan))
        sink.log(5, {"late": math.inf, "lr": 0.1})
        sink.log(6, {"loss": 1}, "inference")
    with pytest.raises(StoreError, match="is closed: open it anew"):
        sink.log(5, {})
    first, *late = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert first["scalars"] == {"loss": 0.5, "bad": None}
    assert late == [
        {"step": 5, "phase": "training", "scalars": {"late": None, "lr": 0.1}},
        {"step": 6, "phase": "inference", "scalars": {"loss": 1.0}},
    ]


def test_tensorboard_has_scalars_by_their_names(tmp_path):
    with TensorBoard(tmp_path) as sink:
        sink(record(5, loss=0.5))
        sink(record(6, "inference", loss=9))
        sink.log(5, {"val/loss": 0.25})
        sink.log(6, {"val/loss": 8}, "inference")
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()

    def values(tag):
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]

    assert values("loss") == [(5, 0.5)]
    assert values("inference/loss") == [(6, 9.0)]
    assert values("val/loss") == [(5, 0.25)]
    assert values("inference/val/loss") == [(6, 8.0)]


# ---------------------------------------------------------------- from a watch


def test_a_watch_writes_what_is_logged_at_either_time(path, tmp_path, caplog):
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with (
        JsonLines(tmp_path / "run.jsonl") as lines,
        levelhead.torch.watch(model, every=2, store=path, sinks=[lines]) as watch,
    ):
        for step in range(5):
            loss = model(randn(2, 13, 32)).square().mean()
            watch.log(loss=torch.tensor(step))
            loss.backward()
            optimizer.step()
            watch.log(after=-step)
            assert series(read_run(path))["after"][-1] == (step // 2 * 2, -(step // 2 * 2))
    expected = {"loss": [(0, 0), (2, 2), (4, 4)], "after": [(0, 0), (2, -2), (4, -4)]}
    assert series(read_run(path)) == series(watch._run()) == expected
    written = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert [line["scalars"] for line in written][:2] == [{"loss": 0}, {"after": 0}]
    assert [entry for entry in caplog.records if entry.levelno >= logging.WARNING] == []
