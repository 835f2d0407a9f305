"""What notebooks show of a Health, an AttentionResult, a Run and a watch.

Each is one small fragment of HTML that needs nothing else: no script, so that notebooks which are
not trusted show it too, no network, and no style for anything outside of it. Where even its own
styles are taken away, as on GitHub, a table of letters is left.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import numpy as np
from jinja2 import Environment, Template
from markupsafe import Markup

from .._health import Evidence, Finding, GradHealth, Health, Thresholds, findings, judge
from .._health.describe import (
    Head,
    at_steps,
    count,
    describe,
    headline,
    in_words,
    judged_as,
    needs_attention,
    plural,
    seen_in,
)
from .._health.findings import HEAD
from .._health.judge import severity
from .._health.numbers import number, place
from .._health.statistics import statistics_of
from .._health.verdicts import HEALTHY, SHORT, VERDICTS, ranked
from .._records import TRAINING
from ._names import cut, short_names
from ._page import asset
from ._sparkline import SIZE, Sparkline, sparkline
from ._tables import legend

if TYPE_CHECKING:
    from .._result import AttentionResult
    from ..store import Run
    from ..torch.watching import watch

# Of the map, so that the largest model's fragment is below 300 kB and fits a screen.
MOST_ROWS, MOST_COLUMNS, MOST_CELLS = 32, 64, 1024
MOST_WORST = 5
MOST_NUMBERS = 32  # heads
MOST_NOTES = 4
NO_STEP = "No step is recorded yet."
NO_CALL = "No attention call was seen so far."
NO_HEALTH = "Its health was not asked for: return_health=True adds it."
_UNKNOWN = {"verdict": SHORT, "level": "info", "reason": "there are no numbers to judge it by"}

Given = ParamSpec("Given")


def _never_raises(draw: Callable[Given, str]) -> Callable[Given, str]:
    """What cannot be drawn is told in its place: a traceback would hide what was computed."""

    @wraps(draw)
    def drawn(*given: Given.args, **named: Given.kwargs) -> str:
        try:
            return draw(*given, **named)
        except Exception as error:  # a store that is gone, for example
            return _fragment([], f"This cannot be shown: {type(error).__name__}: {error}")

    return drawn


@_never_raises
def health_html(health: Health) -> str:
    """A Health: the verdict, its heads, the worst of them."""
    return _of_health(health, ["Attention health"])


@_never_raises
def result_html(result: AttentionResult) -> str:
    """What was computed; and its health, if it was asked for."""
    given = result._asdict()
    health = given.pop("health")
    arrays = [
        (name, getattr(value, "dtype", type(value).__name__), tuple(getattr(value, "shape", ())))
        for name, value in given.items()
        if value is not None
    ]
    about = [type(result).__name__]
    if health is None:
        return _fragment(about, notes=[NO_HEALTH], arrays=arrays)
    return _of_health(health, about, arrays=arrays)


@_never_raises
def run_html(run: Run) -> str:
    """A run: how it is at its last step, and how the loss and the largest score came to it."""
    ended = [] if run.ended else ["still running, or cut off"]
    return _of_run(run, [run.name or "Run", *_counts(run), *ended], NO_STEP)


@_never_raises
def watch_html(run: Run, calls: int, is_on: bool, notes: Sequence[str]) -> str:
    """A watch: the same of what it has seen so far.

    notes: what the run does not say
    """
    state = "the watch is on" if is_on else "the watch is off"
    return _of_run(run, ["Watch", *_counts(run), plural(calls, "call"), state], NO_CALL, notes)


Shown = tuple[int, Any]


def show(watch: watch, last: Shown | None) -> Shown | None:
    """Draw a watch in a notebook, in place of what its cell shows already; elsewhere print it.

    last: what the last call returned: the cell, and a handle on what is shown there
    """
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:  # a terminal, with or without IPython
        print(watch.summary())
        return None
    from IPython.display import display  # noqa: PLC0415

    cell = shell.execution_count
    if last and last[0] == cell:
        last[1].update(watch)
        return last
    return cell, display(watch, display_id=True)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------ what a fragment says


def _of_health(health: Health, about: Sequence[str], **more: Any) -> str:
    layers = _judged(Evidence({"": health}))
    heads = layers[""]
    batch = [f"batch {health.shape[:-1]} taken together"] if len(health.shape) > 1 else []
    said = _headline(layers, found=findings(Evidence({"": health})))
    return _fragment([*about, *seen_in(heads), *batch], said, **_parts(layers), **more)


def _of_run(run: Run, about: Sequence[str], nothing: str, notes: Sequence[str] = ()) -> str:
    latest, steps = run.latest()
    if not steps:
        return _fragment(about, nothing, notes=notes, lines=_lines(run))
    layers = _judged(latest, run.thresholds)
    found = findings(latest, run.thresholds)
    said = _headline(layers, at_steps(steps), found)
    wide = [str(each) for each in found if each.scope != HEAD and each.is_loud]
    more = [f"and {len(wide) - MOST_NOTES} more"] if len(wide) > MOST_NOTES else []
    told = [f"The last alert: {run.alerts[-1]}"] if run.alerts else []
    notes = [*wide[:MOST_NOTES], *more, *told, *notes]
    return _fragment(about, said, notes=notes, lines=_lines(run), **_parts(layers))


def _counts(run: Run) -> list[str]:
    """What a run has, in a few words."""
    steps = f"{plural(len(run.steps), 'step')} recorded"
    if len(run.steps) > 1:
        steps += f", {min(run.steps):,} to {max(run.steps):,}"
    phase = [] if run.phase == TRAINING else [run.phase]
    model = [run.model] if run.model else []
    return [*model, *phase, steps, plural(len(run.alerts), "alert")]


def _judged(
    evidence: Evidence, thresholds: Thresholds | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Per layer its heads. One without numbers passes no limit; that does not make it healthy."""
    layers = describe(evidence, judge(evidence, thresholds))
    return {
        layer: [
            head | _UNKNOWN if head["verdict"] == HEALTHY and not _measured(head) else head
            for head in heads
        ]
        for layer, heads in layers.items()
    }


