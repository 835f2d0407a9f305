"""The page of a run in a real browser, driven as a reader would: drag, tap, type, go back."""

import time

import numpy as np
import pytest
from browser_support import DRESSES

import levelhead as lh
from levelhead._health import Finding
from levelhead._records import Alert, StepRecord
from levelhead.report import run_page
from levelhead.store import Store, read_run

NASTY = "<script>alert(1)</script>"
SIZES = {
    f"{width} {scheme}": (width, 900, scheme)
    for width in (390, 768, 1280, 1920)
    for scheme in ("light", "dark")
}
SICK = Finding("model", "collapsing", "warning", "heads turned sharp", "go back", layer="h.1.attn")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    with Store(folder / "run.db", name=NASTY) as store:
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
                *(step, "h.2.attn", 2, "exploding", "error", "sharp", 1e3, NASTY, "tame <b>it</b>")
            )
            store(
                StepRecord(
                    *(step, time.time(), health, gradients, (alert,) if step >= 40 else ()),
                    course=(SICK,) if step == 50 else (),
                    scalars={"loss": 5 - step / 20, NASTY: 1e-4},
                )
            )
    path = folder / "run.html"
    path.write_text(run_page(read_run(folder / "run.db")), encoding="utf-8")
    return path


@pytest.fixture
def page(look, run_file):
    tab = look(run_file)
    tab.wait_for_selector("[data-testid=cell]")
    return tab


def cell(tab, layer, head):
    return tab.locator(f'[data-testid=cell][data-layer="{layer}"][data-head="{head}"]')


def words(tab, name):
    return tab.get_by_test_id(name).inner_text()


@pytest.mark.parametrize("size", SIZES)
def test_it_suits_every_screen(look, run_file, size):
    tab = look(run_file, *SIZES[size])
    tab.wait_for_selector("[data-testid=cell]")
    assert words(tab, "headline") == "At step 50: collapsing: heads turned sharp."
    assert words(tab, "step") == "50"
    assert tab.get_by_test_id("cell").count() == 8
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    drawn = tab.evaluate(
        """() => { const canvas = document.getElementById('strip-canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size; }"""
    )
    assert drawn > 8
    assert tab.locator("#chart .line").count() == 4
    assert tab.locator(".multiple").count() == 2


def test_nothing_of_a_runs_words_is_markup(page):
    assert NASTY in page.locator("#about").inner_text()
    assert NASTY in page.locator("#alerts").inner_text()
    assert page.locator("#scalars .names").nth(1).inner_text().count(NASTY) == 1


def test_the_slider_moves_everything(page):
    assert cell(page, 1, 2).inner_text() == "X"
    before = page.locator("#chart .now").get_attribute("d")
    largest = page.locator("#numbers dd").first.inner_text()
    page.locator("#slider").fill("0")
    assert words(page, "headline").startswith("At step 0: ")
    assert "At step 0" in words(page, "detail")
    assert cell(page, 1, 2).inner_text() != "X"
    assert page.locator("#findings li").count() == 0
    assert page.locator("#chart .now").get_attribute("d") != before
    assert page.locator("#numbers dd").first.inner_text() != largest
    assert page.locator("#at").input_value() == "0"
    assert words(page, "step") == "50"  # still the last recorded one
    page.get_by_role("button", name="Latest").click()
    assert words(page, "headline").startswith("At step 50: ")


def test_nothing_jumps_while_the_steps_go_by(page):
    tops = set()
    for place in range(6):
        page.locator("#slider").fill(str(place))
        tops.add(page.locator("#strip").bounding_box()["y"])
    assert len(tops) == 1


def test_dragging_across_the_strip_goes_through_the_steps(page):
    box = page.locator("#strip").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.9, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=4)
    assert words(page, "headline").startswith(("At step 20: ", "At step 30: "))
    page.mouse.move(box["x"] + 2, middle, steps=4)
    page.mouse.up()
    assert words(page, "headline").startswith("At step 0: ")


def test_a_tap_on_the_strip_chooses_a_head_and_a_step(page):
    box = page.locator("#strip").bounding_box()
    row = box["height"] / 8
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 0.5 * row)
    assert "h.1, head 0" in words(page, "detail")
    assert cell(page, 0, 0).get_attribute("aria-selected") == "true"


def test_a_step_is_typed(page):
    page.locator("#at").fill("22")
    page.keyboard.press("Enter")
    assert words(page, "headline").startswith("At step 20: ")  # the nearest one
    page.locator("#at").fill("9999")
    page.keyboard.press("Enter")
    assert words(page, "headline").startswith("At step 50: ")


