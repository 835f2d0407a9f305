"""The checkup's page in a real browser, used as a reader would: drag, tap, type, go back."""

import csv
import io
import re
from collections import Counter

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser_support import DRESSES, until
from checkup_support import make_call, make_result

import levelhead as lh
from levelhead._health.statistics import statistics_of
from levelhead._health.verdicts import VERDICTS
from levelhead.report import checkup_page

NASTY = "<script>alert(1)</script>"
TOKENS = [
    NASTY,
    "<b>bold</b>",
    "&lt;",
    "the",
    "dog",
    "chased",
    "the",
    "ball",
    "as",
    "it",
    "ran",
    ".",
]
OTHER = [f"word{place}" for place in range(12)]
WIDTHS = {"small": (390, 844), "tablet": (768, 1024), "laptop": (1280, 800), "wide": (1920, 1080)}


@pytest.fixture(scope="module")
def checkup_file(tmp_path_factory):
    calls = [
        make_call("encoder.layer.0.attn", grow=(1, 900, 30)),
        make_call("encoder.layer.1.attn", seed=1, causal=True),
        make_call("encoder.layer.2.attn", seed=2, grow=(9, 9, 9), softcap=2.0),
    ]
    result = make_result(*calls, texts=[TOKENS, OTHER], name=f"Tiny {NASTY}")
    path = tmp_path_factory.mktemp("pages") / "checkup.html"
    path.write_text(checkup_page(result), encoding="utf-8")
    return path, result, calls


@pytest.fixture
def show(look, checkup_file):
    """Opens the checkup, once all of it is unpacked."""

    def opened(*dress, part="", path=checkup_file[0]):
        tab = look(path, *dress, part=part)
        until(tab, lambda: tab.evaluate("Attention.isReady()"))
        tab.wait_for_timeout(50)
        return tab

    return opened


def cell(tab, layer, head):
    return tab.locator(f'[data-testid="cell"][data-layer="{layer}"][data-head="{head}"]')


def slider(tab):
    return tab.get_by_test_id("scale")


def set_scale(tab, factor):
    """The slider goes by octaves: 0 is as trained."""
    slider(tab).fill(str(round(np.log2(factor), 2)))
    tab.wait_for_timeout(50)


def text_of(tab, selector):
    return tab.locator(selector).inner_text()


def title(tab):
    return text_of(tab, "#head-title").replace("\n", " ").strip()


def is_seen(tab, node):
    """Whether all of it is on the screen, without scrolling."""
    box, size = node.bounding_box(), tab.viewport_size
    return (
        box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= size["width"]
        and box["y"] + box["height"] <= size["height"]
    )


def fits(tab):
    return tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def weights(tab, layer, head, factor=1, text=0):
    """As the page computes them; NaN where hidden."""
    found = tab.evaluate(
        "([layer, text, head, factor]) => [...(Attention.weights("
        "LH.data.pictures[layer][text], head, factor) ?? [])].map((x) => (isNaN(x) ? null : x))",
        [layer, text, head, factor],
    )
    return np.array(found, dtype=float).reshape(12, 12)


def pixels(tab):
    return tab.evaluate("document.querySelector('#heat canvas').toDataURL()")


# ---------------------------------------------------------------- the map and the head


