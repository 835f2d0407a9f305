"""The pages in a real browser: what is drawn, what hovering and clicking do, in every dress."""

import numpy as np
import pytest
from browser_support import DRESSES
from checkup_support import make_call, make_result, scales_of

import levelhead as lh
from levelhead._health.statistics import statistics_of
from levelhead._health.verdicts import VERDICTS
from levelhead.report import checkup_page, page

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


def drawn(tab, plot, key="z"):
    """What Plotly holds for a plot, once it is drawn."""
    tab.wait_for_selector(f"#{plot} .main-svg")
    return tab.evaluate("([id, key]) => document.getElementById(id).data[0][key]", [plot, key])


def until(tab, holds):
    """Playwright's own way of waiting needs eval, which the pages forbid."""
    for _ in range(100):
        if holds():
            return
        tab.wait_for_timeout(50)
    pytest.fail("it never came true")


def cell(tab, layer, head):
    return tab.locator(f'#map [data-layer="{layer}"][data-head="{head}"]')


def fits(tab):
    return tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def text_of(tab, selector):
    return tab.locator(selector).inner_text()


# ---------------------------------------------------------------- the checkup


@pytest.mark.parametrize("dress", DRESSES)
def test_the_map_is_drawn_and_clicked(look, checkup_file, dress):
    path, result, calls = checkup_file
    tab = look(path, *DRESSES[dress])
    assert tab.locator("#map [role=gridcell]").count() == 9
    for place, layer in enumerate(result["layers"]):
        for head in layer["heads"]:
            square = cell(tab, place, head["head"])
            assert square.inner_text() == VERDICTS[head["verdict"]].letter
            label = square.get_attribute("aria-label")
            assert label.startswith(f"layer.{place}, head {head['head']}: {head['verdict']}.")
    shades = tab.evaluate(
        "[...document.querySelectorAll('#map [role=gridcell]')]"
        ".map((each) => [each.className, getComputedStyle(each).backgroundColor])"
    )
    assert len({shade for _, shade in shades}) == len({verdict for verdict, _ in shades}) >= 3
    assert text_of(tab, "h1").startswith("2 of 9 heads need attention: 1 exploding, 1 saturated.")
    assert NASTY in text_of(tab, "#about")
    assert tab.locator("#legend li").count() >= 3
    assert fits(tab)
    # The heat map is the worst head's, then that of the one clicked.
    assert text_of(tab, "#head-title").endswith("layer.0, head 1: exploding (error)")
    np.testing.assert_allclose(drawn(tab, "heat"), calls[0].weights(0, 1), atol=2e-3)
    cell(tab, 0, 0).click()
    assert "layer.0, head 0" in text_of(tab, "#head-title")
    np.testing.assert_allclose(drawn(tab, "heat"), calls[0].weights(0, 0), atol=2e-3)
    assert cell(tab, 0, 0).get_attribute("aria-selected") == "true"
    assert fits(tab)


def test_themes_differ_and_follow(look, checkup_file):
    tab = look(checkup_file[0])
    ink = "getComputedStyle(document.querySelector('#heat .xtick text')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ink), tab.evaluate(ground)
    tab.emulate_media(color_scheme="dark")
    until(tab, lambda: tab.evaluate(ink) != light[0])
    assert tab.evaluate(ground) != light[1]


def test_hovering_shows_every_statistic(look, checkup_file):
    path, result, _ = checkup_file
    tab = look(path)
    assert not tab.locator("#tip").is_visible()
    cell(tab, 0, 1).hover()
    shown = text_of(tab, "#tip")
    head = result["layers"][0]["heads"][1]
    assert "layer.0, head 1: exploding (error)" in shown
    assert head["reason"] in shown
    assert all(each.label in shown for each in statistics_of(lh.Health).values() if each.is_field)
    lines = shown.splitlines()
    assert lines[lines.index("rows") + 1] == "24"
    assert lines[lines.index("largest score") + 1] == f"{head['score_max']:,.0f}"
    shown_entropy = lines[lines.index("entropy") + 1].replace("−", "-")
    assert float(shown_entropy) == pytest.approx(head["entropy"], rel=6e-3)
    tab.mouse.move(0, 0)
    assert not tab.locator("#tip").is_visible()