def _measured(head: Head) -> bool:
    """Whether there is any number to judge it by: a score, or a row of weights."""
    return head["largest_score"] is not None or head["entropy_ratio"] is not None


def _headline(
    layers: Mapping[str, Sequence[Head]], when: str = "", found: Sequence[Finding] = ()
) -> str:
    heads = [head for many in layers.values() for head in many]
    if not any(head["verdict"] != SHORT or _measured(head) for head in heads):
        return "There are no numbers to judge by."
    return headline(heads, when, found)


def _parts(layers: Mapping[str, Sequence[Head]]) -> dict[str, Any]:
    """The map of the heads, its legend, the worst heads, and the numbers."""
    short = dict(zip(layers, (place(cut(name)) for name in short_names([*layers])), strict=True))
    names = short if len(layers) > 1 or any(layers) else dict.fromkeys(layers, "")
    heads = [(names[layer], head) for layer, many in layers.items() for head in many]
    heads.sort(key=lambda entry: severity(entry[1]))
    drawn = _map(names, layers)
    shown = {cell.verdict for _, cells in drawn.rows for cell in cells}
    return {
        "worst_verdict": heads[0][1]["verdict"] if heads else "",
        "map": drawn if heads else None,
        "shown": [verdict for verdict in ranked() if verdict in shown],
        "worst": _worst(heads),
        "numbers": _numbers(heads),
    }


def _which(layer: str, head: Head) -> str:
    return f"{layer}, head {head['head']}" if layer else f"head {head['head']}"


# ------------------------------------------------------------ the map


class Cell(NamedTuple):
    """The worst head of those that a cell stands for, and what is to be said of it."""

    verdict: str
    words: str


class Map(NamedTuple):
    """Layers × heads. heads: above the columns; rows: each with its name."""

    heads: list[str]
    rows: list[tuple[str, list[Cell]]]
    label: str
    note: str


