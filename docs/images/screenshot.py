"""Makes the pictures of this folder: python docs/images/screenshot.py, or only explore or run.

Needs levelhead[demo], playwright, and a Chromium on the path or in LEVELHEAD_CHROMIUM.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from levelhead.checkup import examine, load
from levelhead.explore import write_explorer
from levelhead.report import checkup_page, compare_page, compare_runs, run_page
from levelhead.store import read_run

WIDTH, HEIGHT = 1200, 1660


def checkup(browser: Browser, folder: Path) -> None:
    """Draw the page of the demo model, and photograph its top in light and dark."""
    page = folder / "checkup.html"
    page.write_text(checkup_page(examine(load(), pictures=True)), encoding="utf-8")
    for scheme, name in (("light", "checkup.png"), ("dark", "checkup-dark.png")):
        size = {"width": WIDTH, "height": HEIGHT}
        tab = browser.new_page(viewport=size, color_scheme=scheme)
        tab.goto(page.as_uri())
        tab.wait_for_selector("#heat .heatmaplayer image", state="attached")
        tab.screenshot(path=Path(__file__).with_name(name))


def explore(browser: Browser, folder: Path) -> None:
    """Photograph the second part of the explorer, unscaled at a large d_k."""
    write_explorer(folder / "explore.html")
    tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    tab.goto((folder / "explore.html").as_uri())
    tab.locator("#dk").fill("256")
    tab.locator("#dk").blur()
    tab.evaluate("document.getElementById('scores').scrollIntoView()")
    tab.wait_for_timeout(500)
    section, desk = (tab.locator(part).bounding_box() for part in ("#scores", "#scores .desk"))
    assert section and desk
    clip = {"x": section["x"] - 32, "y": 0, "width": section["width"] + 64}
    clip["height"] = desk["y"] + desk["height"] + 12
    tab.screenshot(path=Path(__file__).with_name("explore.png"), clip=clip)


def run(browser: Browser, folder: Path) -> None:
    """Train the example, and photograph its run and the comparison with its cure."""
    example = Path(__file__).parents[2] / "examples" / "exploding_head.py"
    store = folder / "run.db"
    subprocess.run([sys.executable, example, store], check=True, stdout=subprocess.DEVNULL)
    pages = {
        "run": (run_page(read_run(store, 1)), 1190),
        "compare": (compare_page(compare_runs(store, "1", "2")), 1500),
    }
    for name, (text, height) in pages.items():
        page = folder / f"{name}.html"
        page.write_text(text, encoding="utf-8")
        tab = browser.new_page(viewport={"width": WIDTH, "height": height})
        tab.goto(page.as_uri())
        tab.wait_for_selector("[data-testid=cell]")
        tab.screenshot(path=Path(__file__).with_name(f"{name}.png"))


def main(*wanted: str) -> None:
    """Make the pictures that are named, or all."""
    chromium = os.environ.get("LEVELHEAD_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--headless=new", "--no-sandbox", "--disable-gpu"]
        )
        for make in (checkup, explore, run):
            if not wanted or make.__name__ in wanted:
                make(browser, Path(folder))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