def test_hidden_pairs_are_left_blank(look, checkup_file):
    path, _, calls = checkup_file
    tab = look(path)
    cell(tab, 1, 2).click()
    causal = np.array(drawn(tab, "heat"), dtype=float)
    assert np.isnan(causal[0, 1])
    np.testing.assert_allclose(np.nan_to_num(causal), calls[1].weights(0, 2), atol=2e-3)
    assert len(drawn(tab, "scores", "x")) == 2 * 78  # visible pairs of both texts


def test_scales_change_the_map_and_the_heat_map(look, checkup_file):
    path, result, calls = checkup_file
    tab = look(path)
    cell(tab, 0, 0).click()
    tab.get_by_label("none").first.check(force=True)
    unscaled = result["layers"][0]["scales"]["none"]["heads"][0]
    moved = round(100 * unscaled["weight_moved"])
    assert cell(tab, 0, 0).inner_text() == str(moved)
    label = cell(tab, 0, 0).get_attribute("aria-label")
    assert label.startswith(f"layer.0, head 0: {moved}% of its weight moves.")
    title = f"layer.0, head 0 without the scale: {moved}% of its weight moves"
    assert text_of(tab, "#head-title").endswith(title)
    assert unscaled["reason"] in text_of(tab, "#head-words")
    want = calls[0]._run(4.0).weights[0, 0]  # d_k is 16
    np.testing.assert_allclose(drawn(tab, "heat"), want, atol=5e-3)
    headline = text_of(tab, "h1")
    assert headline.startswith("Without the scale: ") and headline.endswith("too sharp.")
    assert "worse than as trained" in headline
    assert scales_of(result)["none"]["sentence"] in text_of(tab, "#scale-words")
    assert "attention" not in headline + text_of(tab, "#scale-words")
    rows = tab.locator("#scales tbody tr").all_inner_texts()
    assert len(rows) == 4 and rows[0].startswith("as trained (1/√d_k)")
    assert "worse, too sharp: " in rows[-1]
    cell(tab, 0, 1).hover()
    assert "layer.0, head 1: exploding" in text_of(tab, "#tip")
    assert "(" not in text_of(tab, "#tip").splitlines()[0]  # no level: it only describes
    cell(tab, 2, 0).click()  # a cap lies between its scores and weights
    assert "Not drawn" in text_of(tab, "#heat")
    tab.get_by_label("as trained (1/√d_k)").first.check(force=True)
    assert text_of(tab, "h1").startswith("2 of 9 heads need attention")
    np.testing.assert_allclose(drawn(tab, "heat"), calls[2].weights(0, 0), atol=1e-3)
    tab.get_by_label("scores", exact=True).check(force=True)
    np.testing.assert_allclose(drawn(tab, "heat"), calls[2].scores(0, 0), atol=1e-3)


def test_tokens_are_shown_not_run(look, checkup_file):
    tab = look(checkup_file[0])
    drawn(tab, "heat")
    ticks = tab.locator("#heat .ytick text").all_text_contents()
    assert ticks[0].startswith("<script>aler")
    assert ticks[1:4] == ["<b>bold</b>", "&lt;", "the"]
    tab.locator("#heat .heatmaplayer image").hover(position={"x": 3, "y": 3}, force=True)
    tab.wait_for_selector("#heat .hoverlayer text")
    assert f"{NASTY} looks at {NASTY}" in "".join(
        tab.locator("#heat .hoverlayer text").all_text_contents()
    )
    assert tab.locator("#text option").first.text_content().startswith(NASTY)
    tab.locator("#text").select_option("1")
    assert tab.locator("#heat .ytick text").all_text_contents()[0] == "word0"


def test_the_map_is_moved_in_by_keys(look, checkup_file):
    tab = look(checkup_file[0])
    cell(tab, 0, 1).focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert text_of(tab, "#tip").startswith("layer.1, head 2")
    tab.keyboard.press("Enter")
    assert "layer.1, head 2" in text_of(tab, "#head-title")
    tab.keyboard.press("ArrowLeft")  # the focus has stayed in the map
    assert tab.evaluate("document.activeElement.dataset.head") == "1"


def test_a_page_without_pictures_says_so(look, tmp_path):
    result = make_result(make_call(), pictures=False, missed=[NASTY])
    result["pictures"] = {"inputs": [], "layers": [[]]}
    path = tmp_path / "page.html"
    path.write_text(checkup_page(result), encoding="utf-8")
    tab = look(path)
    assert "too long to draw" in text_of(tab, "#heat")
    assert f"not understood in {NASTY} (1 call)." in text_of(tab, "#missing")
    cell(tab, 0, 2).click()
    assert "head 2" in text_of(tab, "#head-title")


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