@pytest.mark.parametrize("dress", DRESSES)
def test_the_chosen_head_is_on_the_screen(show, checkup_file, dress):
    _, result, calls = checkup_file
    tab = show(*DRESSES[dress])
    assert tab.get_by_test_id("cell").count() == 9
    for place, layer in enumerate(result["layers"]):
        for head in layer["heads"]:
            square = cell(tab, place, head["head"])
            assert square.inner_text() == VERDICTS[head["verdict"]].letter
            label = square.get_attribute("aria-label")
            assert label.startswith(f"layer.{place}, head {head['head']}: {head['verdict']}.")
    headline = tab.get_by_test_id("headline").inner_text().replace("\n", " ")
    assert headline.startswith("2 of 9 heads need attention: 1 exploding, 1 saturated.")
    assert NASTY in text_of(tab, "#about")
    assert title(tab).endswith("layer.0, head 1: exploding (error)")
    small = "phone" in dress
    square = cell(tab, 1, 2)
    square.tap() if small else square.click()
    assert "layer.1, head 2" in title(tab)
    assert square.get_attribute("aria-selected") == "true"
    detail = tab.get_by_test_id("detail")
    assert is_seen(tab, square) and is_seen(tab, detail.locator("#head-title"))
    assert is_seen(tab, detail.locator("#facts"))
    assert small or is_seen(tab, detail.locator("#heat canvas"))
    assert small or is_seen(tab, detail.locator("#weights-bins svg"))
    assert not small or detail.bounding_box()["y"] > tab.viewport_size["height"] * 0.3
    assert fits(tab)
    want = np.where(np.tri(12), calls[1].weights(0, 2), np.nan)
    np.testing.assert_allclose(weights(tab, 1, 2), want, atol=1e-3)


def test_the_sheet_opens_and_closes(show):
    tab = show(*DRESSES["phone light"])
    body = tab.locator("#detail-body")
    assert not body.is_visible() and is_seen(tab, tab.locator("#head-title"))
    tab.locator("#toggle").tap()
    assert body.is_visible()
    tab.keyboard.press("Escape")
    assert not body.is_visible()
    cell(tab, 0, 0).tap()
    assert body.is_visible()
    tab.locator("#toggle").tap()
    assert not body.is_visible()


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_at_any_size(show, size, scheme):
    tab = show(*WIDTHS[size], scheme, part="#layer=0&head=1&scale=2.4")
    for colour in ("verdict", "weight_moved", "attention"):
        tab.locator("#colour").select_option(colour)
        assert fits(tab)
        found = Axe().run(tab).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_a_tooltip_of_four_numbers(show, checkup_file):
    tab = show()
    assert not tab.locator("#tip").is_visible()
    cell(tab, 0, 1).hover()
    head = checkup_file[1]["layers"][0]["heads"][1]
    shown = text_of(tab, "#tip")
    assert "layer.0, head 1: exploding (error)" in shown and head["reason"] in shown
    lines = tab.locator("#tip dt").all_inner_texts()
    compared = [each for each in statistics_of(lh.Health).values() if each.compared]
    assert lines == [each.label for each in compared] and len(lines) == 4
    assert f"{head['saturated']:.0%}" in tab.locator("#tip dd").all_inner_texts()
    tab.mouse.move(0, 0)
    assert not tab.locator("#tip").is_visible()


def test_the_map_is_moved_in_by_keys(show):
    tab = show()
    cell(tab, 0, 1).focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert text_of(tab, "#tip").startswith("layer.1, head 2")
    tab.keyboard.press("Enter")
    assert "layer.1, head 2" in title(tab)
    tab.keyboard.press("ArrowLeft")  # the focus has stayed in the map
    assert tab.evaluate("document.activeElement.dataset.head") == "1"


def test_chips_count_and_filter(show, checkup_file):
    tab = show()
    chips = [chip.split()[-2:] for chip in tab.locator(".chip").all_inner_texts()]
    heads = [head["verdict"] for layer in checkup_file[1]["layers"] for head in layer["heads"]]
    assert {name: int(many) for name, many in chips} == Counter(heads)
    tab.locator(".chip", has_text="exploding").click()
    pale = tab.locator("[data-testid=cell].pale")
    assert pale.count() == 8 and "pale" not in cell(tab, 0, 1).get_attribute("class")
    assert tab.locator(".chip", has_text="exploding").get_attribute("aria-pressed") == "true"
    tab.locator(".chip", has_text="exploding").click()
    assert pale.count() == 0


