"""The store: what goes in comes out, whoever else reads or dies meanwhile."""

import doctest
import importlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from store_support import HEADS, LAYERS, alert, messages, record, rows

import levelhead as lh
from levelhead import GradHealth, Health, Thresholds
from levelhead._health import GRAD_SUMS, HEALTH_SUMS
from levelhead._records import StepRecord
from levelhead.store import Run, Store, StoreError, read_run
from levelhead.store._schema import APPLICATION_ID, VERSION


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


# ---------------------------------------------------------------- in and out


def test_a_run_comes_back_bit_for_bit(path):
    records = [record(0), record(5, alerts=(alert(5),)), record(10)]
    before = time.time()
    with Store(path, name="first", model="tiny", meta={"lr": 0.1, "file": path}) as store:
        for each in records:
            store(each)
        assert read_run(path).ended is None
    run = read_run(path)
    assert isinstance(run, Run)
    assert (run.name, run.model, run.meta) == ("first", "tiny", {"lr": 0.1, "file": str(path)})
    assert before <= run.started <= run.ended <= time.time()
    assert run.steps == [0, 5, 10]
    assert run.times == [1000.0, 1005.0, 1010.0]
    assert run.layers == list(LAYERS)
    assert run.alerts == [alert(5)]
    for layer in LAYERS:
        assert run.health(layer) == [(r.step, r.health[layer]) for r in records]
        assert run.gradients(layer) == [(r.step, r.gradients[layer]) for r in records]
        assert run.total()[layer] == Health.merge(*(r.health[layer] for r in records))
    assert run.health(LAYERS[0]) != run.health(LAYERS[1])


@pytest.mark.parametrize("statistic", [*Health.FIELDS, *GradHealth.FIELDS])
def test_series_of_every_statistic(path, statistic):
    records = [record(step) for step in (3, 4)]
    with Store(path) as store:
        for each in records:
            store(each)
    steps, values = read_run(path).series(LAYERS[1], statistic)
    assert steps.tolist() == [3, 4]
    source = "gradients" if statistic in GradHealth.FIELDS else "health"
    expected = [getattr(getattr(r, source)[LAYERS[1]], statistic) for r in records]
    np.testing.assert_array_equal(values, expected)
    assert values.shape == (2, HEADS)


def test_numbers_that_are_not_finite_survive(path):
    nothing = lh.reference(
        *np.ones((3, 1, 4, 8)), mask=np.zeros((4, 4), bool), return_health=True
    ).health
    assert nothing.sums[0, HEALTH_SUMS.index("score_max")] == -math.inf
    gradients = GradHealth.from_sums([[math.nan, math.inf]])
    written = StepRecord(1, 2.0, {"": nothing}, {"": gradients}, (alert(1, math.nan),))
    with Store(path) as store:
        store(written)
    run = read_run(path)
    assert run.health("") == [(1, nothing)]
    ((_, back),) = run.gradients("")
    np.testing.assert_array_equal(back.sums, [[math.nan, math.inf]])
    assert math.isnan(run.alerts[0].value)
    assert np.isnan(run.series("", "score_max")[1]).all()


def test_layers_may_come_late_lack_gradients_and_change_their_heads(path):
    wide = record(0).health[LAYERS[0]]
    narrow = Health(wide.sums[:2])
    with Store(path) as store:
        store(StepRecord(0, 0.0, {"a": narrow}))
        store(StepRecord(1, 0.0, {"b": wide, "a": wide}))
        store(StepRecord(2, 0.0, {}))
    run = read_run(path)
    assert run.layers == ["a", "b"]
    assert run.steps == [0, 1, 2]
    assert [step for step, _ in run.health("b")] == [1]
    assert run.gradients("a") == []
    assert run.series("a", "survival")[1].shape == (0, 0)
    rows_, entropy = run.series("a", "rows")[1], run.series("a", "entropy")[1]
    assert rows_.tolist() == [[10, 10, 0], [10, 10, 10]]  # the third head saw nothing at first
    assert np.isnan(entropy).tolist() == [[False, False, True], [False] * 3]
    assert run.total()["a"].rows.tolist() == [20, 20, 10]


