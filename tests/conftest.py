"""Fixtures that all tests share."""

import sys

import pytest
from leak_support import no_leaks

# Many runs of tiny models: two threads of PyTorch spend most of their time waiting for each other,
# and much more on a busy machine. How threads share work is tested elsewhere.
ONE_THREAD = (
    "test_watch",
    "test_listen",
    "test_hf",
    "test_torch_tiled",
    "test_torch_nn",
    "test_notebook",
)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No mode, hook, listener, note on a tensor or thread outlives the test that made it."""
    with no_leaks():
        yield


@pytest.fixture(scope="module", autouse=True)
def threads(request):
    """PyTorch on one thread, where more would only be slower."""
    if not request.module.__name__.startswith(ONE_THREAD):
        yield
        return
    torch = sys.modules["torch"]
    many = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(many)


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


@pytest.fixture
def look(browser):
    """Opens a page; afterwards no error, dialog or request to anywhere may have happened."""
    opened, wrong = [], []

    def open_page(path, width=1280, height=800, scheme="light", part=""):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 600
        )
        opened.append(context)
        tab = context.new_page()
        tab.on("console", lambda note: wrong.append(f"{note.type}: {note.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
        tab.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("file:", "data:", "blob:"))
                else wrong.append(request.url)
            ),
        )
        tab.goto(path.as_uri() + part)
        return tab

    yield open_page
    for context in opened:
        context.close()
    assert wrong == []
