"""The page of a run: its words, its lines, what is merged and what is kept."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

import levelhead as lh
from levelhead._records import Alert, StepRecord
from levelhead.report import _series, run_page, write_run_page
from levelhead.report._run_page import run_data
from levelhead.store import Run, Store, read_run

HEADS = 3


def record(step, grow=1.0, layers=("h.0.attn", "h.1.attn"), alerts=(), length=12):
    """A step in which the last head of the last layer has queries `grow` times as large."""
    health, gradients = {}, {}
    for place, name in enumerate(layers):
        rng = np.random.default_rng(place)
        q, k, v, g = rng.standard_normal((4, HEADS, length, 16), dtype=np.float32)
        if name == "h.1.attn":
            q[-1] *= grow
        result = lh.attention(q, k, v, return_health=True, return_lse=True)
        health[name] = result.health
        gradients[name] = lh.attention_backward(
            g, q, k, v, result.output, result.lse, return_health=True
        ).health
    return StepRecord(step, time.time(), health, gradients, tuple(alerts))


ALERT = Alert(
    20, "h.1.attn", 2, "exploding", "error", "healthy", 1234.5, "the scores are large", "tame them"
)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "run.db", name="trial", model="Tiny")
    yield store
    store.close()


def data_of(store):
    return run_data(read_run(store.path))


def test_a_run_that_goes_on(store):
    for step in (0, 10):
        store(record(step))
    store(record(20, grow=900, alerts=[ALERT]))
    data = data_of(store)
    assert data["headline"] == "At step 20: 1 of 6 heads needs attention: 1 exploding."
    assert "trial · Tiny · 3 steps recorded, 0 to 20 · started 20" in data["about"]
    assert "still running, or cut off · 1 alert" in data["about"]
    assert data["worst"] == {"layer": 1, "head": 2}
    assert (data["statistic"], data["axis"]) == ("score_max", "log")
    assert data["steps"] == [0, 10, 20]
    assert data["scalars"] == []
    layer = data["layers"][1]
    assert (layer["short"], layer["name"]) == ("h.1", "h.1.attn")
    assert layer["verdicts"][2][-1] == "X"
    assert "X" not in layer["verdicts"][2][:-1]
    assert layer["last"][2]["verdict"] == "exploding"
    (alert,) = data["alerts"]
    assert (alert["layer"], alert["head"], alert["step"]) == (1, 2, 20)
    store.close()
    assert "· ended 20" in data_of(store)["about"]


def test_lines_are_the_stores_series(store):
    for step in range(4):
        store(record(step, grow=1 + step))
    run = read_run(store.path)
    series = run_data(run)["layers"][1]["series"]
    assert set(series) == {*lh.Health.FIELDS, *lh.GradHealth.FIELDS}
    for name in ("score_max", "entropy", "survival"):
        _, want = run.series("h.1.attn", name)
        np.testing.assert_allclose(np.transpose(series[name]), want, rtol=1e-3)


def test_every_step_has_its_gradients(store):
    for step in range(3):
        store(record(step, grow=1 + step))
    run = read_run(store.path)
    layer = run_data(run)["layers"][1]
    _, survival = run.series("h.1.attn", "survival")
    np.testing.assert_allclose(np.transpose(layer["series"]["survival"]), survival, rtol=1e-3)
    assert [head["survival"] for head in layer["last"]] == survival[-1].tolist()
    together = run.total_gradients()["h.1.attn"].survival
    assert [head["survival"] for head in layer["heads"]] == together.tolist()


def test_a_run_in_memory_has_the_page_of_a_run_in_a_file(store):
    records = [record(0), record(5, layers=("h.0.attn",)), record(20, grow=900, alerts=[ALERT])]
    records[1] = replace(records[1], scalars={"lr": 0.1, "loss": np.nan})
    records[2] = replace(records[2], scalars={"acc": 0.5, "loss": 2.0})
    for each in records:
        store(each)
    stored, held = data_of(store), run_data(Run.from_records(records, model="Tiny"))
    for data in (stored, held):
        del data["about"], data["made"]
    assert held == stored
    assert held["alerts"][0]["verdict"] == "exploding"
    assert held["scalars"] == [
        {
            "name": "loss",
            "label": "loss (not finite at 1 step, first at step 5)",
            "values": [None, None, 2.0],
        },
        {"name": "acc", "label": "acc", "values": [None, None, 0.5]},
        {"name": "lr", "label": "lr", "values": [None, 0.1, None]},
    ]
    empty = Run.from_records([])
    assert run_data(empty)["headline"] == "No step is recorded yet."
    assert empty.latest()[1] == []


def test_a_run_is_judged_with_its_own_thresholds(store):
    store(replace(record(3), thresholds={"exploding": 2.0}))
    data = data_of(store)
    assert data["headline"].startswith("At step 3: 6 of 6 heads need attention: 6 exploding.")
    assert {"X"} == set("".join(line for part in data["layers"] for line in part["verdicts"]))
    assert {"E"} == set("".join(line for part in data["layers"] for line in part["levels"]))
    assert data["guides"]["score_max"] == [10_000.0, 2.0, 100.0]


def test_layers_that_were_last_seen_at_different_steps(store):
    store(record(0))
    store(record(7, layers=("h.0.attn",)))
    data = data_of(store)
    assert data["headline"] == "At steps 0 to 7: no problems found in 6 heads."
    assert data["layers"][1]["last"][0]["rows"] == 12


def test_a_layer_without_statistics_is_left_out(store):
    """One that only an alert or a gradient has named."""
    stray = replace(ALERT, layer="nowhere", step=0)
    store(
        replace(
            record(0, alerts=[stray, ALERT]), gradients={"only": record(0).gradients["h.0.attn"]}
        )
    )
    data = data_of(store)
    assert [layer["name"] for layer in data["layers"]] == ["h.0.attn", "h.1.attn"]
    assert [alert["layer"] for alert in data["alerts"]] == [1]


def test_too_many_steps_are_merged_not_dropped(store, monkeypatch):
    monkeypatch.setattr(_series, "MOST_POINTS", 20)
    for step in range(50):
        store(record(step, grow=500 if step == 25 else 1))
    run = read_run(store.path)
    data = run_data(run)
    assert data["steps"] == [*range(2, 48, 3), 49]
    line = data["layers"][1]["series"]["score_max"][2]
    _, scores = run.series("h.1.attn", "score_max")
    assert max(line) == pytest.approx(scores[25, 2], rel=1e-3)
    assert line.index(max(line)) == 8  # steps 24 to 26
    assert data["layers"][1]["series"]["rows"][0][0] == 3 * 12


def test_of_merged_steps_the_mean_of_a_scalar_is_shown(store, monkeypatch):
    monkeypatch.setattr(_series, "MOST_POINTS", 20)
    for step in range(50):
        values = {"loss": np.inf if step == 4 else float(step)}
        values |= {"seldom": 7.0} if step == 25 else {}
        store(replace(record(step), scalars=values))
    data = data_of(store)
    loss, seldom = data["scalars"]
    assert loss["label"] == "loss (not finite at 1 step, first at step 4)"
    assert loss["values"] == [1, 4, *range(7, 48, 3), 48.5]  # 4 is the mean of 3 and 5
    assert [place for place, value in enumerate(seldom["values"]) if value] == [8]
    assert len(loss["values"]) == len(data["steps"])


def test_a_layer_that_sits_out_leaves_a_gap(store):
    store(record(0))
    store(record(1, layers=("h.0.attn",)))
    store(record(2))
    layer = data_of(store)["layers"][1]
    assert layer["verdicts"][0][1] == " "
    assert layer["series"]["entropy"][0][1] is None
    assert layer["series"]["entropy"][0][2] is not None


def test_short_rows_are_marked(store):
    store(record(0, length=6))
    data = data_of(store)
    assert data["layers"][0]["verdicts"] == ["–"] * HEADS
    assert "could be judged" in data["headline"]


def test_a_run_without_steps_has_a_page(store):
    data = data_of(store)
    assert data["headline"] == "No step is recorded yet."
    assert data["worst"] is None
    assert "No step is recorded yet." in run_page(read_run(store.path))


def test_the_page_is_json_safe_even_for_nan(store, tmp_path):
    bad = record(0)
    sums = bad.health["h.0.attn"].sums.copy()
    q = np.full((1, 9, 4), np.nan)
    nan = lh.reference(q, q, q, return_health=True).health
    store(StepRecord(0, time.time(), {"h.0.attn": lh.Health(sums), "bad": nan}, {}, ()))
    json.dumps(data_of(store), allow_nan=False)
    write_run_page(tmp_path / "page.html", read_run(store.path))
    assert "1 nonfinite" in (tmp_path / "page.html").read_text(encoding="utf-8")