def test_many_runs_in_one_file(path):
    for name in ("a", "b", "a", None):
        with Store(path, name=name) as store:
            store(record(store.run))
    assert (read_run(path).id, read_run(path).name) == (4, "run 4")
    assert read_run(path, "a").id == 3  # the latest of that name
    assert read_run(path, 1).name == "a"
    assert read_run(path, "b").steps == [2]
    assert read_run(path, "b").health(LAYERS[0]) == [(2, record(2).health[LAYERS[0]])]
    with pytest.raises(StoreError, match=r"no run 'c'; its runs are: 1 \(a\), 2 \(b\), 3 \(a\)"):
        read_run(path, "c")


def test_two_stores_of_one_file_at_once(path):
    with Store(path, name="rank 0") as first, Store(path, name="rank 1") as second:
        for step in range(3):
            first(record(step))
            second(record(10 + step))
    assert read_run(path, "rank 0").steps == [0, 1, 2]
    assert read_run(path, "rank 1").steps == [10, 11, 12]


def test_a_run_is_as_it_was_when_read(path):
    with Store(path) as store:
        store(record(0))
        run = read_run(path)
        store(record(1))
        assert run.steps == [0]
        assert [step for step, _ in run.health(LAYERS[0])] == [0]
        assert read_run(path).steps == [0, 1]


