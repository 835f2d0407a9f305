"""The lab's page in a real browser: everything drawn, in light and dark, on laptop and phone."""

import time

import pytest
from browser_support import DRESSES

from levelhead import lab

NAMES = ["five_steps", "saturation", "additive", "cosine"]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    out = tmp_path_factory.mktemp("lab") / "out"
    return lab.run(NAMES, out=out, size="tiny", seeds=2)


@pytest.fixture
def look(browser, page_file):
    """Opens the page once all is drawn; afterwards nothing may have gone wrong or been fetched."""
    wrong, contexts = [], []

    def open_page(dress):
        width, height, scheme = DRESSES[dress]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 500
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: r.url.startswith("file:") or wrong.append(r.url))
        page.goto(page_file.page.as_uri())
        page.wait_for_selector("body[data-drawn=all]", timeout=60_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.mark.parametrize("dress", ["laptop dark", "phone light"])
def test_every_picture_is_drawn_and_nothing_sticks_out(look, dress):
    page = look(dress)
    drawn = page.eval_on_selector_all(
        ".plot", "nodes => nodes.map(n => n.querySelectorAll('.trace, .hm').length)"
    )
    assert len(drawn) == 4 + 2 + 3 + 2 and min(drawn) >= 1
    assert page.evaluate("document.documentElement.scrollWidth") <= DRESSES[dress][0]
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


def test_the_contents_lead_to_every_claim_with_its_verdict(look, page_file):
    page = look("laptop light")
    links = page.locator(".claims a")
    assert links.count() == len(NAMES)
    for place, result in enumerate(page_file.results):
        link = links.nth(place)
        verdict = lab.verdict_words(result["verdict"])
        assert link.inner_text().endswith(verdict)
        section = page.locator(link.get_attribute("href"))
        assert section.locator("h2 .pill").inner_text().endswith(verdict)
        assert f"levelhead lab {result['experiment']}" in section.inner_html()
    links.nth(3).click()
    soon(lambda: page.locator("#cosine h2").bounding_box()["y"] < 800)

    numbers, code = page.locator("#saturation details").all()
    numbers.locator("summary").click()
    assert numbers.locator("th", has_text="top weight").first.is_visible()
    assert numbers.locator("td", has_text="±").count() > 0
    code.locator("summary").click()
    assert "def measure(size: str, seed: int)" in code.inner_text()


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