def test_any_statistic_colours_the_map(show, checkup_file):
    tab = show()
    names = tab.locator("#colour option").evaluate_all("(all) => all.map((each) => each.value)")
    assert names[:3] == ["verdict", "attention", "weight_moved"]
    assert names[3:] == [name for name in names[3:] if name in lh.Health.FIELDS]
    assert set(names[3:]) == set(lh.Health.FIELDS)
    tab.locator("#colour").select_option("saturated")
    share = checkup_file[1]["layers"][0]["heads"][1]["saturated"]
    assert cell(tab, 0, 1).inner_text() == str(round(100 * share))
    shades = tab.get_by_test_id("cell").evaluate_all(
        "(all) => all.map((each) => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(shades)) > 2
    tab.locator("#colour").select_option("weight_moved")
    assert {each.inner_text() for each in tab.get_by_test_id("cell").all()} == {"0"}
    tab.locator("#colour").select_option("attention")
    assert tab.locator("[data-testid=cell] canvas").count() == 9
    drawn = tab.locator("[data-testid=cell] canvas").evaluate_all(
        "(all) => all.map((x) => x.toDataURL())"
    )
    assert len(set(drawn)) == 9


def test_themes_differ_and_follow(show):
    tab = show()
    before = pixels(tab), tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.emulate_media(color_scheme="dark")
    until(tab, lambda: pixels(tab) != before[0])
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before[1]


def test_tokens_are_shown_not_run(show):
    tab = show()
    names = tab.locator("#heat .query").all_text_contents()
    assert names[0].startswith("<script>aler") and names[1:4] == ["<b>bold</b>", "&lt;", "the"]
    tab.locator("#heat canvas").hover(position={"x": 3, "y": 3})
    assert text_of(tab, "#heat-words").startswith(f"{NASTY} → {NASTY}: weight ")
    tab.mouse.move(0, 0)
    assert text_of(tab, "#heat-words").startswith("Rows: queries, columns: keys. Strongest: ")
    assert tab.locator("#text option").first.text_content().startswith(NASTY)
    tab.locator("#text").select_option("1")
    assert tab.locator("#heat .query").first.text_content() == "word0"


def test_the_card_advises(show, checkup_file):
    tab = show()
    card = text_of(tab, "#card")
    head = checkup_file[1]["layers"][0]["heads"][1]
    terms = tab.locator("#card dt").all_inner_texts()
    assert terms == ["What", "Why", "Is it benign?", "What to do"]
    assert head["reason"] in card and "No, as far as these texts show." in card
    assert text_of(tab, "#card code") == VERDICTS["exploding"].code
    cell(tab, 1, 0).click()
    assert "Yes: it is information, not an alarm." in text_of(tab, "#card")


# ---------------------------------------------------------------- the scale


def test_the_scale_is_dragged(show, checkup_file):
    _, _, calls = checkup_file
    tab = show(part="#layer=0&head=0")
    before, facts = pixels(tab), text_of(tab, "#facts")
    assert tab.locator("#facts dd").first.inner_text().strip() == "0%"
    box = slider(tab).bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + box["width"] / 2, middle)
    tab.mouse.down()
    for share in (0.6, 0.7, 0.777):
        tab.mouse.move(box["x"] + share * box["width"], middle)
    tab.wait_for_timeout(80)
    factor = 2 ** float(slider(tab).input_value())
    assert 1.5 < factor < 10 and pixels(tab) != before and text_of(tab, "#facts") != facts
    headline = tab.get_by_test_id("headline").inner_text()
    assert headline.startswith("With ") and "too sharp" in headline
    want = calls[0].moved(factor).weight_moved[0, 0]
    assert tab.locator("#facts dd").first.inner_text().strip() == f"{want:.0%}"
    tab.mouse.up()
    cell(tab, 0, 0).hover()
    assert "(" not in text_of(tab, "#tip").splitlines()[0]  # no level: it only describes
    slider(tab).fill("0")
    tab.wait_for_timeout(80)
    assert (pixels(tab), text_of(tab, "#facts")) == (before, facts)
    assert tab.get_by_test_id("headline").inner_text().startswith("2 of 9 heads need attention")


