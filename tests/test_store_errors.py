"""Wrong paths, names and records: every sink refuses them before it writes, in the usual words."""

from dataclasses import replace

import numpy as np
import pytest

import levelhead as lh
from levelhead import GradHealth
from levelhead.store import (
    Alert,
    JsonLines,
    StepRecord,
    Store,
    StoreError,
    TensorBoard,
    read_run,
)

QUERY, KEY, VALUE = np.random.default_rng(0).standard_normal((3, 2, 12, 8))
HEALTH = lh.reference(QUERY, KEY, VALUE, return_health=True).health
BATCH = lh.reference(QUERY[None], KEY[None], VALUE[None], return_health=True).health
GRADIENTS = GradHealth.from_sums([[4.0, 1.0], [1.0, 1.0]])
ALERT = Alert(7, "attn", 1, "sharp", "info", "healthy", 0.5, "the reason", "the hint")
RECORD = StepRecord(7, 1000.0, {"attn": HEALTH}, {"attn": GRADIENTS}, (ALERT,))
LONGER = 10**5000  # Python refuses to print it
UTF8 = "expected text that UTF-8 can hold, got"
INT64 = "expected an integer of 64 bits, got"
PER_HEAD = "of shape (heads,) for layer 'a', got"


def refuses(error, text, function, *args, **options):
    with pytest.raises(error) as caught:
        function(*args, **options)
    assert str(caught.value) == text and type(caught.value) is error


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("function", [Store, JsonLines, read_run])
def test_paths_that_are_none(function, tmp_path):
    for path in (None, 3, b"run.db", ["run.db"]):
        refuses(TypeError, f"path: expected the path of a file, got {path!r}", function, path)
    for name in ("a\0b", "a\ud800"):
        path = f"{tmp_path}/{name}"
        text = f"path: expected a name that a file can have, got {path!r}"
        refuses(StoreError, text, function, path)


def test_a_store_is_a_file():
    text = "path: expected the path of a file, got ':memory:'; a store is a file"
    refuses(StoreError, text, Store, ":memory:")
    refuses(StoreError, text, read_run, ":memory:")


@pytest.mark.parametrize("function", [Store, read_run])
def test_paths_of_other_things(function, tmp_path):
    folder = f"{tmp_path} is a folder; a store is a file, such as {tmp_path / 'run.db'}"
    refuses(StoreError, folder, function, tmp_path)
    with pytest.raises(StoreError, match=r"^\. is a folder; a store is a file"):
        function("")
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(StoreError, match=r"is not a database\): it is not a store; choose another"):
        function(tmp_path / "text")
    with pytest.raises(StoreError, match="File name too long"):
        function("x" * 5000)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        StoreError, match=r"^writer: expected a folder that can be written, got '.*"
    ):
        TensorBoard(tmp_path / "file")
    with pytest.raises(
        StoreError, match=r"^writer: expected a folder that can be written, got '.*"
    ):
        TensorBoard(tmp_path / "a\0b")
    text = "writer: expected a SummaryWriter or a folder, got None"
    refuses(TypeError, text, TensorBoard, None)


def test_a_closed_file(tmp_path):
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.close()
    refuses(StoreError, f"{sink.path} is closed: open it anew", sink, RECORD)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"name": "a\ud800"}, ValueError, f"name: {UTF8} 'a\\ud800'"),
        ({"model": "\udfff"}, ValueError, f"model: {UTF8} '\\udfff'"),
        ({"name": 3}, TypeError, "name: expected a string, got 3"),
        ({"name": 2**70}, TypeError, "name: expected a string, got 1180591620717411303424"),
        ({"model": None}, TypeError, "model: expected a string, got None"),
        ({"model": b"tiny"}, TypeError, "model: expected a string, got b'tiny'"),
        ({"meta": 3}, TypeError, "meta: expected a dict, got 3"),
        ({"meta": "lr"}, TypeError, "meta: expected a dict, got 'lr'"),
        (
            {"meta": {(1, 2): 3}},
            ValueError,
            "meta: expected what JSON can hold, got the error: keys must be str, int, float, bool "
            "or None, not tuple",
        ),
    ],
    ids=str,
)
def test_names_of_a_run(options, error, text, tmp_path):
    refuses(error, text, Store, tmp_path / "run.db", **options)
    assert list(tmp_path.iterdir()) == []


def test_odd_names_that_can_be_kept(tmp_path):
    path = tmp_path / "run.db"
    with Store(path, name="a\0b", model="ü\n", meta={"\ud800": "\udfff"}) as store:
        store(replace(RECORD, health={"a\0b": HEALTH}))
    run = read_run(path, "a\0b")
    assert (run.name, run.model, run.meta) == ("a\0b", "ü\n", {"\ud800": "\udfff"})
    assert run.health("a\0b") == [(7, HEALTH)]