def test_a_reader_can_go_back(page):
    first = words(page, "detail")
    cell(page, 0, 1).click()
    assert "h.1, head 1" in words(page, "detail")
    page.locator("#statistic").select_option("entropy_ratio")
    assert page.locator("#chart-title").inner_text() == "h.1: entropy ratio"
    page.go_back()
    assert page.locator("#chart-title").inner_text() == "h.1: largest |score|"
    page.go_back()
    assert words(page, "detail") == first
    page.go_forward()
    assert "h.1, head 1" in words(page, "detail")


def test_an_address_leads_to_what_was_seen(look, run_file):
    tab = look(run_file, part="#head=0.3&by=entropy&step=20")
    tab.wait_for_selector("[data-testid=cell]")
    assert tab.locator("#chart-title").inner_text() == "h.1: entropy"
    assert words(tab, "headline").startswith("At step 20: ")
    assert "h.1, head 3" in words(tab, "detail")


def test_the_colour_of_the_strip_can_be_the_verdict(page):
    before = page.evaluate("document.getElementById('strip-canvas').toDataURL()")
    page.locator("#statistic").select_option("verdict")
    assert page.evaluate("document.getElementById('strip-canvas').toDataURL()") != before
    assert "its verdict" in page.locator("#strip-words").inner_text()


def test_thresholds_are_labelled(page):
    labels = page.locator("#chart .guide-label").all_text_contents()
    assert "exploding (error) from 1,000" in labels and "large from 100" in labels


def test_loss_and_findings_stand_on_the_same_axis(page):
    strip, findings, loss = (
        page.locator(which).bounding_box()
        for which in ("#strip", "#spans", "#scalars .track >> nth=0")
    )
    assert (strip["x"], strip["width"]) == (findings["x"], findings["width"])
    assert (strip["x"], strip["width"]) == (loss["x"], loss["width"])
    assert page.locator(".span").inner_text() == "collapsing"
    marks = [mark.bounding_box() for mark in page.locator(".alert-mark").all()]
    centres = [(mark["x"] + mark["width"] / 2 - strip["x"]) / strip["width"] for mark in marks]
    assert sorted(centres) == pytest.approx([4.5 / 6, 5.5 / 6], abs=0.01)


def test_alerts_of_one_kind_say_their_advice_once(page):
    shown = page.locator("#alerts").inner_text()
    assert shown.count("tame <b>it</b>") == 1
    assert "exploding: 2 alerts, steps 40 to 50" in shown
    page.locator("#slider").fill("0")
    page.get_by_role("button", name="Step 40: h.2, head 2", exact=True).click()
    assert words(page, "headline").startswith("At step 40: ")


def test_small_multiples_choose_a_layer(page):
    page.locator(".multiple").first.click()
    assert page.locator("#chart-title").inner_text() == "h.1: largest |score|"
    assert page.locator(".multiple").first.get_attribute("aria-pressed") == "true"


def test_the_numbers_are_the_runs(page, run_file):
    run = read_run(run_file.with_name("run.db"))

    def shown(label):
        lines = page.locator("#numbers").inner_text().splitlines()
        return float(lines[lines.index(label) + 1].replace("−", "-").replace(",", ""))

    _, survival = run.series("h.2.attn", "survival")
    assert shown("gradient survival") == pytest.approx(survival[-1, 2], rel=6e-3)
    page.locator("#slider").fill("1")
    assert shown("gradient survival") == pytest.approx(survival[1, 2], rel=6e-3)
    _, scores = run.series("h.2.attn", "score_max")
    assert shown("largest score") == pytest.approx(scores[1, 2], rel=6e-3)


def test_the_map_is_moved_in_by_keys(page):
    cell(page, 1, 2).focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "h.1, head 3" in words(page, "detail")


def test_the_theme_changes_what_is_painted(page):
    before = page.evaluate("document.getElementById('strip-canvas').toDataURL()")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(100)
    assert page.evaluate("document.getElementById('strip-canvas').toDataURL()") != before


def test_a_run_of_one_step_and_one_without_any(look, run_file, tmp_path):
    run = read_run(run_file.with_name("run.db"))
    one = tmp_path / "one.html"
    with Store(tmp_path / "one.db") as store:
        store(StepRecord(7, time.time(), {"attn": run.health("h.1.attn")[0][1]}))
    one.write_text(run_page(read_run(tmp_path / "one.db")), encoding="utf-8")
    tab = look(one, *DRESSES["phone light"])
    tab.wait_for_selector("[data-testid=cell]")
    assert words(tab, "step") == "7" and tab.locator("#slider").is_disabled()
    Store(tmp_path / "none.db").close()
    none = tmp_path / "none.html"
    none.write_text(run_page(read_run(tmp_path / "none.db")), encoding="utf-8")
    tab = look(none)
    assert words(tab, "headline") == "No step is recorded yet."
    assert not tab.locator("#map").is_visible()


def test_the_page_is_small(run_file):
    assert run_file.stat().st_size < 200_000