@pytest.mark.parametrize("factor", [0.06, 0.25, 0.8, 1.7, 4.0, 17.0])
def test_the_page_computes_what_python_does(show, checkup_file, factor):
    _, _, calls = checkup_file
    tab = show()
    for layer in (0, 1):
        found = [
            tab.evaluate("([l, h, f]) => Attention.moved(l, h, f)", [layer, head, factor])
            for head in range(3)
        ]
        want = calls[layer].moved(factor).weight_moved[0]
        np.testing.assert_allclose(found, want, rtol=0.01, atol=1e-4)
        other = calls[layer]._run(factor).weights[0, 0]
        np.testing.assert_allclose(np.nan_to_num(weights(tab, layer, 0, factor)), other, atol=2e-3)


def test_marks_name_the_rules_and_python_judges(show, checkup_file):
    _, result, _ = checkup_file
    tab = show(part="#layer=0&head=0")
    assert tab.locator("#marks button").all_inner_texts() == [
        "1/d_k",
        "1/√d_model",
        "1/√d_k",
        "no scale",
    ]
    tab.get_by_role("button", name="no scale").click()
    unscaled = result["layers"][0]["scales"]["none"]["heads"][0]
    assert float(slider(tab).input_value()) == 2  # d_k is 16: four times the scale
    assert cell(tab, 0, 0).inner_text() == VERDICTS[unscaled["verdict"]].letter
    assert tab.get_by_test_id("headline").inner_text().startswith("Without the scale: ")
    assert unscaled["reason"] in text_of(tab, "#card")
    assert "scale=1)" in text_of(tab, "#card code")
    assert text_of(tab, "#list-title").startswith("Moved most")
    first = max(
        (head["weight_moved"], layer["name"][8:15], head["head"])
        for layer in result["layers"]
        for head in layer["scales"]["none"]["heads"]
    )
    lead = tab.locator("#list button").first.inner_text()
    assert lead.startswith(f"{first[1]}, head {first[2]}")
    assert tab.locator("#list p").first.inner_text().startswith(f"{first[0]:.0%} of its weight")
    set_scale(tab, 1.7)  # 1.8 is the nearest that was judged
    assert tab.get_by_test_id("headline").inner_text().startswith("With 1.8 times the scale: ")


def test_a_cap_between_scores_and_weights_is_told(show, checkup_file):
    tab = show(part="#layer=2&head=0&scale=2")
    assert "Not drawn" in text_of(tab, "#heat")
    judged = checkup_file[1]["slider"]["layers"][2]["x1.8"]["heads"][0]["weight_moved"]
    assert tab.locator("#facts dd").first.inner_text().strip() == f"{judged:.0%}"
    tab.locator("#shown").select_option("scores")
    assert tab.locator("#heat canvas").is_visible()
    set_scale(tab, 1)
    tab.locator("#shown").select_option("weights")
    want = checkup_file[2][2].weights(0, 0)
    np.testing.assert_allclose(weights(tab, 2, 0), want, atol=1e-3)


# ---------------------------------------------------------------- the address


def test_an_address_names_what_is_shown_and_back_leads_back(show, checkup_file):
    tab = show()
    start = tab.url
    assert start.endswith("#layer=0&head=1&text=0&scale=1")
    cell(tab, 1, 2).click()
    tab.locator("#text").select_option("1")
    set_scale(tab, 0.5)
    slider(tab).dispatch_event("change")
    assert tab.url.endswith("#layer=1&head=2&text=1&scale=0.5")
    there = show(part=tab.url.partition("#")[1] + tab.url.partition("#")[2])
    assert "layer.1, head 2" in title(there) and there.locator("#text").input_value() == "1"
    assert float(slider(there).input_value()) == -1
    assert pixels(there) == pixels(tab)
    tab.go_back()
    assert tab.url.endswith("text=1&scale=1") and slider(tab).input_value() == "0"
    tab.go_back()
    assert tab.locator("#text").input_value() == "0" and "layer.1, head 2" in title(tab)
    tab.go_back()
    assert tab.url == start and "layer.0, head 1" in title(tab)
    tab.go_forward()
    assert "layer.1, head 2" in title(tab)


