"""Two runs or two models side by side: what is said, what is shown, and how they are named."""

import json
import time

import numpy as np
import pytest
from checkup_support import make_call, make_result
from page_support import floats

import levelhead as lh
from levelhead._records import Alert, StepRecord
from levelhead.report import (
    CompareError,
    compare_checkups,
    compare_page,
    compare_runs,
    comparison_json,
    comparison_text,
)
from levelhead.report._compare_page import compare_data
from levelhead.store import Store, StoreError

ALERT = Alert(10, "h.1.attn", 2, "exploding", "error", "sharp", 1e3, "large", "tame it")


def write(path, name, grow=1.0, loss=2.0, layers=("h.0.attn", "h.1.attn"), steps=(0, 10), heads=3):
    """A run whose last head of the last layer has queries `grow` times as large at the end."""
    with Store(path, name=name, model="Tiny") as store:
        for step in steps:
            q, k, v = np.random.default_rng(0).standard_normal((3, heads, 12, 16))
            health = {}
            for layer in layers:
                large = q.copy()
                large[-1] *= grow if step and layer == layers[-1] else 1
                health[layer] = lh.attention(large, k, v, return_health=True).health
            alerts = (ALERT,) if grow > 100 and step == 10 else ()
            store(StepRecord(step, time.time(), health, alerts=alerts, scalars={"loss": loss}))


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "run.db", "hot", grow=900, loss=3.0)
    write(tmp_path / "run.db", "cured", grow=1, loss=2.0)
    return tmp_path / "run.db"


def test_a_cure_is_told(path):
    cured = compare_runs(path, "hot", "cured")
    assert cured.headline() == (
        "cured is better than hot: none of 6 heads need attention in cured, 1 of 6 in hot."
    )
    assert cured.worse() == []
    said = cured.better()
    assert said[0] == "1 head: exploding (error) → healthy (h.1, head 2)."
    assert any(each.startswith("Largest |score| fell from ") for each in said)
    assert "The last loss is lower: 2 instead of 3." in said
    assert "0 alerts instead of 1." in said
    text = comparison_text(cured)
    assert "Better\n  1 head: " in text and "Worse" not in text


def test_the_other_way_round_it_is_worse(path):
    worse = compare_runs(path, "2", "1")
    assert worse.headline().startswith("hot is worse than cured: 1 of 6 heads needs attention")
    assert worse.better() == [] and len(worse.worse()) >= 4


def test_much_the_same(path):
    same = compare_runs(path, "1", "1")
    assert same.headline().startswith("Much the same: 1 of 6 heads needs attention in hot (run 1")
    assert same.better() == same.worse() == []


def test_some_better_some_worse(tmp_path):
    write(tmp_path / "a.db", "a", grow=900)
    write(tmp_path / "b.db", "b", grow=900, layers=("h.1.attn", "h.0.attn"))
    mixed = compare_runs(tmp_path / "a.db", "a", str(tmp_path / "b.db"))
    assert mixed.headline().startswith("1 head better, 1 worse: 1 of 6 heads needs attention in b")


@pytest.mark.parametrize("which", ["other.db", "other.db:1", "other.db:far"])
def test_a_run_of_another_store(path, which):
    write(path.with_name("other.db"), "far", grow=1)
    found = compare_runs(path, "hot", str(path.with_name(which)))
    assert found.after.name == "far"


def test_an_unknown_run_lists_what_there_is(path):
    for which, said in (
        ("warm", "holds no run 'warm'; its runs are: 1 (hot), 2 (cured)"),
        ("7", "holds no run 7; its runs are: 1 (hot), 2 (cured)"),
        (f"{path}:9", "holds no run 9; its runs are"),
        ("nowhere.db", "holds no run 'nowhere.db'; its runs are"),
    ):
        with pytest.raises(StoreError) as error:
            compare_runs(path, which, "hot")
        assert said in str(error.value)


def test_layers_that_only_one_has_are_told(tmp_path):
    write(tmp_path / "run.db", "long", layers=("h.0.attn", "h.1.attn", "h.2.attn"), heads=4)
    write(tmp_path / "run.db", "short")
    found = compare_runs(tmp_path / "run.db", "long", "short")
    assert found.notes == (
        "Only in long: h.2.attn.",
        "Some layers have more heads in one of them; the others are compared.",
    )
    assert len(list(found.pairs())) == 6


