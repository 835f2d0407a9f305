"""The page of a run: its words, its lines, what is merged and what is kept."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from page_support import unpacked

import levelhead as lh
from levelhead._health import Finding
from levelhead._records import Alert, StepRecord
from levelhead.report import _points, _scalars, run_page, write_run_page
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
    assert data["statistic"] == "largest_score" and data["fields"]["largest_score"]["log"]
    assert data["steps"] == [0, 10, 20]
    assert data["scalars"] == []
    layer = data["layers"][1]
    assert (layer["short"], layer["name"]) == ("h.1", "h.1.attn")
    verdicts = unpacked(data)[1]["verdicts"][2]
    assert verdicts[-1] == "X" and "X" not in verdicts[:-1]
    (group,) = data["alerts"]
    assert (group["title"], group["hint"]) == ("exploding: 1 alert, at step 20", "tame them")
    (alert,) = group["alerts"]
    assert (alert["layer"], alert["head"], alert["step"]) == (1, 2, 20)
    store.close()
    assert "· ended 20" in data_of(store)["about"]


def test_the_headline_moves_with_the_step(store):
    for step, grow in ((0, 1), (10, 900), (20, 1)):
        store(record(step, grow))
    data = data_of(store)
    assert data["headlines"] == [
        "At step 0: no problems found in 6 heads.",
        "At step 10: 1 of 6 heads needs attention: 1 exploding.",
        "At step 20: no problems found in 6 heads.",
    ]
    assert data["headline"] == data["headlines"][-1]


def test_findings_have_their_span(store):
    sick = Finding(
        "model", "collapsing", "warning", "heads turned sharp", "go back", layer="h.0.attn"
    )
    for step, course in enumerate([(), (sick,), (replace(sick, level="error"),), (), (sick,)]):
        store(replace(record(step), course=course))
    data = data_of(store)
    spans = [(each["name"], each["from"], each["to"], each["level"]) for each in data["spans"]]
    assert spans == [("collapsing", 1, 2, "error"), ("collapsing", 4, 4, "warning")]
    assert [len(told) for told in data["said"]] == [0, 1, 1, 0, 1]
    assert data["headlines"][1] == "At step 1: collapsing: heads turned sharp."
    assert str(sick) in data["told"][0]["text"]


def test_alerts_of_one_kind_have_their_advice_once(store):
    for step in (5, 20, 30):
        again = replace(ALERT, step=step, hint="tame them" if step == 5 else "")
        other = replace(
            ALERT, step=step, verdict="saturated", level="warning", hint="soften", head=1
        )
        store(record(step, alerts=[again, *([other] if step == 20 else [])]))
    first, second = data_of(store)["alerts"]
    assert first["title"] == "exploding: 3 alerts, steps 5 to 30"
    assert first["hint"] == "tame them" and second["hint"] == "soften"
    assert [alert["step"] for alert in first["alerts"]] == [30, 20, 5]  # the newest first
    assert "hint" not in first["alerts"][0]


def test_lines_are_the_stores_series(store):
    for step in range(4):
        store(record(step, grow=1 + step))
    run = read_run(store.path)
    series = unpacked(run_data(run))[1]["series"]
    assert {*lh.Health.FIELDS, *lh.GradHealth.FIELDS, "largest_score"} <= set(series)
    for name in ("score_max", "entropy", "survival", "rows", "score_min"):
        _, want = run.series("h.1.attn", name)
        np.testing.assert_allclose(series[name].T, want, rtol=3e-4)


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
    loss = "loss (not finite at 1 step, first at step 5)"
    assert held["scalars"] == [
        {"name": "loss", "label": loss, "steps": [20], "values": [2.0]},
        {"name": "acc", "label": "acc", "steps": [20], "values": [0.5]},
        {"name": "lr", "label": "lr", "steps": [5], "values": [0.1]},
    ]
    empty = Run.from_records([])
    assert run_data(empty)["headline"] == "No step is recorded yet."
    assert empty.latest()[1] == []


def test_a_run_is_judged_with_its_own_thresholds(store):
    store(replace(record(3), thresholds={"exploding": 2.0}))
    data = data_of(store)
    assert data["headline"].startswith("At step 3: 6 of 6 heads need attention: 6 exploding.")
    assert {"X"} == set("".join(line for part in unpacked(data) for line in part["verdicts"]))
    assert {"E"} == set("".join(line for part in unpacked(data) for line in part["levels"]))
    assert [guide["at"] for guide in data["guides"]["largest_score"]] == [10_000.0, 2.0, 100.0]


def test_layers_that_were_last_seen_at_different_steps(store):
    store(record(0))
    store(record(7, layers=("h.0.attn",)))
    data = data_of(store)
    assert data["headline"] == "At steps 0 to 7: no problems found in 6 heads."
    assert unpacked(data)[1]["verdicts"][0] == "· "


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
    assert [alert["layer"] for group in data["alerts"] for alert in group["alerts"]] == [1]


def test_too_many_steps_are_merged_not_dropped(store, monkeypatch):
    monkeypatch.setattr(_points, "MOST_POINTS", 20)
    for step in range(50):
        alerts = [replace(ALERT, step=step)] if step == 31 else []
        store(record(step, grow=500 if step == 25 else 1, alerts=alerts))
    run = read_run(store.path)
    data = run_data(run)
    assert {0, 31, 49} <= set(data["steps"]) and len(data["steps"]) <= 20
    assert data["thinned"].startswith(f"{len(data['steps'])} of 50 steps are shown: the first")
    assert "keeps their largest score" in data["thinned"]
    line = unpacked(data)[1]["series"]["score_max"][2]
    _, scores = run.series("h.1.attn", "score_max")
    assert max(line) == pytest.approx(scores[25, 2], rel=1e-3)
    after = next(place for place, step in enumerate(data["steps"]) if step >= 25)
    assert line.argmax() == after
    assert unpacked(data)[1]["series"]["rows"][0].sum() == 50 * 12


def test_of_a_run_too_large_to_read_only_some_steps_are(store, monkeypatch):
    monkeypatch.setattr(_points, "MOST_READ", 6 * 12)
    monkeypatch.setattr(_points, "FEWEST_POINTS", 2)
    for step in range(50):
        alerts = [replace(ALERT, step=step)] if step == 33 else []
        store(record(step, grow=700 if step == 33 else 1, alerts=alerts))
    run, read = read_run(store.path), []
    together = Run.together
    monkeypatch.setattr(Run, "together", lambda run, at: read.extend(at) or together(run, at))
    data = run_data(run)
    assert len(data["steps"]) <= 12 and len(set(read)) <= 12
    assert {0, 33, 49} <= set(data["steps"])
    assert f"{len(data['steps'])} of 50 steps are shown" in data["thinned"]
    assert "is not seen" in data["thinned"]
    line = unpacked(data)[1]["verdicts"][2]
    assert line[data["steps"].index(33)] == "X"


def test_statistics_that_have_no_room_are_left_out_and_told(store, monkeypatch):
    monkeypatch.setattr(_points, "ROOM", 1)
    monkeypatch.setattr(_points.Points.packed, "__defaults__", (0, 1))
    for step in range(3):
        store(record(step))
    data = data_of(store)
    assert list(data["packed"]) == ["codes", "largest_score", "saturated"]
    assert "statistics had no room on this page" in data["thinned"]


def test_the_page_of_a_large_model_is_small():
    """Of numbers that no compression helps with: some 400 heads, every one at 300 steps."""
    rng, layers = np.random.default_rng(0), [f"model.layers.{at}.attn" for at in range(24)]
    like = record(0).health["h.0.attn"].sums[0]

    def noisy():
        return lh.Health(like * rng.uniform(0.5, 2, (16, len(like))))

    records = [StepRecord(step, 0.0, {name: noisy() for name in layers}) for step in range(320)]
    page = run_page(Run.from_records(records))
    assert 1_000_000 < len(page) < 3_000_000
    assert "300 of 320 steps are shown" in page and "had no room on this page" in page


def test_of_many_scalars_the_extremes_stay(store, monkeypatch):
    monkeypatch.setattr(_scalars, "MOST_BINS", 5)
    for step in range(50):
        values = {"loss": np.inf if step == 4 else 90.0 if step == 27 else float(step)}
        values |= {"seldom": 7.0} if step == 25 else {}
        store(replace(record(step), scalars=values))
    loss, seldom = data_of(store)["scalars"]
    assert loss["label"] == "loss (not finite at 1 step, first at step 4)"
    assert loss["steps"][0] == 0 and loss["steps"][-1] == 49 and len(loss["steps"]) <= 12
    assert loss["values"][loss["steps"].index(27)] == 90.0
    assert (seldom["steps"], seldom["values"]) == ([25], [7.0])


def test_a_layer_that_sits_out_leaves_a_gap(store):
    store(record(0))
    store(record(1, layers=("h.0.attn",)))
    store(record(2))
    layer = unpacked(data_of(store))[1]
    assert layer["verdicts"][0][1] == " "
    assert np.isnan(layer["series"]["entropy"][0]).tolist() == [False, True, False]


def test_short_rows_are_marked(store):
    store(record(0, length=6))
    data = data_of(store)
    assert unpacked(data)[0]["verdicts"] == ["–"] * HEADS
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
