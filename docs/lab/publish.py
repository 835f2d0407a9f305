"""Put a run of the lab here: results.json, its pictures as images, and results.md to read them by.

    levelhead lab --out lab && python docs/lab/publish.py lab
    levelhead lab verdicts --out lab && python docs/lab/publish.py lab   # others stay as they are
    python docs/lab/publish.py      # only the words: results.md and the README's table

The first needs playwright and a Chromium (LEVELHEAD_CHROMIUM names another one).
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

from levelhead.lab import experiments, reason, verdict_words
from levelhead.lab._results import paragraphs

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
FIGURES = HERE / "figures"
Pictures = dict[str, list[tuple[str, str]]]


def save_pictures(page: Path) -> Pictures:
    """Every picture of the page as a PNG file; gives (file, title) of each, by experiment."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    FIGURES.mkdir(exist_ok=True)
    saved: Pictures = {}
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
            content=".pictures { grid-template-columns: 592px !important; max-width: none } "
            ".picture { padding: 14px 16px; background: var(--page) }"
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


def published_pictures() -> Pictures:
    """The pictures that are here already, with the titles that results.md gives them."""
    page = (HERE / "results.md").read_text(encoding="utf-8")
    saved: Pictures = {}
    for title, file in re.findall(r"^!\[(.*)\]\(figures/(.*)\)$", page, re.MULTILINE):
        saved.setdefault(file.rpartition("-")[0], []).append((file, title))
    return saved


def results_page(results: list[dict], pictures: Pictures) -> str:
    """The results as Markdown: the answers in one table, then each claim with its pictures."""
    size = results[0]["size"]
    command = "levelhead lab" + ("" if size == "full" else f" --{size}")
    lines = [
        "# Which claims about √d_k hold",
        "",
        f"A run of `{command}`, put here by [publish.py](publish.py).",
        "[results.json](results.json) has every figure with its spread over the seeds. The page",
        "that a run makes also has the tables, pictures to hover over, and parts to play with.",
        "",
        "| | claim | verdict | because |",
        "|---|---|---|---|",
    ]
    for r in results:
        claim, verdict = r["claim"], verdict_words(r["verdict"])
        cells = f"[{r['title']}](#claim-{claim}) | {verdict} | {reason(r['why'])}"
        lines.append(f"| {claim} | {cells} |")
    for r in results:
        lines += ["", f"## Claim {r['claim']}", "", f"**{r['title']}**", ""]
        lines += [f"**{verdict_words(r['verdict']).capitalize()}:** {reason(r['why'])}.", ""]
        shown = [f"![{t}](figures/{file})" for file, t in pictures.get(r["experiment"], [])]
        lines += [*shown[:1], "", *_key_figures(r)]
        lines += _folded("More pictures", shown[1:]) if shown[1:] else []
        lines += _folded("In words", _text(r))
        lines += [f"    {command} {r['experiment']}"]
    return "\n".join(lines) + "\n"


def _key_figures(result: dict) -> list[str]:
    rows = [f"| {label} | {value} |" for label, value in result.get("key_figures", {}).items()]
    return ["| to remember | |", "|---|---|", *rows, ""] if rows else []


def _folded(summary: str, paragraphs: list[str]) -> list[str]:
    return [f"<details><summary>{summary}</summary>", "", *paragraphs, "", "</details>", ""]


PARTS = {
    "said": "What is said",
    "done": "What was done",
    "found": "What came out",
    "limits": "Where it stops being true",
}


def _text(result: dict) -> list[str]:
    """Why, and what is said, done and found, in short paragraphs.

    The text is the experiment's own, with its fields filled in: that is how its parts are found. A
    text from before the experiment's words changed stands there without their headings.
    """
    one, rest = experiments()[result["experiment"]], result["why"].partition(". ")[2]
    filled = [re.sub(r"\\\{.*?\\\}", ".*?", re.escape(getattr(one, part))) for part in PARTS]
    found = re.fullmatch(" ".join(f"({text})" for text in filled), result["text"])
    labels = [f"**{label}.** " for label in PARTS.values()] if found else [""]
    texts = zip(labels, found.groups() if found else [result["text"]], strict=True)
    lines: list[str] = []
    for label, text in [("**Why.** ", rest), *texts] if rest else texts:
        lines += [line for paragraph in paragraphs(label + text) for line in (paragraph, "")]
    return lines[:-1]


def with_table(readme: str, results: list[dict]) -> str:
    """The README with these results in the table of its lab section."""
    rows = "".join(
        f"| {r['claim']} | {r['title']} | {verdict_words(r['verdict'])} |\n" for r in results
    )
    pattern = r"(<!-- lab:start -->(?s:.*?)\|---\|---\|---\|\n)(?:\|.*\n)*"
    return re.sub(pattern, lambda found: found[1] + rows, readme, count=1)


def read(folder: Path) -> list[dict]:
    """The results of a run."""
    found: list[dict] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def main(run: str | None = None) -> None:
    """Publish the run in this folder; without one, write the words of the published one again."""
    results, pictures = read(HERE), published_pictures()
    if run is not None:
        new = read(Path(run))
        renewed = {each["experiment"] for each in new}
        kept = [each for each in results if each["experiment"] not in renewed]
        results = sorted([*kept, *new], key=lambda each: (each["claim"], each["experiment"]))
        pictures |= save_pictures(Path(run) / "index.html")
        text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
        (HERE / "results.json").write_text(text, encoding="utf-8")
        there = {file for files in pictures.values() for file, _ in files}
        for old in FIGURES.glob("*.png"):
            if old.name not in there:
                old.unlink()
    (HERE / "results.md").write_text(results_page(results, pictures), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_table(readme, results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