def _map(names: Mapping[str, str], layers: Mapping[str, Sequence[Head]]) -> Map:
    """A cell per head; in a large model one for several neighbours, which shows the worst."""
    widest = max(map(len, layers.values()), default=0)
    tall = math.ceil(len(layers) / MOST_ROWS) or 1
    rows = math.ceil(len(layers) / tall)
    wide = math.ceil(widest / min(MOST_COLUMNS, MOST_CELLS // max(rows, 1))) or 1
    columns = range(0, widest, wide)
    every = 1 if len(columns) <= 16 else 4
    lines = []
    for top in range(0, len(layers), tall):
        group = [*layers][top : top + tall]
        cells = [
            [(names[layer], head) for layer in group for head in layers[layer][at : at + wide]]
            for at in columns
        ]
        name = names[group[0]] + (f" … {names[group[-1]]}" if len(group) > 1 else "")
        lines.append((name, [_cell(cell) for cell in cells if cell]))
    size = [plural(many, noun) for many, noun in ((tall, "layer"), (wide, "head")) if many > 1]
    return Map(
        heads=["" if place % every else str(at) for place, at in enumerate(columns)],
        rows=lines,
        label="Verdicts of the heads, layer by layer",
        note=f"Each cell is the worst of {' × '.join(size)}." if size else "",
    )


def _cell(heads: Sequence[tuple[str, Head]]) -> Cell:
    layer, worst = min(heads, key=lambda entry: severity(entry[1]))
    return Cell(worst["verdict"], in_words(_which(layer, worst), worst))


# ------------------------------------------------------------ tables and lines


def _worst(heads: Sequence[tuple[str, Head]]) -> dict[str, Any]:
    """Those that need attention; if there are none, the strongest of each benign kind.

    heads: worst first
    """
    ill = [entry for entry in heads if needs_attention(entry[1])]
    kinds = [kind for kind in count(head for _, head in heads) if kind not in (HEALTHY, SHORT)]
    noted = [next(each for each in heads if each[1]["verdict"] == kind) for kind in kinds]
    listed = (ill or noted)[:MOST_WORST]
    more = len(ill) - len(listed) if ill else 0
    return {
        "title": "worst heads" if ill else "worth knowing",
        "rows": [(_which(layer, head), head, judged_as(head)) for layer, head in listed],
        "more": f"and {plural(more, 'head')} more that need attention" if more else "",
        "hints": [hint for hint, _ in groupby(head["hint"] for _, head in listed)] if ill else [],
    }


def _headings(kind: type[Health | GradHealth]) -> dict[str, tuple[str, str]]:
    """Heading and meaning of the statistics that are printed."""
    table = statistics_of(kind).items()
    return {name: (each.heading, each.meaning) for name, each in table if each.heading}


def _numbers(heads: Sequence[tuple[str, Head]]) -> dict[str, Any]:
    columns = {**_headings(Health), **_headings(GradHealth)}
    columns = {name: said for name, said in columns.items() if any(name in h for _, h in heads)}
    rows = [
        (
            _which(layer, head),
            [number(math.nan if head.get(x) is None else head[x], ".3g") for x in columns],
        )
        for layer, head in heads[:MOST_NUMBERS]
    ]
    left = f", the worst {MOST_NUMBERS} of {len(heads):,}" if len(heads) > MOST_NUMBERS else ""
    return {"title": f"In numbers{left}", "columns": [*columns.values()], "rows": rows}


def _lines(run: Run) -> list[Sparkline]:
    """The loss, or what was logged in its place, and the largest score of all heads."""
    name, (_, values) = next(iter(run.scalars.items()), ("", (None, ())))
    limit = run.thresholds.exploding
    lines = [
        sparkline(name, values),
        sparkline(
            Health.largest_score.label,
            _largest_scores(run),
            merge=np.max,
            log=True,
            limit=(limit, f"exploding from {number(limit)}"),
        ),
    ]
    return [line for line in lines if line is not None]


def _largest_scores(run: Run) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of all heads at each step."""
    places = {step: at for at, step in enumerate(dict.fromkeys(run.steps))}
    largest = np.full(len(places), np.nan)
    for layer in run.layers:
        steps, values = run.series(layer, Health.largest_score.name)
        at = [places[step] for step in steps.tolist()]
        np.fmax.at(largest, at, np.fmax.reduce(values, axis=1, initial=np.nan))
    return largest


# ------------------------------------------------------------ HTML


def _fragment(about: Sequence[str], headline: str = "", **parts: Any) -> str:
    return _template().render(
        about=about,
        headline=headline,
        style=Markup(asset("notebook.css") + _colours()),  # ours, not text from elsewhere
        inline={verdict: _inline(verdict) for verdict in VERDICTS},
        legend=legend(),
        size=SIZE,
        **parts,
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(asset("notebook.html"))


def _inline(verdict: str) -> str:
    """A verdict's colours in the element itself, where notebooks that are not trusted keep them."""
    colour = VERDICTS[verdict].colour
    return "" if colour is None else "background-color:{};color:{}".format(*colour.light)


def _colours() -> str:
    """The same for light and dark, stronger than those in the element."""
    return "".join(
        f".levelhead-fragment .lh-{name} {{"
        f" background-color: light-dark({rule.colour.light[0]}, {rule.colour.dark[0]}) !important;"
        f" color: light-dark({rule.colour.light[1]}, {rule.colour.dark[1]}) !important; }}\n"
        for name, rule in VERDICTS.items()
        if rule.colour is not None
    )
