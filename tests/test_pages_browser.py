"""The frame that all pages share, in a real browser."""

from browser_support import until

from levelhead.report import page


def test_nothing_can_be_fetched(browser, tmp_path):
    """The policy holds: the listener of the other tests would not see what it stops."""
    path = tmp_path / "page.html"
    script = "fetch('https://example.org').catch(() => { document.title = 'refused'; });"
    path.write_text(page("t", "", {}, script), encoding="utf-8")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    until(tab, lambda: tab.title() == "refused")
    tab.close()
