"""The pages in a real browser: what is drawn, what hovering and clicking do, in every dress."""

import time
from dataclasses import replace

import numpy as np
import pytest
from browser_support import DRESSES, until

import levelhead as lh
from levelhead._records import Alert, StepRecord
from levelhead.report import page, run_page
from levelhead.store import Store, read_run

NASTY = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    store = Store(folder / "run.db", name=NASTY)
    for step in range(0, 60, 10):
        q, k, v = np.random.default_rng(0).standard_normal((3, 4, 12, 16))
        q[2] *= 1 + 10 * step
        health, gradients = {}, {}
        for layer in (1, 2):
            result = lh.attention(q * layer, k, v, return_health=True, return_lse=True)
            health[f"h.{layer}.attn"] = result.health
            gradients[f"h.{layer}.attn"] = lh.attention_backward(
                v, q * layer, k, v, result.output, result.lse, return_health=True
            ).health
        alert = Alert(
            50, "h.2.attn", 2, "exploding", "error", "sharp", 1e3, NASTY, "tame <b>it</b>"
        )
        store(StepRecord(step, time.time(), health, gradients, (alert,) if step == 50 else ()))
    store.close()
    path = folder / "run.html"
    path.write_text(run_page(read_run(folder / "run.db")), encoding="utf-8")
    return path


def cell(tab, layer, head):
    return tab.locator(f'#map [data-layer="{layer}"][data-head="{head}"]')


def fits(tab):
    return tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def text_of(tab, selector):
    return tab.locator(selector).inner_text()


# ---------------------------------------------------------------- a run


@pytest.mark.parametrize("dress", ["laptop dark", "phone light"])
def test_a_runs_lines_are_drawn(look, run_file, dress):
    tab = look(run_file, *DRESSES[dress])
    tab.wait_for_selector("#chart .main-svg")
    assert NASTY in text_of(tab, "#about")
    names = tab.evaluate("document.getElementById('chart').data.map((each) => each.name)")
    assert sorted(filter(None, names)) == ["alerts", "head 0", "head 1", "head 2", "head 3"]
    assert tab.locator("#chart .points path").count() == 1  # one alert in this layer
    assert tab.locator("#map [role=gridcell]").count() == 8
    assert NASTY in text_of(tab, "#alerts")
    assert fits(tab)


@pytest.mark.parametrize("dress", DRESSES)
def test_what_was_logged_stands_above_on_the_same_steps(look, run_file, tmp_path, dress):
    run = read_run(run_file.with_name("run.db"))
    steps = np.array(run.steps)
    scalars = {"loss": (steps, 5.0 - steps / 20), NASTY: (steps[1:3], np.array([1e-4, 2e-4]))}
    path = tmp_path / "run.html"
    path.write_text(run_page(replace(run, scalars=scalars)), encoding="utf-8")
    tab = look(path, *DRESSES[dress])
    tab.wait_for_selector("#chart .main-svg")
    drawn = tab.evaluate(
        "document.getElementById('chart').data.map((each) => [each.yaxis, each.x, each.y])"
    )
    assert drawn[-2:] == [
        ["y2", run.steps, [5, 4.5, 4, 3.5, 3, 2.5]],
        ["y3", run.steps, [None, 1e-4, 2e-4, None, None, None]],
    ]
    labels = tab.locator("#chart .annotation-text").all_text_contents()
    assert labels == ["largest score", "loss", NASTY]
    score, loss, other = (
        tab.locator(f"#chart .{axes} > .nsewdrag").bounding_box() for axes in ("xy", "xy2", "xy3")
    )
    assert {(box["x"], box["width"]) for box in (loss, other)} == {(score["x"], score["width"])}
    assert loss["y"] + loss["height"] <= other["y"] < other["y"] + other["height"] <= score["y"]
    assert fits(tab)
    tab.locator("#statistic").select_option("entropy")
    assert tab.locator("#chart .annotation-text").first.text_content() == "entropy"
    assert tab.locator("#chart .annotation-text").count() == 3


def test_a_run_is_followed_by_statistic_layer_and_step(look, run_file):
    tab = look(run_file)
    assert text_of(tab, "#chart-title") == "h.2: largest score"
    tab.locator("#statistic").select_option("entropy")
    assert text_of(tab, "#chart-title") == "h.2: entropy"
    tab.locator("#layer").select_option("0")
    assert text_of(tab, "#chart-title") == "h.1: entropy"
    worst = cell(tab, 1, 2)
    assert worst.inner_text() == "X"
    tab.locator("#step").fill("0")
    assert text_of(tab, "#step-words") == "Step 0"
    assert worst.inner_text() != "X"
    worst.hover()
    assert "at step 0" in text_of(tab, "#tip")
    tab.get_by_label("whole run").check(force=True)
    assert worst.inner_text() == "X"
    cell(tab, 1, 3).click()
    assert text_of(tab, "#chart-title") == "h.2: entropy"
    assert tab.locator("#number").input_value() == "3"


def test_a_runs_gradients_and_levels_are_shown_at_every_step(look, run_file):
    tab = look(run_file)
    run = read_run(run_file.with_name("run.db"))
    _, survival = run.series("h.2.attn", "survival")
    tab.locator("summary").click()

    def shown(label):
        lines = text_of(tab, "#numbers").splitlines()
        return float(lines[lines.index(label) + 1].replace("−", "-"))

    assert shown("gradient survival") == pytest.approx(survival[-1, 2], rel=1e-2)
    tab.locator("#step").fill("1")
    assert shown("gradient survival") == pytest.approx(survival[1, 2], rel=1e-2)
    cell(tab, 1, 2).hover()
    ((_, then),) = [(s, h) for s, h in run.health("h.2.attn") if s == 10]
    verdict = then.verdicts()[0]
    assert (verdict.head, verdict.level) == (2, "warning")
    assert f"h.2, head 2: {verdict.verdict} (warning)" in text_of(tab, "#tip")
    tab.get_by_label("whole run").check(force=True)
    total = run.total_gradients()["h.2.attn"].survival[2]
    assert shown("gradient survival") == pytest.approx(total, rel=1e-2)


def test_a_run_without_steps_has_a_page(look, tmp_path):
    Store(tmp_path / "run.db").close()
    path = tmp_path / "run.html"
    path.write_text(run_page(read_run(tmp_path / "run.db")), encoding="utf-8")
    tab = look(path)
    assert text_of(tab, "h1") == "No step is recorded yet."
    assert not tab.locator("#map").is_visible()


# ---------------------------------------------------------------- the frame


def test_nothing_can_be_fetched(browser, tmp_path):
    """The policy holds: the listener of the other tests would not see what it stops."""
    path = tmp_path / "page.html"
    script = "fetch('https://example.org').catch(() => { document.title = 'refused'; });"
    path.write_text(page("t", "", {}, script), encoding="utf-8")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    until(tab, lambda: tab.title() == "refused")
    tab.close()
