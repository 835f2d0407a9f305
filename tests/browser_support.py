"""What the tests in a browser share: where it is, and the screens a page must suit."""

import os
import shutil

import pytest

SWITCHES = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--disable-quic"),
]
DRESSES = {
    "laptop light": (1280, 800, "light"),
    "laptop dark": (1280, 800, "dark"),
    "phone light": (390, 844, "light"),
    "phone dark": (390, 844, "dark"),
}


def chromium():
    """Where the browser is; without one these tests fail, unless that is said to be wanted."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("LEVELHEAD_CHROMIUM") or next(filter(None, map(shutil.which, names)), "")
    if found:
        return found
    if os.environ.get("LEVELHEAD_NO_BROWSER") == "1":
        pytest.skip("LEVELHEAD_NO_BROWSER=1")
    pytest.fail(
        "no Chromium: install one (apt-get install chromium), name it in LEVELHEAD_CHROMIUM, "
        "or leave these tests out with LEVELHEAD_NO_BROWSER=1"
    )


def until(tab, holds):
    """Playwright's own way of waiting needs eval, which the pages forbid."""
    for _ in range(100):
        if holds():
            return
        tab.wait_for_timeout(50)
    pytest.fail("it never came true")