def test_layers_of_other_names_are_compared_in_their_order(tmp_path):
    write(tmp_path / "run.db", "one")
    write(tmp_path / "run.db", "two", layers=("base.h.0.attn", "base.h.1.attn"))
    found = compare_runs(tmp_path / "run.db", "one", "two")
    assert found.notes == ("Their layers have different names and are compared in their order.",)
    write(tmp_path / "run.db", "three", layers=("other",))
    with pytest.raises(CompareError, match=r"no layer in common: their layers are h\.0\.attn"):
        compare_runs(tmp_path / "run.db", "one", "three")


def test_a_run_without_steps_cannot_be_compared(path):
    Store(path, name="empty").close()
    with pytest.raises(CompareError, match="empty has no recorded step to compare"):
        compare_runs(path, "hot", "empty")


def test_the_page_has_both_courses(path):
    data = compare_data(compare_runs(path, "hot", "cured"))
    json.dumps(data, allow_nan=False)
    hot, cured = data["sides"]
    assert hot["course"]["steps"] == cured["course"]["steps"] == [0, 10]
    score = floats(hot["course"]["packed"]["largest_score"], 6, 2)
    assert score[5, 1] > 500 * score[5, 0]
    assert hot["course"]["scalars"][0]["values"] == [3, 3]
    assert data["chosen"] == {"layer": 1, "head": 2}


# ---------------------------------------------------------------- models


def test_two_models(tmp_path):
    tuned = make_result(make_call("h.0.attn", grow=(1, 900)), name="tuned")
    base = make_result(make_call("h.0.attn"), name="base")
    found = compare_checkups(base, tuned)
    assert found.headline() == (
        "tuned is worse than base: 1 of 3 heads needs attention in tuned, none of 3 in base."
    )
    assert found.worse()[0] == "1 head: healthy → exploding (error) (h.0.attn, head 1)."
    told = comparison_json(found)
    assert (told["model"], told["worse"]) == ("base", found.worse())
    assert told["layers"][0]["heads"][1]["verdict"] == "healthy"
    json.dumps(told, allow_nan=False)
    other = {**base, "inputs": [{"text": "something else", "tokens": 3}]}
    assert "different inputs" in compare_checkups(other, tuned).notes[0]


# ---------------------------------------------------------------- in a browser


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(look, path, width):
    page = path.with_name("page.html")
    page.write_text(compare_page(compare_runs(path, "hot", "cured")), encoding="utf-8")
    assert page.stat().st_size < 200_000
    tab = look(page, width)
    tab.wait_for_selector("[data-testid=cell]")
    assert tab.get_by_test_id("headline").inner_text().startswith("cured is better than hot")
    assert tab.get_by_test_id("cell").count() == 6
    cell = tab.locator('[data-testid=cell][data-layer="1"][data-head="2"]')
    assert "exploding (error) to healthy; largest |score|" in cell.get_attribute("aria-label")
    detail = tab.get_by_test_id("detail")
    assert "exploding (error) → healthy" in detail.inner_text()
    assert tab.locator("#chart .line").count() == 2
    assert tab.locator("#scalars .line").count() == 2
    tab.locator('[data-testid=cell][data-layer="0"][data-head="1"]').click()
    assert "h.0, head 1: healthy" in detail.inner_text()
    tab.locator("#statistic").select_option("entropy_ratio")
    assert "h.0, head 1: entropy ratio" in tab.locator("#curves-title").inner_text()
    tab.go_back()
    tab.go_back()
    assert "exploding (error) → healthy" in detail.inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_two_models_in_a_browser(look, tmp_path):
    tuned = make_result(make_call("h.0.attn", grow=(1, 900)), name="<b>tuned</b>")
    base = make_result(make_call("h.0.attn"), name="base")
    page = tmp_path / "page.html"
    page.write_text(compare_page(compare_checkups(base, tuned)), encoding="utf-8")
    tab = look(page)
    tab.wait_for_selector("[data-testid=cell]")
    assert tab.get_by_test_id("headline").inner_text().startswith("<b>tuned</b> is worse")
    assert not tab.locator("#curves").is_visible()
