"""Pictures out of the lab's page, for places that cannot run one.

    python docs/lab/pictures.py lab/index.html docs/lab gradients-0 saturation-0

Every picture of the page has a name: the experiment's, and a number from 0. Without names, all.
Needs playwright and a Chromium (LEVELHEAD_CHROMIUM names another one).
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(page: str, out: str, *names: str) -> None:
    """Save pictures of a page as PNG files, each with its title."""
    chromium = os.environ.get("LEVELHEAD_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        opened = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5)
        opened.goto(Path(page).resolve().as_uri())
        opened.wait_for_selector("body[data-drawn=all]", timeout=120_000)
        # A picture alone is narrower than one that shares a row, so that its letters can be read.
        opened.add_style_tag(
            content=".pictures { grid-template-columns: 592px !important } "
            "figure { padding: 14px 16px; background: var(--page) }"
        )
        opened.set_viewport_size({"width": 1281, "height": 900})  # draws again
        opened.wait_for_timeout(3000)
        for plot in opened.locator(".plot").all():
            name = plot.get_attribute("id")
            if not names or name in names:
                Path(out).mkdir(parents=True, exist_ok=True)
                figure = plot.locator("xpath=..")
                figure.screenshot(path=str(Path(out) / f"{name}.png"))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
