"""The store when writing or opening fails: what is kept, and what is said."""

import resource
import sqlite3
import threading
import time
from contextlib import closing

import pytest
from store_support import LAYERS, alert, messages, record, rows

from levelhead.store import Store, StoreError, read_run
from levelhead.store._schema import VERSION


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


# ---------------------------------------------------------------- when writing fails


def test_a_full_disk_is_said_once_and_so_is_its_end(path, caplog):
    store = Store(path)
    store(record(0))
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    for step in range(1, 60):  # some fit into the space that is left
        new = () if step < 30 else ("new",)
        store(record(step, layers=(*LAYERS, *new), alerts=(alert(step),)))
    kept = read_run(path).steps
    lost = 60 - len(kept)
    assert lost > 50
    (said,) = messages(caplog)
    assert said == (
        f"{path}: step {len(kept)} could not be written (database or disk is full). Training goes "
        "on, and every later step is tried again. What to do: free space on its disk."
    )
    store._connection.execute("PRAGMA max_page_count = 1000000")
    store(record(60, layers=(*LAYERS, "new")))
    store(record(61))
    assert messages(caplog)[1:] == [
        f"{path}: written again from step 60 on; {lost} steps were lost."
    ]
    store.close()
    assert len(messages(caplog)) == 2
    run = read_run(path)
    assert run.steps == [*kept, 60, 61]
    assert run.ended is not None
    assert [step for step, _ in run.health("new")] == [60]
    assert len(run.alerts) == len(kept) - 1  # no alert of a lost step


def test_a_file_that_may_not_grow(path, caplog):
    """The system itself refuses, as on a disk that is full or over quota."""
    store = Store(path)
    store(record(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name("run.db-wal").stat().st_size, hard))
    try:
        for step in range(1, 30):
            store(record(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store(record(30))
    store.close()
    failed, again = messages(caplog)
    assert "could not be written" in failed
    assert again.endswith("written again from step 30 on; 29 steps were lost.")
    assert read_run(path).steps == [0, 30]
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


def test_a_locked_file_is_said_once_and_holds_training_up_only_once(path, caplog):
    store = Store(path)
    store(record(0))
    records = [record(step) for step in range(1, 12)]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        begin = time.perf_counter()
        store(records[0])
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        for each in records[1:10]:
            store(each)
        later = time.perf_counter() - begin
        assert read_run(path).steps == [0]  # a lock for writing does not stop readers
        other.execute("ROLLBACK")
    store(records[10])
    assert messages(caplog) == [
        f"{path}: step 1 could not be written (database is locked). Training goes on, and every "
        "later step is tried again. What to do: close the program that holds it.",
        f"{path}: written again from step 11 on; 10 steps were lost.",
    ]
    assert 0.15 < first < 1.0
    assert later < first
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        store(record(12))
        assert "step 12 could not" in messages(caplog)[-1]  # a new outage is new news
        store.close()
    assert messages(caplog)[3:] == [
        f"{path}: closed; 1 step was lost at the end.",
        f"{path}: the end of the run could not be marked (database is locked); "
        "it looks unfinished.",
    ]
    assert read_run(path).steps == [0, 11]
    assert read_run(path).ended is None


def test_a_short_lock_is_waited_for(path, caplog):
    store = Store(path)
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.05, other.execute, ("ROLLBACK",))
        timer.start()
        store(record(0))
        timer.join()
    store.close()
    assert messages(caplog) == []
    assert read_run(path).steps == [0]


def test_an_interrupted_write_leaves_nothing(path, monkeypatch):
    store = Store(path)
    store(record(0))

    def interrupt(_):
        yield from ()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("levelhead.store._store._by_head", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store(record(1))
    store(record(2))
    store.close()
    assert read_run(path).steps == [0, 2]


# ---------------------------------------------------------------- when opening fails


@pytest.mark.parametrize("way", [Store, read_run])
def test_what_is_no_store(tmp_path, way):
    text = tmp_path / "notes.txt"
    text.write_text("these are my notes, and no database at all\n" * 40)
    with pytest.raises(
        StoreError,
        match=r"notes.txt cannot be opened \(file is not a database\): it is not a store; choose",
    ):
        way(text)
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE runs (mine TEXT)")
    before = other.read_bytes()
    with pytest.raises(
        StoreError, match=r"other.db is no store of levelhead's; choose another file"
    ):
        way(other)
    assert other.read_bytes() == before
    with pytest.raises(StoreError, match=r"is a folder; a store is a file, such as .*run.db"):
        way(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "other.db"}


@pytest.mark.parametrize("way", [Store, read_run])
def test_a_file_of_a_newer_version(path, way):
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    versions = rf"\(schema {VERSION + 1}, this one knows {VERSION}\)"
    with pytest.raises(StoreError, match=rf"newer levelhead {versions}: upgrade"):
        way(path)
    assert rows(path, "SELECT count(*) FROM runs") == [(1,)]


@pytest.mark.parametrize("way", [Store, read_run])
def test_a_file_that_another_program_has_locked(path, way, monkeypatch):
    monkeypatch.setattr("levelhead.store._open._PATIENCE", 0.1)
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"\(database is locked\): close the program that"):
            way(path)


def test_a_missing_folder(tmp_path):
    assert issubclass(StoreError, ValueError)
    with pytest.raises(StoreError, match=r"the folder .*/no does not exist: make it, or correct"):
        Store(tmp_path / "no" / "run.db")
    assert list(tmp_path.iterdir()) == []


def test_reading_a_missing_file_creates_none(tmp_path):
    with pytest.raises(StoreError, match=r"there is no store at .*run.db: check the path"):
        read_run(tmp_path / "run.db")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_becomes_a_store_and_a_store_may_be_without_runs(path):
    path.touch()
    with pytest.raises(StoreError, match="is no store of levelhead's"):
        read_run(path)
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM runs")
    with pytest.raises(StoreError, match="holds no run yet"):
        read_run(path)