def test_runs_and_layers_that_there_are_not(tmp_path):
    path = tmp_path / "run.db"
    with Store(path, name="first") as store:
        store(RECORD)
    for run in (1.5, [1], b"first", np.array([1, 2])):
        refuses(TypeError, f"run: expected an id or a name, got {run!r}", read_run, path, run)
    assert read_run(path, np.int64(1)).name == "first"
    with pytest.raises(StoreError, match="holds no run an object of type int that cannot be"):
        read_run(path, LONGER)
    refuses(StoreError, "no layer 3: there are: attn", read_run(path).health, 3)


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"step": 2**70}, ValueError, f"step: {INT64} 1180591620717411303424"),
        ({"step": -(2**63) - 1}, ValueError, f"step: {INT64} -9223372036854775809"),
        (
            {"step": LONGER},
            ValueError,
            f"step: {INT64} an object of type int that cannot be printed",
        ),
        ({"step": 1.5}, TypeError, "step: expected an integer, got 1.5"),
        ({"step": "7"}, TypeError, "step: expected an integer, got '7'"),
        ({"step": None}, TypeError, "step: expected an integer, got None"),
        ({"time": None}, TypeError, "time: expected a number, got None"),
        ({"time": float("nan")}, ValueError, "time: expected seconds since 1970, got nan"),
        (
            {"time": 10**400},
            ValueError,
            f"time: expected a number that a float can hold, got 1{'0' * 96}...",
        ),
        ({"health": {"a\ud800": HEALTH}}, ValueError, f"layer: {UTF8} 'a\\ud800'"),
        ({"gradients": {"\udfff": GRADIENTS}}, ValueError, f"layer: {UTF8} '\\udfff'"),
        ({"health": {3: HEALTH}}, TypeError, "layer: expected a string, got 3"),
        ({"health": {None: HEALTH}}, TypeError, "layer: expected a string, got None"),
        ({"health": None}, TypeError, "health: expected a dict of layers, got None"),
        (
            {"health": [3]},
            TypeError,
            "health: expected a dict of layers, got [3]",
        ),
        ({"health": {"a": 3}}, TypeError, f"health: expected Health {PER_HEAD} 3"),
        ({"health": {"a": BATCH}}, ValueError, f"health: expected Health {PER_HEAD} shape (1, 2)"),
        (
            {"gradients": {"a": HEALTH}},
            TypeError,
            f"gradients: expected GradHealth {PER_HEAD} Health",
        ),
        ({"scalars": [3]}, TypeError, "scalars: expected a dict of numbers, got [3]"),
        ({"scalars": {"a\ud800": 3}}, ValueError, f"scalars: {UTF8} 'a\\ud800'"),
        ({"scalars": {3: 3}}, TypeError, "scalars: expected a string, got 3"),
        ({"scalars": {"loss": "3"}}, TypeError, "scalars: loss: expected a number, got '3'"),
        ({"alerts": None}, TypeError, "alerts: expected a tuple, got None"),
        ({"alerts": (3,)}, TypeError, "alerts: expected objects of class Alert, got 3"),
        (
            {"alerts": (replace(ALERT, layer="\ud800"),)},
            ValueError,
            f"alert.layer: {UTF8} '\\ud800'",
        ),
        (
            {"alerts": (replace(ALERT, head=2**70),)},
            ValueError,
            f"alert.head: {INT64} 1180591620717411303424",
        ),
        (
            {"alerts": (replace(ALERT, value="much"),)},
            TypeError,
            "alert.value: expected a number, got 'much'",
        ),
        (
            {"alerts": (replace(ALERT, hint=None),)},
            TypeError,
            "alert.hint: expected a string, got None",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_records(changes, error, text, tmp_path):
    wrong = replace(RECORD, **changes)
    with Store(tmp_path / "run.db") as store, JsonLines(tmp_path / "run.jsonl") as lines:
        with TensorBoard(tmp_path / "tb") as board:
            for sink in (store, lines, board):
                refuses(error, text, sink, wrong)
        store(RECORD)  # a wrong record is no outage
        lines(RECORD)
    assert read_run(tmp_path / "run.db").steps == [7]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 1


def test_what_is_no_record(tmp_path):
    with Store(tmp_path / "run.db") as store:
        refuses(TypeError, "record: expected a StepRecord, got 3", store, 3)


def test_numbers_of_numpy_are_numbers(tmp_path):
    with Store(tmp_path / "run.db") as store:
        store(replace(RECORD, step=np.int64(2**63 - 1), time=np.float32(2.5)))
    run = read_run(tmp_path / "run.db")
    assert (run.steps, run.times) == ([2**63 - 1], [2.5])