def test_steps_may_end_in_other_threads(path):
    with Store(path) as store:
        threads = [threading.Thread(target=store, args=(record(step),)) for step in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = read_run(path)
    assert sorted(run.steps) == list(range(8))
    assert all(health == record(step).health[LAYERS[1]] for step, health in run.health(LAYERS[1]))


def test_closing_twice_is_once_and_writing_after_it_raises(path):
    store = Store(path)
    store.close()
    ended = read_run(path).ended
    store.close()
    assert read_run(path).ended == ended
    with pytest.raises(StoreError, match="is closed: open a new one"):
        store(record(0))


def test_a_closed_store_is_one_file_and_reading_leaves_no_other(path):
    with Store(path) as store:
        store(record(0))
        assert {p.name for p in path.parent.iterdir()} == {"run.db", "run.db-wal", "run.db-shm"}
    read_run(path).total()
    assert [p.name for p in path.parent.iterdir()] == ["run.db"]


@pytest.mark.parametrize("name", ["a b#c?d%20e.db", "ü.db"])
def test_odd_file_names(tmp_path, name):
    with Store(str(tmp_path / name)) as store:
        store(record(0))
    assert read_run(tmp_path / name).steps == [0]


def test_unknown_names_are_told_with_the_nearest(path):
    with Store(path) as store:
        store(record(0))
    run = read_run(path)
    with pytest.raises(
        StoreError, match=r"no layer 'layers.0.atn': did you mean 'layers.0.attn'\?"
    ):
        run.health("layers.0.atn")
    with pytest.raises(StoreError, match=r"no statistic 'entrpy': did you mean 'entropy'\?"):
        run.series(LAYERS[0], "entrpy")


# ---------------------------------------------------------------- the schema


def test_tables_have_the_columns_of_the_sums(path):
    Store(path).close()
    columns = {
        table: [name for _, name, *_ in rows(path, f"PRAGMA table_info({table})")]
        for table in ("head_stats", "gradient_stats", "heads")
    }
    assert columns["head_stats"][5:] == list(HEALTH_SUMS)
    assert columns["gradient_stats"][3:] == list(GRAD_SUMS)
    assert columns["heads"][7:] == [*Health.FIELDS, *GradHealth.FIELDS]
    assert rows(path, "PRAGMA application_id") == [(APPLICATION_ID,)]
    assert rows(path, "PRAGMA user_version") == [(VERSION,)]


def test_the_view_says_what_health_says(path):
    empty = lh.reference(
        *np.ones((3, HEADS, 4, 8)), mask=np.zeros((4, 4), bool), return_health=True
    ).health
    written = record(7, gradients=LAYERS[:1])
    written = StepRecord(7, 9.0, {**written.health, "empty": empty}, written.gradients)
    with Store(path) as store:
        store(written)
    for layer, health in written.health.items():
        for field in (*Health.FIELDS, *GradHealth.FIELDS):
            got = rows(path, f"SELECT {field} FROM heads WHERE layer = ? ORDER BY head", layer)
            source = written.gradients.get(layer) if field in GradHealth.FIELDS else health
            expected = np.full(HEADS, np.nan) if source is None else getattr(source, field)
            np.testing.assert_array_equal(np.array(got, float)[:, 0], expected, f"{layer} {field}")
    verdicts = {v.head: (v.verdict, v.level) for v in written.health[LAYERS[0]].verdicts()}
    assert len(verdicts) == HEADS
    got = rows(
        path, "SELECT head, verdict, level, run, step, time FROM heads WHERE layer = ?", LAYERS[0]
    )
    assert got == [(head, *verdicts[head], 1, 7, 9.0) for head in range(HEADS)]
    assert rows(path, "SELECT DISTINCT verdict, level FROM heads WHERE layer = 'empty'") == [
        (None, None)
    ]


def test_each_head_of_each_layer_gets_its_own_verdict(path):
    keys = np.eye(10)
    mixed = lh.reference(*np.stack([[20 * keys, 0 * keys, 2e4 * keys]] * 3), return_health=True)
    calm = lh.reference(*np.stack([[2 * keys]] * 3), return_health=True)
    written = StepRecord(0, 0.0, {"calm": calm.health, "mixed": mixed.health})
    with Store(path) as store:
        store(written)
    got = rows(path, "SELECT layer, head, verdict, level FROM heads")
    assert sorted(got) == [
        ("calm", 0, "healthy", "ok"),
        ("mixed", 0, "saturated", "info"),
        ("mixed", 1, "uniform", "info"),
        ("mixed", 2, "exploding", "critical"),
    ]
    judged = written.judged["mixed"]
    assert judged.worst_first() == [2, 0, 1]
    assert [judged[head] for head in (2, 0, 1)] == mixed.health.verdicts()
    assert sorted(judged) == sorted(mixed.health.verdicts()) and len(list(judged)) == 3
    assert list(written.judged["calm"]) == calm.health.verdicts()
    with pytest.raises(IndexError, match="head 1 of 1"):
        written.judged["calm"][1]  # the next one is another layer's
    assert StepRecord(0, 0.0, {}).judged == {}


def test_thresholds_are_kept_with_the_run(path):
    usual = record(0)
    strict = StepRecord(1, 0.0, usual.health, thresholds={"exploding": 2, "sink": np.float32(0.5)})
    with Store(path) as store:
        store(usual)
        assert read_run(path).thresholds == Thresholds()
        store(strict)
    assert read_run(path).thresholds == Thresholds(exploding=2.0, sink=0.5)
    with Store(path) as store:
        assert read_run(path).thresholds == Thresholds()  # nothing is known yet
    assert rows(path, "SELECT count(*) FROM heads WHERE run = 1 AND level = 'error'")[0][0] > 0
    with closing(sqlite3.connect(path)) as connection, connection:
        new = '{"sink": 0.7, "from a later version": 3}'
        connection.execute("UPDATE runs SET thresholds = ?", (new,))
    assert read_run(path).thresholds == Thresholds(sink=0.7)


def test_what_is_wrong_with_a_record_is_no_outage(path, caplog):
    with Store(path) as store:
        with pytest.raises(sqlite3.ProgrammingError, match="binding"):
            store(StepRecord(0, 0.0, {"a": Health(np.ones((2, 30)))}))
        store(record(1))
    assert read_run(path).steps == [1]
    assert messages(caplog) == []


def test_what_stores_and_runs_show_of_themselves(path):
    with Store(path, name="first", model="tiny") as store:
        for step in (0, 1_000):
            store(record(step))
        assert repr(store) == f"<Store {str(path)!r}: run 1, open>"
    assert repr(store) == f"<Store {str(path)!r}: run 1, closed>"
    assert repr(read_run(path)) == (
        f"<Run: run 1 'first' in {str(path)!r} of tiny, 2 steps (0 to 1,000), "
        "2 layers, 0 alerts, ended>"
    )


def test_the_file_is_sound_and_the_view_can_be_queried(path):
    with Store(path) as store:
        store(record(0))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        (worst,) = connection.execute("SELECT max(score_max) FROM heads WHERE step = 0").fetchone()
    assert worst == max(h.score_max.max() for h in record(0).health.values())


# ---------------------------------------------------------------- phases


def inferred(step, **options):
    return replace(record(step, **options), phase="inference")


def test_what_came_before_training_is_renumbered_when_it_begins(path):
    late = ("late",)
    with Store(path) as store:
        for each in (inferred(0), inferred(4), inferred(6, alerts=(alert(6),))):
            store(each)
        run = read_run(path)
        assert (run.phase, run.steps) == ("inference", [0, 4, 6])
        assert run.alerts == [replace(alert(6), phase="inference")]
        store(record(0, layers=late, gradients=late))
        store(record(1, layers=late, gradients=late))
        assert (run.steps, [step for step, _ in run.health(LAYERS[0])]) == ([0, 4, 6], [0, 4, 6])
        store(inferred(2))  # and once more, as by a watch that was entered again
        assert read_run(path, phase="inference").steps == [2]
        store(record(2, layers=late, gradients=late))
    run = read_run(path)
    assert (run.phase, run.steps, run.layers, run.alerts) == ("training", [0, 1, 2], ["late"], [])
    assert run.health("late")[1] == (1, record(1, layers=late).health["late"])
    before = read_run(path, phase="before training")
    assert (before.steps, before.layers) == ([-7, -3, -1, -8], list(LAYERS))
    assert before.times == [1000.0, 1004.0, 1006.0, 1002.0]
    written = zip(before.steps, (0, 4, 6, 2), strict=True)
    assert before.health(LAYERS[1]) == [(n, record(s).health[LAYERS[1]]) for n, s in written]
    assert before.alerts == [replace(alert(-1), phase="before training")]
    assert read_run(path, phase="inference").steps == []
    with pytest.raises(StoreError, match="no phase 'train': did you mean 'training'"):
        read_run(path, phase="train")
    numbers = rows(path, "SELECT DISTINCT step FROM heads ORDER BY step")
    assert numbers == [(step,) for step in (-8, -7, -3, -1, 0, 1, 2)]


def test_only_the_run_that_begins_to_train_is_renumbered(path):
    with Store(path, name="one") as one, Store(path, name="two") as two:
        one(inferred(0))
        two(inferred(0))
        one(record(0))
    assert read_run(path, "one").phase == "training"
    assert (read_run(path, "two").phase, read_run(path, "two").steps) == ("inference", [0])


def test_renumbering_waits_with_the_step_that_could_not_be_written(path, caplog):
    with Store(path) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        store(inferred(0))
        other.execute("BEGIN IMMEDIATE")
        store(record(0))
        other.execute("ROLLBACK")
        assert read_run(path).phase == "inference"
        store(record(1))
    assert read_run(path).steps == [1]
    assert read_run(path, phase="before training").steps == [-1]


OLD = """
DROP VIEW heads;
DROP VIEW scalars;
DROP TABLE scalar_values;
ALTER TABLE steps DROP COLUMN phase;
PRAGMA user_version = 1;
"""


def test_a_store_without_phases_is_read_and_written_on(path):
    with Store(path, name="old") as store:
        store(record(3, alerts=(alert(3),)))
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLD)
    before = path.read_bytes()
    old = read_run(path)
    assert (old.phase, old.steps, old.alerts) == ("training", [3], [alert(3)])
    assert old.health(LAYERS[0]) == [(3, record(3).health[LAYERS[0]])]
    empty = read_run(path, phase="before training")
    assert (empty.steps, empty.layers, empty.alerts, old.scalars) == ([], [], [], {})
    assert path.read_bytes() == before
    with Store(path, name="new") as store:
        store(inferred(0))
        store(record(0))
    assert rows(path, "PRAGMA user_version") == [(VERSION,)]
    assert (read_run(path, "old").phase, read_run(path, "old").steps) == ("training", [3])
    assert read_run(path, "new", phase="before training").steps == [-1]


