"""Put a run of the lab here: results.json, its pictures as images, and results.md to read them by.

    levelhead lab --out lab && python docs/lab/publish.py lab

Needs playwright and a Chromium (LEVELHEAD_CHROMIUM names another one).
"""

import json
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
FIGURES = HERE / "figures"


def save_pictures(page: Path) -> dict[str, list[tuple[str, str]]]:
    """Every picture of the page as a PNG file; gives (file, title) of each, by experiment."""
    shutil.rmtree(FIGURES, ignore_errors=True)
    FIGURES.mkdir()
    saved: dict[str, list[tuple[str, str]]] = {}
    chromium = os.environ.get("LEVELHEAD_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        opened = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5)
        opened.goto(page.resolve().as_uri())
        opened.wait_for_selector("body[data-drawn=all]", timeout=120_000)
        # A picture alone is narrower than one that shares a row, so that its letters can be read.
        opened.add_style_tag(
            content=".pictures { grid-template-columns: 592px !important } "
            "figure { padding: 14px 16px; background: var(--page) }"
        )
        opened.set_viewport_size({"width": 1281, "height": 900})  # draws again
        opened.wait_for_timeout(3000)
        for plot in opened.locator(".plot").all():
            name = plot.get_attribute("id") or ""
            figure = plot.locator("xpath=..")
            figure.screenshot(path=str(FIGURES / f"{name}.png"))
            title = figure.locator("figcaption").first.inner_text().strip()
            saved.setdefault(name.rpartition("-")[0], []).append((f"{name}.png", title))
        browser.close()
    return saved


def page_of(results: list[dict], pictures: dict[str, list[tuple[str, str]]]) -> str:
    """The results as Markdown."""
    size = results[0]["size"]
    command = "levelhead lab" + ("" if size == "full" else f" --{size}")
    lines = [
        "# What holds of what is said about √d_k",
        "",
        f"A run of `{command}`, put here by [publish.py](publish.py).",
        "[results.json](results.json) has every figure with its spread over seeds. The page that",
        "a run makes has the tables too, and pictures to hover over and to zoom into.",
        "",
        "| | claim | verdict |",
        "|---|---|---|",
    ]
    for r in results:
        claim = r["claim"]
        lines.append(f"| {claim} | [{r['title']}](#claim-{claim}) | {r['verdict']} |")
    for r in results:
        why = r["why"][:1].upper() + r["why"][1:]
        lines += ["", f"## Claim {r['claim']}", "", f"**{r['title']}: {r['verdict']}.** {why}"]
        lines += ["", r["text"], ""]
        lines += [
            f"![{title}](figures/{file})" for file, title in pictures.get(r["experiment"], [])
        ]
        lines += ["", f"    {command} {r['experiment']}"]
    return "\n".join(lines) + "\n"


def main(run: str) -> None:
    """Publish the run in this folder."""
    folder = Path(run)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    shutil.copy(folder / "results.json", HERE / "results.json")
    page = page_of(results, save_pictures(folder / "index.html"))
    (HERE / "results.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
