"""The explorer in a real browser, used as a reader would: controls moved, numbers read."""

import re

import pytest
from browser_support import DRESSES

from levelhead.explore import write_explorer

SCREENS = {**DRESSES, "small phone": (360, 740, "light"), "tablet dark": (768, 1024, "dark")}
MOST = 8.0  # ms of script for one update while a control is dragged


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    write_explorer(path)
    return path


@pytest.fixture
def look(browser, explorer):
    """Opens the page; afterwards no error, dialog or request to anywhere may have happened."""
    opened, wrong = [], []

    def open_page(width=1280, height=800, scheme="light", **options):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **options
        )
        opened.append(context)
        tab = context.new_page()
        tab.on("console", lambda note: wrong.append(f"{note.type}: {note.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "request",
            lambda request: None if request.url.startswith("file:") else wrong.append(request.url),
        )
        tab.goto(explorer.as_uri())
        return tab

    yield open_page
    for context in opened:
        context.close()
    assert wrong == []


def number(tab, name):
    return float(tab.get_by_test_id(name).text_content())


def text_of(tab, selector):
    return tab.locator(selector).inner_text().replace("\xa0", " ")


def settled(tab, selector, pattern):
    """Waits for a sentence that is written once a control rests."""
    for _ in range(60):
        if re.search(pattern, text_of(tab, selector).replace("\n", "")):
            return
        tab.wait_for_timeout(50)
    pytest.fail(f"{text_of(tab, selector)!r} never matched {pattern!r}")


def fits(tab):
    return tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("dress", SCREENS)
def test_every_part_is_drawn_and_fits(look, dress):
    tab = look(*SCREENS[dress])
    assert fits(tab)
    for part in ("scores", "width", "rivals", "training", "pronoun", "confusions"):
        paths = [
            path.get_attribute("d") for path in tab.locator(f"#{part} svg path").element_handles()
        ]
        assert all(path and "NaN" not in path for path in paths), part
        assert paths or part == "pronoun"
    assert tab.locator("#heads-map [role=gridcell]").count() == 72
    for _ in range(5):
        tab.locator("#next").click()
        assert fits(tab)
    tab.get_by_test_id("dk").fill("512")
    tab.get_by_test_id("rule").select_option("dk")
    assert fits(tab)


@pytest.mark.parametrize("dk", [1, 4, 64, 512])
def test_the_variance_follows_the_rule(look, dk):
    tab = look()
    tab.get_by_test_id("dk").fill(str(dk))
    expected = {"none": dk, "sqrt_dk": 1, "dk": 1 / dk, "sqrt_dmodel": dk / 512}
    for rule, variance in expected.items():
        tab.get_by_test_id("rule").select_option(rule)
        assert number(tab, "score-variance") == pytest.approx(variance, rel=0.05)


def test_without_the_scale_one_key_takes_all(look):
    tab = look()
    tops = {}
    for rule in ("none", "sqrt_dk", "dk"):
        tab.get_by_test_id("rule").select_option(rule)
        for dk in (4, 64, 512):
            tab.get_by_test_id("dk").fill(str(dk))
            tops[rule, dk] = number(tab, "top-weight")
    assert tops["none", 4] < tops["none", 64] < tops["none", 512] and tops["none", 512] > 0.9
    assert max(tops["sqrt_dk", dk] for dk in (4, 64, 512)) < 0.35
    assert tops["dk", 512] < 0.08  # of 16 keys
    tab.get_by_test_id("keys").fill("2")
    assert 0.5 < number(tab, "top-weight") < 0.52
    tab.get_by_test_id("rule").select_option("none")
    settled(tab, "#scores-said", r"dk = 512, no scale: .* of its 2 keys")


def test_every_d_k_is_near_what_the_derivation_says(look):
    """Over all 512 of them: the pairs stand for the expectation."""
    tab = look()
    ratios = tab.evaluate("Array.from({length: 512}, (_, d) => X.pairs.variance[d + 1] / (d + 1))")
    assert min(ratios) > 0.95 and max(ratios) < 1.05
    jacobian = tab.evaluate("""() => {
      const p = X.softmax([1, 2, 0.5]), found = X.sharpness(64, 1e-9, 4);
      return [p.reduce((a, b) => a + b), found.top, found.effective, found.signal, found.all];
    }""")
    # Of 4 equal weights: J = I/4 − 1/16, whose squared norm is 3/16.
    assert jacobian == pytest.approx([1, 0.25, 4, 0.75, (3 / 16 / 4) ** 0.5], rel=1e-6)


def test_a_line_of_the_derivation_lights_what_it_speaks_of(look):
    tab = look()
    lit = "[...document.querySelectorAll('.lit')].map((each) => each.dataset.part).sort()"
    line = tab.locator("#derivation button").nth(5)
    line.focus()
    assert tab.evaluate(lit) == ["rule", "variance"]
    tab.keyboard.press("Enter")
    tab.get_by_test_id("dk").focus()  # it stays when the focus goes
    assert tab.evaluate(lit) == ["rule", "variance"]
    assert line.get_attribute("aria-pressed") == "true"
    line.click()
    tab.mouse.move(0, 0)
    tab.get_by_test_id("dk").focus()
    assert tab.evaluate(lit) == []


def test_it_is_used_by_keyboard(look):
    tab = look()
    control = tab.get_by_test_id("dk")
    control.focus()
    tab.keyboard.press("End")
    assert control.input_value() == "512"
    tab.keyboard.press("ArrowLeft")
    assert control.input_value() == text_of(tab, "#dk-value") == "511"
    assert number(tab, "score-variance") == pytest.approx(511, rel=0.05)
    tab.keyboard.press("Home")
    assert number(tab, "score-variance") == pytest.approx(1, rel=0.05)
    outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    # Every control can be reached.
    reached = set()
    tab.evaluate("document.activeElement.blur()")
    for _ in range(140):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id"))
    wanted = tab.evaluate(
        "[...document.querySelectorAll('input[type=range], select')].map((each) => each.id)"
    )
    assert len(wanted) >= 12 and set(wanted) - reached == set()


def test_the_five_steps_go_forth_and_back(look):
    tab = look()
    assert tab.locator("#previous").is_disabled()
    titles = [text_of(tab, "#step-title")]
    for _ in range(5):
        tab.locator("#next").click()
        titles.append(text_of(tab, "#step-title"))
    assert [title[:6] for title in titles] == ["Words ", *(f"Step {n}" for n in range(1, 6))]
    assert tab.locator("#next").is_disabled()
    tab.locator("#previous").click()
    assert text_of(tab, "#step-title") == titles[4]
    tab.locator("#stairs button").nth(2).click()
    shapes = tab.locator("#step-picture .square .soft").all_inner_texts()
    assert [shape.strip() for shape in shapes] == ["3×3", "3×3"]
    cells = [
        float(cell.replace("−", "-"))
        for cell in tab.locator("#step-picture .cell").all_inner_texts()
    ]
    assert [score / 8 for score in cells[:9]] == pytest.approx(cells[9:], abs=0.02)
    tab.locator("#step-picture .cell").nth(9).focus()
    assert "/ 8 =" in text_of(tab, "#step-number")
    tab.locator("#stairs button").nth(3).click()
    weights = [float(cell) for cell in tab.locator("#step-picture .cell").all_inner_texts()[9:18]]
    assert [sum(weights[i : i + 3]) for i in (0, 3, 6)] == pytest.approx([1] * 3, abs=0.02)


def test_a_strip_is_walked_through_with_the_arrows(look):
    tab = look()
    strip = tab.locator("#step-picture canvas").nth(1)
    strip.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert re.match(r"Q = X Wq?.*Apple, dimension 2 of 64: −?[\d.]", text_of(tab, "#step-number"))
    assert "Apple, dimension 2 of 64" in strip.get_attribute("aria-valuetext")
    strip.hover(position={"x": 2, "y": 2})
    assert "love, dimension 1 of 64" in text_of(tab, "#step-number")


def test_heads_against_width(look):
    tab = look()
    assert "512/8 = 64" in text_of(tab, "#heads-value").replace("\n", "")
    assert float(text_of(tab, "#wrong-std")) == pytest.approx(8**-0.5, rel=0.03)
    tab.get_by_label("12,288 (GPT-3)").check(force=True)
    assert "12,288/96 = 128" in text_of(tab, "#heads-value").replace("\n", "")
    assert float(text_of(tab, "#right-std")) == pytest.approx(1, rel=0.03)
    assert float(text_of(tab, "#wrong-std")) == pytest.approx(96**-0.5, rel=0.03)
    settled(tab, "#width-said", r"√96 = 9\.80")


def test_vectors_grow(look):
    tab = look()
    tab.locator("#longer").fill("6")

    def figures(kind):
        words = text_of(tab, f"#{kind}-words").replace(",", "")
        return [float(found) for found in re.findall(r"\d[\d.]*", words)]

    dot, additive, cosine = map(figures, ("dot", "additive", "cosine"))
    assert dot[0] > 5000 and dot[1] > 0.99
    bound = float(re.search(r"\|v\|₁ = ([\d.]+)", tab.locator("#rival-scores").text_content())[1])
    assert additive[0] < bound and additive[1] < 0.5
    tab.locator("#longer").fill("0")
    assert f"top weight {cosine[1]:.2f}" in text_of(tab, "#cosine-words")


def test_the_runs_are_scrubbed_through(look):
    tab = look()
    given = tab.evaluate("LH.data.training")

    def run(**wanted):
        return next(r for r in given["runs"] if all(r[name] == v for name, v in wanted.items()))

    chosen = run(d_k=64, rate=0.005, rule="none")
    tab.locator("#run-step").fill("3")
    assert text_of(tab, "#step-value") == "30 of 400"
    cells = tab.locator("#run-table tbody td").all_inner_texts()
    assert cells[1::3] == [f"{head[3]:.0%}".replace("%", "\xa0%") for head in chosen["saturated"]]
    tab.locator("#run-dk").get_by_label("256").check(force=True)
    tab.locator("#run-rate").get_by_label("0.0005").check(force=True)
    chosen = run(d_k=256, rate=0.0005, rule="none")
    settled(tab, "#training-said", rf"the loss is {chosen['answers'][3]:.3g}")
    tab.locator("#play").click()
    settled(tab, "#step-value", r"[4-9]\d of 400")
    tab.locator("#play").click()
    assert text_of(tab, "#play") == "Play"


def test_every_head_is_asked_about_it(look):
    tab = look()
    settled(tab, "#pronoun-said", r"attends to 4\.4 of 12 tokens .* 22 of 72 heads")  # as claim 13
    tab.locator("#scale-jumps").get_by_text("no scale").click()
    assert "no scale" in text_of(tab, "#scale-value")
    settled(tab, "#pronoun-said", r"attends to 1\.\d of 12")
    tab.locator("#pronoun-scale").fill("-4")
    settled(tab, "#pronoun-said", r"attends to 1[01]\.\d of 12")
    cell = tab.locator("#heads-map [aria-selected=true]")
    cell.focus()
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowLeft")
    assert text_of(tab, "#head-title").endswith("layer 4, head 10")
    weights = [float(x) for x in tab.locator("#head-bars .weight").all_inner_texts()]
    assert sum(weights) == pytest.approx(1, abs=0.06)
    tab.get_by_label("round").check(force=True)
    assert "was round" in text_of(tab, "#sentence")
    settled(tab, "#pronoun-said", "must be the ball")


def test_the_confusions_are_settled(look):
    tab = look()
    tab.locator("#words").fill("20")
    assert "20×64" in text_of(tab, "#words-shapes") and "20×20" in text_of(tab, "#words-shapes")
    settled(tab, "#words-said", r"variance of q·k, 6\d\.\d,")
    before = tab.locator("#words-picture rect").evaluate_all("all => all.map((b) => b.outerHTML)")
    tab.locator("#words-dk").fill("512")
    after = tab.locator("#words-picture rect").evaluate_all("all => all.map((b) => b.outerHTML)")
    assert after[0] != before[0] and after[1] == before[1]  # the scores keep their shape
    tab.locator("#shape").fill("3")
    assert tab.locator("#shape-weights td").count() == 9
    settled(tab, "#shape-said", "Divided by 8: still 3×3")
    tops = []
    for power in ("-4", "4"):
        tab.locator("#normal").fill(power)
        settled(tab, "#normal-said", r"sum to 1\.00")
        tab.wait_for_timeout(300)
        tops.append(float(re.search(r"top one is ([\d.]+\d)", text_of(tab, "#normal-said"))[1]))
    assert tops[0] < 0.35 and tops[1] > 0.999
    tab.locator("#divisor-by").fill("512")
    settled(tab, "#divisor-said", r"1[56]\.\d of 16 keys")


def test_an_update_takes_no_time(look):
    """Every slider, dragged from end to end; the machine may be busy, so the median counts."""
    tab = look()
    spent = tab.evaluate("""() => [...document.querySelectorAll("[type=range]")].map((node) => {
      const times = [];
      for (let i = 0; i < 100; i++) {
        node.value = Number(node.min) + ((Number(node.max) - Number(node.min)) * i) / 99;
        const start = performance.now();
        node.dispatchEvent(new Event("input", { bubbles: true }));
        times.push(performance.now() - start);
      }
      return [node.id, times.sort((a, b) => a - b)[50]];
    })""")
    assert len(spent) >= 10
    assert {name: ms for name, ms in spent if ms > MOST} == {}


def test_themes_differ_and_follow(look):
    tab = look()
    cell = "document.getElementById('jacobian-cells').toDataURL()"  # SVG follows by itself
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(cell), tab.evaluate(ground)
    tab.emulate_media(color_scheme="dark")
    for _ in range(40):
        if tab.evaluate(cell) != light[0]:
            break
        tab.wait_for_timeout(50)
    assert tab.evaluate(cell) != light[0]
    assert tab.evaluate(ground) != light[1]


def test_a_finger_moves_the_step_on_the_chart(look):
    tab = look(390, 844, has_touch=True)
    picture = tab.locator("#run-loss svg")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.mouse.down()
    tab.mouse.up()
    assert 150 < int(text_of(tab, "#step-value").split()[0]) < 250