# ---------------------------------------------------------------- other processes

WRITE = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from store_support import record
from levelhead.store import Store, _store

def dying(layers, by_head=_store._by_head):
    for count, each in enumerate(by_head(layers)):
        if step == {dies_at} and count == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        yield each

_store._by_head = dying
records = [record(step) for step in range(8)]
store = Store({path!r}, name="to be killed")
step = 0
while True:
    r = records[step % 8]
    store(type(r)(step, 0.0, r.health, r.gradients, scalars={{"loss": step}}))
    print(step, flush=True)
    step += 1
"""


@contextmanager
def writing(path, dies_at=None):
    """A process that writes steps as fast as it can and prints each when it is done.

    dies_at: the step in whose middle, after some of its rows, it kills itself
    """
    code = WRITE.format(tests=os.path.dirname(__file__), path=str(path), dies_at=dies_at)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_complete(run):
    """Every step is there from the first on, with all layers, heads and gradients."""
    assert run.steps == list(range(len(run.steps)))
    steps, losses = run.scalars["loss"]
    assert steps.tolist() == losses.tolist() == run.steps
    for layer in LAYERS:
        for read in (run.health(layer), run.gradients(layer)):
            assert [step for step, _ in read] == run.steps
    for step, health in run.health(LAYERS[1])[-8:]:
        assert health == record(step % 8).health[LAYERS[1]]


@pytest.mark.parametrize("steps", [1, 40])
def test_kill_loses_at_most_the_step_being_written(path, steps):
    with writing(path) as process:
        for _ in range(steps):
            done = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        done = max([done, *map(int, process.stdout.read().split())])
    run = read_run(path)
    assert run.ended is None
    assert run.steps[-1] in (done, done + 1)  # killed between writing and printing
    assert_complete(run)
    with Store(path, name="the next") as store:  # and the file goes on being used
        store(record(0))
    assert read_run(path).name == "the next"
    assert read_run(path, "to be killed").steps == run.steps


def test_kill_amid_the_rows_of_a_step_loses_that_step_only(path):
    with writing(path, dies_at=6) as process:
        assert process.wait(timeout=20) == -signal.SIGKILL
        assert process.stdout.read().split() == list("012345")
    assert read_run(path).steps == [0, 1, 2, 3, 4, 5]
    assert_complete(read_run(path))
    assert rows(path, "SELECT max(step_id) FROM head_stats") == [(6,)]  # ids begin at 1
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


def test_reading_while_another_process_writes(path):
    with writing(path) as process:
        process.stdout.readline()
        seen = []
        while len(seen) < 5 or seen[-1] < seen[0] + 20:
            run = read_run(path)
            assert_complete(run)
            seen.append(run.steps[-1])
        assert process.poll() is None
    assert seen == sorted(seen)


def test_importing_it_brings_no_framework():
    code = (
        "import sys, levelhead.store\n"
        "print([name for name in ('torch', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- speed and examples


def test_a_step_of_twelve_layers_and_heads_is_quick(path):
    q, k, v, g = np.random.default_rng(0).standard_normal((4, 12, 16, 8))
    health = lh.reference(q, k, v, return_health=True).health
    gradients = lh.reference_backward(g, q, k, v, return_health=True).health
    names = [f"layers.{index}.attn" for index in range(12)]
    each = StepRecord(0, 0.0, dict.fromkeys(names, health), dict.fromkeys(names, gradients))
    took = []
    with Store(path) as store:
        for _ in range(30):
            begin = time.perf_counter()
            store(each)
            took.append(time.perf_counter() - begin)
    assert min(took) < 0.005  # the least, not the mean: machines are shared


@pytest.mark.parametrize("name", ["_store", "_run"])
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(f"levelhead.store.{name}"))
    assert tried > 5
    assert failed == 0
