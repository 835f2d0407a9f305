"""Makes docs/images/checkup.png and checkup-dark.png: python docs/images/screenshot.py.

Needs levelhead[demo], playwright, and a Chromium on the path or in LEVELHEAD_CHROMIUM.
"""

import os
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from levelhead.checkup import examine, load
from levelhead.report import checkup_page

WIDTH, HEIGHT = 1200, 1660


def main() -> None:
    """Draw the page of the demo model, and photograph its top in light and dark."""
    chromium = os.environ.get("LEVELHEAD_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "checkup.html"
        page.write_text(checkup_page(examine(load(), pictures=True)), encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--headless=new", "--no-sandbox", "--disable-gpu"]
        )
        for scheme, name in (("light", "checkup.png"), ("dark", "checkup-dark.png")):
            size = {"width": WIDTH, "height": HEIGHT}
            tab = browser.new_page(viewport=size, color_scheme=scheme)
            tab.goto(page.as_uri())
            tab.wait_for_selector("#heat .heatmaplayer image", state="attached")
            tab.screenshot(path=Path(__file__).with_name(name))
        browser.close()


if __name__ == "__main__":
    main()
