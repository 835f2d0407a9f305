"""Makes the pictures of this folder: python docs/images/screenshot.py, or only one of them.

Needs levelhead[dev], and a Chromium on the path or in LEVELHEAD_CHROMIUM. The animation takes some
minutes, most of them to make its file small.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from levelhead.checkup import examine, load
from levelhead.explore import write_explorer
from levelhead.report import checkup_page, compare_page, compare_runs, run_page
from levelhead.store import read_run

WIDTH, HEIGHT = 1200, 1660

# The animation: d_k from 4 to 512 without the scale, then with it; times in ms. It shows three
# pictures of the explorer's second part and what moves them, so that they can be read in a README.
SWEEPS = {"none": 48, "sqrt_dk": 36}  # frames of each
STEP, AT_FIRST, AT_LAST = 55, 700, 1100
ONLY_WHAT_MOVES = """
.chips, .derivation, .said, #another, .field:has(#keys), .figures div:nth-child(3),
[data-part=jacobian], [data-part=histogram] { display: none }
.desk { display: block; padding: 14px 26px 22px }
.panel { position: static; border: 0 }
.figures { grid-template-columns: repeat(4, 1fr); margin: 8px 0 22px }
.figures dt { white-space: nowrap }
.pictures { grid-template-columns: 1fr 1fr 1.12fr; gap: 24px }
#scores figcaption { font-size: 0.82rem; white-space: nowrap }
#scores .key { flex-wrap: nowrap; gap: 8px; font-size: 0.66rem; white-space: nowrap }
:focus-visible { outline: none }
"""


def checkup(browser: Browser, folder: Path) -> None:
    """Draw the page of the demo model, and photograph one of its heads in light and dark."""
    page = folder / "checkup.html"
    page.write_text(checkup_page(examine(load(), pictures=True)), encoding="utf-8")
    for scheme, name in (("light", "checkup.png"), ("dark", "checkup-dark.png")):
        size = {"width": 1280, "height": 800}
        tab = browser.new_page(viewport=size, color_scheme=scheme)
        tab.goto(f"{page.as_uri()}#layer=5&head=10&text=2")
        tab.wait_for_selector("#heat canvas")
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


def animation(browser: Browser, folder: Path) -> None:
    """Film the explorer while d_k is moved, in light and dark."""
    write_explorer(folder / "explore.html")
    for scheme, name in (("light", "animation.webp"), ("dark", "animation-dark.webp")):
        size = {"width": 940, "height": 900}
        tab = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=2)
        tab.goto((folder / "explore.html").as_uri())
        tab.add_style_tag(content=ONLY_WHAT_MOVES)
        frames, times = [], []
        print(f"filming {name}", flush=True)
        for rule, steps in SWEEPS.items():
            tab.locator("#rule").select_option(rule)
            for step in range(steps):
                tab.locator("#dk").fill(str(round(4 * 128 ** (step / (steps - 1)))))
                shot = tab.locator("#scores .desk").screenshot()
                frames.append(Image.open(io.BytesIO(shot)).convert("RGB"))
                times.append({0: AT_FIRST, steps - 1: AT_LAST}.get(step, STEP))
        small = {"lossless": True, "method": 4}
        movie = {"save_all": True, "append_images": frames[1:], "duration": times, "loop": 0}
        frames[0].save(Path(__file__).with_name(name), **movie, **small)


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
        for make in (checkup, explore, run, animation):
            if not wanted or make.__name__ in wanted:
                make(browser, Path(folder))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