@pytest.mark.parametrize(
    "part", ["#layer=99&head=-1&text=x&scale=0", "#scale=Infinity&text=7", "#"]
)
def test_an_address_of_nothing_shows_the_worst_head(show, part):
    tab = show(part=part)
    assert title(tab).endswith("layer.0, head 1: exploding (error)")
    assert slider(tab).input_value() == "0"


# ---------------------------------------------------------------- files


def saved(tab, group, kind):
    with tab.expect_download() as waiting:
        tab.locator(f"#{group}").get_by_role("button", name=kind).click()
    download = waiting.value
    with open(download.path(), "rb") as file:
        return download.suggested_filename, file.read()


def test_pictures_and_numbers_are_saved(show, checkup_file):
    _, result, calls = checkup_file
    tab = show(part="#layer=0&head=2")
    for group in ("save-map", "save-heat"):
        name, content = saved(tab, group, "PNG")
        assert name.endswith(".png") and content.startswith(b"\x89PNG") and len(content) > 2000
        name, content = saved(tab, group, "SVG")
        assert name.endswith(".svg") and b"</svg>" in content and b"var(" not in content
        assert re.fullmatch(r"[\w.-]+", name)
    _, content = saved(tab, "save-heat", "CSV")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert len(rows) == 144 and rows[0]["query"] == NASTY
    want = calls[0].weights(0, 2).ravel()
    np.testing.assert_allclose([float(row["weight"]) for row in rows], want, atol=1e-3)
    _, content = saved(tab, "save-map", "CSV")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    heads = [head for layer in result["layers"] for head in layer["heads"]]
    assert [row["verdict"] for row in rows] == [head["verdict"] for head in heads]
    np.testing.assert_allclose(
        [float(row["entropy"]) for row in rows], [head["entropy"] for head in heads], rtol=1e-3
    )


# ---------------------------------------------------------------- other results


def test_a_page_without_pictures_says_so(show, tmp_path):
    result = make_result(make_call(), pictures=False, missed=[NASTY])
    path = tmp_path / "page.html"
    path.write_text(checkup_page(result), encoding="utf-8")
    tab = show(path=path)
    assert "too long to draw" in text_of(tab, "#heat")
    assert f"not understood in {NASTY} (1 call)." in text_of(tab, "#missing")
    cell(tab, 0, 2).click()
    assert "head 2" in title(tab)
    tab.get_by_role("button", name="1/d_k", exact=True).click()
    assert tab.get_by_test_id("headline").inner_text().startswith("With 1/d_k: ")


def test_long_rows_are_cut_but_whole_in_their_weights(show, tmp_path):
    call = make_call(length=150, grow=(1, 9, 1))
    path = tmp_path / "page.html"
    path.write_text(checkup_page(make_result(call)), encoding="utf-8")
    tab = show(path=path)
    assert "Shown are the first 64 × 64 of 150 × 150." in text_of(tab, "#heat-words")
    for factor, close in ((1, 1e-3), (0.3, 0.01), (4, 0.01)):
        for head in (0, 1):
            found = tab.evaluate(
                "([h, f]) => [...Attention.weights(LH.data.pictures[0][0], h, f)]", [head, factor]
            )
            want = call._run(factor).weights[0, head][:64, :64]
            assert np.abs(np.reshape(found, (64, 64)) - want).max() < close
    moved = tab.evaluate("Attention.moved(0, 0, 0.3)")
    assert moved == pytest.approx(call.moved(0.3).weight_moved[0, 0], rel=0.05)


def test_layers_of_different_scales_have_the_marks_they_share(show, tmp_path):
    calls = [make_call("a", d_k=16), make_call("b", d_k=64)]
    path = tmp_path / "page.html"
    path.write_text(checkup_page(make_result(*calls)), encoding="utf-8")
    tab = show(path=path)
    assert tab.locator("#marks button").all_inner_texts() == ["1/√d_model", "1/√d_k"]
    set_scale(tab, 0.2)
    assert tab.get_by_test_id("headline").inner_text().startswith("With 0.18 times the scale: ")
