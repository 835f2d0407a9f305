"""The lab's page in a real browser: the answers first, in light and dark, on laptop and phone."""

import time

import pytest
from browser_support import DRESSES

from levelhead import lab
from levelhead.explore import PARTS

SCREENS = {**DRESSES, "tablet dark": (768, 1024, "dark"), "wide light": (1920, 1080, "light")}
BEFORE = 22_294  # pixels at 1280: the page when all its text was unfolded, of 16 claims


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """The page of all claims."""
    return lab.run(out=tmp_path_factory.mktemp("lab") / "out", size="tiny")


@pytest.fixture
def look(browser, page_file):
    """Opens the page once all is drawn; afterwards nothing may have gone wrong or been fetched."""
    wrong, contexts = [], []

    def open_page(dress, claim=""):
        width, height, scheme = SCREENS[dress]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 500
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: r.url.startswith("file:") or wrong.append(r.url))
        page.goto(page_file.page.as_uri() + (f"#{claim}" if claim else ""))
        page.wait_for_selector("body[data-drawn=all]", timeout=60_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def read(locator):
    """What people read: d_k has a subscript there."""
    return locator.inner_text().replace("\xa0", " ").replace("\n", "")


def said(text):
    """The same of a text from the results."""
    return text.replace("_", "")


def narrow(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# ---------------------------------------------------------------- the answers


def test_the_first_screen_has_every_verdict_with_its_reason(look, page_file):
    page = look("laptop light")
    rows = page.locator(".claims li")
    assert rows.count() == len(page_file.results) == len(lab.experiments())
    for row, result in zip(rows.all(), page_file.results, strict=True):
        box = row.bounding_box()
        assert box["y"] + box["height"] <= 800, result["experiment"]
        assert read(row.locator(".title")) == said(result["title"])
        assert read(row.locator(".pill")).endswith(lab.verdict_words(result["verdict"]))
        assert read(row.locator(".reason")) == said(lab.reason(result["why"]))


def test_the_page_is_half_as_high_and_its_text_is_folded(look):
    page = look("laptop light")
    assert page.evaluate("document.documentElement.scrollHeight") <= BEFORE / 2
    assert page.locator("details").count() > 0 and page.locator("details[open]").count() == 0
    assert not page.locator("blockquote").first.is_visible()


def test_it_is_one_file_of_three_megabytes(page_file):
    assert page_file.page.stat().st_size <= 3_000_000


@pytest.mark.parametrize("dress", SCREENS)
def test_every_picture_is_drawn_and_nothing_sticks_out(look, dress):
    page = look(dress)
    drawn = page.eval_on_selector_all(
        ".plot:not([id^=verdicts])",  # this small, it has runs of some kinds only
        "nodes => nodes.map(n => n.querySelectorAll('.trace, .hm').length)",
    )
    assert len(drawn) >= 40 and min(drawn) >= 1
    assert narrow(page)
    assert all(page.eval_on_selector_all(".plot", "nodes => nodes.map(n => n.ariaLabel)"))
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert all(
        page.eval_on_selector_all(
            ".plot",
            "nodes => nodes.map(n => n.querySelector('.main-svg').clientWidth == n.clientWidth)",
        )
    )
    bright = int(background.removeprefix("rgb(").split(",")[0]) > 128
    assert bright is ("light" in dress)
    page.eval_on_selector_all("details", "nodes => nodes.forEach(n => { n.open = true })")
    soon(lambda: page.locator("[data-try] section").count() == len(PARTS))
    assert narrow(page)


def test_a_claim_has_its_pictures_before_its_text(look):
    page = look("laptop light")
    claim = page.locator("#saturation")
    order = claim.evaluate("n => [...n.children].map(child => child.className.split(' ')[0])")
    assert order == ["", "reason", "pictures", "folds"]
    words, numbers, code = (
        claim.locator(f"details.{name}") for name in ("words", "numbers", "repeat")
    )
    words.locator("summary").click()
    assert "What was done" in words.inner_text() and words.locator("blockquote").is_visible()
    assert words.locator("th", has_text="a lead of 4 among 1000 keys").is_visible()
    assert max(len(text) for text in words.locator("p").all_inner_texts()) < 600
    numbers.locator("summary").click()
    assert numbers.locator("th", has_text="top weight").first.is_visible()
    assert numbers.locator("td", has_text="±").count() > 0
    code.locator("summary").click()
    assert "def measure(size: str, seed: int)" in code.inner_text()
    assert "levelhead lab saturation" in code.inner_text()


# ---------------------------------------------------------------- contents


def test_the_contents_stay_and_show_where_one_is(look, page_file):
    page = look("laptop dark")
    contents = page.locator(".contents li a")
    current = page.locator(".contents [aria-current]")
    assert contents.count() == len(page_file.results)
    for name in ("cosine", "verdicts", "variance"):
        page.locator(f".contents li a[href='#{name}']").click()
        soon(lambda name=name: 0 <= page.locator(f"#{name} h2").bounding_box()["y"] < 200)
        soon(lambda name=name: current.get_attribute("href") == f"#{name}")
        box = current.bounding_box()
        assert current.count() == 1 and 0 <= box["y"] <= 800 - box["height"]


def test_on_a_phone_the_contents_are_a_bar(look):
    page = look("phone light")
    bar, choice = page.locator(".contents"), page.locator("#go")
    assert page.get_by_label("Claim", exact=True).count() == 1
    choice.select_option("cosine")
    title = page.locator("#cosine h2")
    soon(lambda: 0 < title.bounding_box()["y"] < 300)
    box = bar.bounding_box()
    assert abs(box["y"]) < 1 and box["height"] < 70
    assert title.bounding_box()["y"] >= box["height"]  # not under the bar
    page.locator("#saturation").evaluate("n => n.scrollIntoView({ behavior: 'instant' })")
    soon(lambda: choice.input_value() == "saturation")


def test_a_link_to_a_claim_unfolds_its_text(look):
    page = look("laptop light", claim="overflow")
    assert page.locator("details[open]").count() == 1
    assert page.locator("#overflow .words[open]").count() == 1
    # Pictures that are drawn later have their room already, so the claim stays where it was.
    soon(lambda: abs(page.locator("#overflow").bounding_box()["y"]) < 40)
    page.locator(".claims a[href='#cosine']").click()
    soon(lambda: page.locator("#cosine .words[open]").count() == 1)
    summary = page.locator("#cosine .words > summary")
    summary.click()
    assert page.locator("#cosine .words[open]").count() == 0
    page.locator(".contents a[href='#cosine']").click()  # the same address again
    soon(lambda: page.locator("#cosine .words[open]").count() == 1)
    summary.focus()
    page.keyboard.press("Enter")
    soon(lambda: page.locator("#cosine .words[open]").count() == 0)


# ---------------------------------------------------------------- parts to play with


def test_every_part_of_the_explorer_is_beside_its_claim(look):
    page = look("laptop light")
    for part, one in PARTS.items():
        for claim in set(one.claims) & set(lab.experiments()):
            fold = page.locator(f"#{claim} details[data-try={part}]")
            assert read(fold.locator("summary")) == f"Try it: {one.title}"


def test_a_part_is_played_beside_its_claim(look):
    page = look("phone dark")
    assert page.get_by_test_id("dk").count() == 0  # nothing is made before it is wanted
    page.locator("#saturation .try > summary").click()
    here = page.locator("#saturation")
    here.get_by_test_id("rule").select_option("none")
    here.get_by_test_id("dk").fill("512")
    assert float(here.get_by_test_id("top-weight").text_content()) > 0.9
    here.get_by_test_id("rule").select_option("sqrt_dk")
    assert float(here.get_by_test_id("top-weight").text_content()) < 0.35
    assert narrow(page)

    page.locator("#variance .try > summary").click()  # there is one of it, and it keeps its state
    there = page.locator("#variance")
    soon(lambda: there.get_by_test_id("dk").count() == 1)
    assert there.get_by_test_id("dk").input_value() == "512"
    soon(lambda: page.locator("#saturation .try[open]").count() == 0)


def test_no_two_elements_have_the_same_id(look):
    page = look("laptop light")
    page.locator("#five_steps .try > summary").click()  # makes all parts
    soon(lambda: page.locator("#stairs").is_visible())
    ids = page.eval_on_selector_all("[id]:not(.plot [id])", "nodes => nodes.map(n => n.id)")
    assert sorted(set(ids)) == sorted(ids)


# ---------------------------------------------------------------- pictures


def test_a_legend_names_every_line_and_hides_it_on_a_click(look):
    page = look("phone light")
    plot = page.locator("#saturation-0")
    buttons = plot.locator("xpath=preceding-sibling::div").locator("button")
    assert buttons.count() == 4  # two scales, two numbers of keys
    assert buttons.first.inner_text() == "no scale, 16 keys"
    assert plot.locator(".legend").count() == 0  # Plotly's own, which would lie over the lines
    low, top = buttons.last.bounding_box(), plot.bounding_box()
    assert low["y"] + low["height"] <= top["y"]
    assert plot.locator(".scatterlayer .trace .point").count() == 4 * 6

    buttons.first.click()
    assert buttons.first.get_attribute("aria-pressed") == "false"
    soon(lambda: plot.locator(".scatterlayer .trace .point").count() == 3 * 6)
    buttons.first.click()
    soon(lambda: plot.locator(".scatterlayer .trace .point").count() == 4 * 6)


def test_hovering_shows_values_and_dragging_zooms(look):
    page = look("laptop light")
    plot = page.locator("#cosine-1")
    plot.scroll_into_view_if_needed()
    plot.locator(".scatterlayer .trace .point").last.hover(force=True)
    page.wait_for_selector("#cosine-1 .hoverlayer text")

    def span():
        low, high = page.evaluate("document.getElementById('cosine-1')._fullLayout.xaxis.range")
        return high - low

    before, box = span(), plot.locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 120, steps=5)
    page.mouse.up()
    soon(lambda: span() < before / 2)

    page.set_viewport_size({"width": 600, "height": 800})
    fits = "n => n.clientWidth < 600 && n.querySelector('.main-svg').clientWidth == n.clientWidth"
    soon(lambda: plot.evaluate(fits))


def soon(true):
    """The page allows no eval, so a condition is asked from here until it holds."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
