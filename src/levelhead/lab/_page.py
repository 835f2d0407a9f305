"""The page: every claim with its verdict, pictures, numbers and the code to repeat it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from .. import __version__
from ._experiment import VERDICTS
from ._legend import legend
from ._results import NOT_RUN, Outcome
from ._rich import rich
from ._tables import shown_tables

MARKS = {"holds": "●", "holds partly": "◐", "does not hold": "○", NOT_RUN: "–"}
PARTS = {
    "done": "What was done",
    "found": "What came out",
    "limits": "Where it stops being true",
}


def lab_page(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as one HTML file that needs no network."""
    from ..report import page  # noqa: PLC0415 - imports Plotly

    pictures = {
        f"{one.experiment.name}-{i}": _lettered(picture)
        for one in outcomes
        for i, picture in enumerate(one.experiment.plot(one.runs) if one.runs else [])
    }
    title = "What people say about √d_k, measured"
    return page(title, _body(outcomes), pictures, _asset("lab.js"), _asset("lab.css"))


def _body(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(one.verdict()[0] for one in outcomes)
    tally = ", ".join(
        f"{counts[verdict]} {_plural(verdict, counts[verdict])}"
        for verdict in (*VERDICTS, NOT_RUN)
        if counts[verdict]
    )
    entries = "\n".join(map(_entry, outcomes))
    sections = "\n".join(map(_section, outcomes))
    return f"""
<header>
<p class="kicker">The levelhead lab</p>
<h1>What people say about √d<sub>k</sub>, measured</h1>
<p>Attention divides its scores by √d<sub>k</sub>. Explanations of why repeat each other, and some
contradict each other; few show a measurement. Here each claim is an experiment that anyone can run
again. A rule reads the verdict off its figures; nobody decides it beforehand.</p>
<p class="tally">{len(outcomes)} {"claim" if len(outcomes) == 1 else "claims"}: {tally}.</p>
</header>
<nav aria-label="Claims"><ol class="claims">
{entries}
</ol></nav>
{sections}
<footer>{_footer(outcomes)}</footer>"""


def _plural(verdict: str, count: int) -> str:
    if count == 1 or verdict == NOT_RUN:
        return verdict
    return {"does not hold": "do not hold"}.get(verdict, verdict.replace("holds", "hold"))


def _entry(one: Outcome) -> str:
    """A line of the table of contents."""
    name, title = one.experiment.name, rich(one.experiment.title)
    return (
        f'<li><a href="#{name}"><span class="number">{one.experiment.claim}</span>'
        f'<span class="title">{title}</span>{_pill(one.verdict()[0])}</a></li>'
    )


def _pill(verdict: str) -> str:
    mark = f'<span aria-hidden="true">{MARKS[verdict]}</span>'
    return f'<span class="pill {_kind(verdict)}">{mark} {verdict}</span>'


def _kind(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _section(one: Outcome) -> str:
    experiment = one.experiment
    verdict, why = one.verdict()
    number = f'<a class="number" href="#{experiment.name}">{experiment.claim}</a>'
    head = (
        f'<section id="{experiment.name}" class="claim">\n'
        f"<h2><span>{number} {rich(experiment.title)}</span>{_pill(verdict)}</h2>"
    )
    if not one.runs:
        said = f"<blockquote>{rich(experiment.said)}</blockquote>"
        return f'{head}\n{said}\n<p class="why">Not run: {rich(why)}</p>\n</section>'
    texts = one.texts()
    if one.clock():
        texts["found"] += f" By the clock, this time: {one.clock()}"
    columns = "\n".join(
        f"<div><h3>{label}</h3><p>{rich(texts[part])}</p></div>" for part, label in PARTS.items()
    )
    return f"""{head}
<blockquote>{rich(texts["said"])}</blockquote>
<p class="why {_kind(verdict)}">{rich(_sentence(why))}</p>
{_frames(one)}
<div class="parts">
{columns}
</div>
{_numbers(one)}
{_code(one)}
</section>"""


def _frames(one: Outcome) -> str:
    pictures = one.experiment.plot(one.runs)
    small = " small" if len(pictures) == 4 else ""
    frames = "".join(
        f"<figure><figcaption>{rich(picture['layout']['title']['text'])}</figcaption>"
        f"{legend(picture)}"
        f'<div class="plot" id="{one.experiment.name}-{i}"></div></figure>'
        for i, picture in enumerate(pictures)
    )
    return f'<div class="pictures{small}">{frames}</div>'


def _numbers(one: Outcome) -> str:
    seeds = f"{len(one.seeds)} seed{'s' * (len(one.seeds) != 1)}"
    tables = "\n".join(
        f'<h3>{rich(name)}</h3><div class="scroll"><table><thead><tr>'
        + "".join(f"<th>{rich(column)}</th>" for column in header)
        + "</tr></thead><tbody>"
        + "".join("<tr>" + "".join(f"<td>{rich(c)}</td>" for c in row) + "</tr>" for row in rows)
        + "</tbody></table></div>"
        for name, header, rows in shown_tables(one)
    )
    return (
        f"<details><summary>The numbers: mean ± standard deviation over {seeds}</summary>\n"
        f'{tables}\n<p class="small soft">Every figure of every seed: '
        f"<code>data/{one.experiment.name}-*.csv</code></p></details>"
    )


def _code(one: Outcome) -> str:
    size = {"full": "", "quick": " --quick"}.get(one.size, "")
    rule = (one.experiment.verdict.__doc__ or "").strip()
    source = escape(inspect.getsource(one.experiment.measure))
    return (
        "<details><summary>Repeat it</summary>\n"
        f"<pre><code>levelhead lab {one.experiment.name}{size}</code></pre>\n"
        f"<p>How the verdict is read off the figures: {rich(rule)} What is measured, from "
        f"<code>levelhead/lab/{one.experiment.name}.py</code>:</p>\n"
        f"<pre><code>{source}</code></pre></details>"
    )


def _footer(outcomes: Sequence[Outcome]) -> str:
    sizes = sorted({one.size for one in outcomes})
    return (
        f"<p>Made by levelhead {__version__}, size {', '.join(sizes)}: "
        "<code>levelhead lab</code> makes it again. Beside this page: <code>results.json</code>, "
        "<code>timings.json</code> and <code>data/</code>, all figures as CSV.</p>"
        "<p>“Holds” means: as stated, in the setting it is stated for. “Holds partly”: in some of "
        "the settings that it covers, not in others; the section says which.</p>"
    )


def _sentence(why: str) -> str:
    return why[:1].upper() + why[1:]


def _lettered(spec: Any) -> Any:
    """The same subscripts in a picture's labels; its title stands above it on the page."""
    if isinstance(spec, dict):
        return {name: _lettered(value) for name, value in spec.items()}
    if isinstance(spec, list):
        return [_lettered(value) for value in spec]
    return rich(spec) if isinstance(spec, str) and "_" in spec else spec


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
