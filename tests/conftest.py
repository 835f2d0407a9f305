"""Fixtures that all tests share."""

import pytest
from leak_support import no_leaks


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No mode, hook, listener, note on a tensor or thread outlives the test that made it."""
    with no_leaks():
        yield


@pytest.fixture(scope="module")
def browser():
    """A Chromium, driven by Playwright."""
    from browser_support import SWITCHES, chromium

    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        yield browser
        browser.close()
