"""The page: all answers on one screen, then every claim, pictures first and its text folded."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from .. import __version__
from ..explore import PARTS as PLAYABLE
from ..explore import playable
from ..report import packed_plotly, page
from ._experiment import NOT_RUN, reason, verdict_words
from ._plot import Spec
from ._results import Outcome, paragraphs
from ._tables import shown_tables

MARKS = {"holds": "●", "holds partly": "◐", "does not hold": "○", NOT_RUN: "–"}
TALLY = {  # one claim, several claims
    "holds": ("holds", "hold"),
    "holds partly": ("is partly true", "are partly true"),
    "does not hold": ("does not hold", "do not hold"),
    NOT_RUN: ("was not run", "were not run"),
}
PARTS = {
    "done": "What was done",
    "found": "What came out",
    "limits": "Where it stops being true",
}
DASHES = {"dot": "2 3", "dash": "7 4"}


def lab_page(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as one HTML file that needs no network."""
    charts = {
        f"{one.experiment.name}-{i}": chart
        for one in outcomes
        for i, chart in enumerate(one.experiment.plot(one.runs) if one.runs else [])
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["math"] = math
    explorer = playable()
    body = environment.from_string(_asset("lab.html")).render(
        outcomes=[_shown(one, charts) for one in outcomes],
        tally=_tally(outcomes),
        marks=MARKS,
        words=verdict_words,
        dashes=DASHES,
        parts=PLAYABLE,
        explorer=explorer.body,
        plotly=packed_plotly() if charts else "",
        version=__version__,
        sizes=", ".join(sorted({one.size for one in outcomes})),
    )
    return page(
        "What people say about √d_k, measured",
        body,
        {"charts": _with_subscripts(charts), **explorer.data},
        explorer.script + _asset("lab.js"),
        explorer.style + _asset("lab.css"),
        plotly=False,
    )


def math(text: str) -> Markup:
    r"""Text as HTML, with real subscripts; lines do not break at an equals sign.

    >>> print(math("1/√d_k < 1, d_k = 64").replace("\xa0", "~"))
    1/√d<sub>k</sub> &lt; 1, d<sub>k</sub>~=~64
    """
    whole = re.sub(" ([=±]) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", escape(text, False))
    return Markup(re.sub(r"(?<![\w])([dWp])_(model|[a-z])(?![\w])", r"\1<sub>\2</sub>", whole))


def _tally(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(one.verdict()[0] for one in outcomes)
    return ", ".join(
        f"{counts[verdict]} {words[counts[verdict] > 1]}"
        for verdict, words in TALLY.items()
        if counts[verdict]
    )


def _shown(one: Outcome, charts: dict[str, Spec]) -> dict[str, Any]:
    """What the template needs to know of an outcome."""
    experiment, (verdict, why) = one.experiment, one.verdict()
    shown = {
        **{"name": experiment.name, "claim": experiment.claim, "title": experiment.title},
        **{"said": experiment.said, "verdict": verdict, "reason": reason(why)},
    }
    if not one.runs:
        return shown
    texts = one.texts()
    if one.clock():
        texts["found"] += f" By the clock, this time: {one.clock()}"
    return shown | {
        "said": texts["said"],
        "why": paragraphs(why[:1].upper() + why[1:]),
        "key": one.key_figures(),
        "part": next((p for p, part in PLAYABLE.items() if experiment.name in part.claims), None),
        "pictures": [
            {"id": name, "title": chart["layout"]["title"]["text"], "legend": _legend(chart)}
            for name, chart in charts.items()
            if name.rpartition("-")[0] == experiment.name
        ],
        "parts": {label: paragraphs(texts[part]) for part, label in PARTS.items()},
        "seeds": len(one.seeds),
        "tables": shown_tables(one),
        "option": {"full": "", "quick": " --quick"}.get(one.size, ""),
        "rule": (experiment.verdict.__doc__ or "").strip(),
        "source": inspect.getsource(experiment.measure),
    }


def _legend(chart: Spec) -> list[Spec]:
    """The traces with an entry of their own, as in lab.js; one alone needs no legend."""
    named = [t for t in chart["data"] if t.get("name") and t.get("showlegend", True)]
    return named if len(named) > 1 else []


def _with_subscripts(value: Any) -> Any:
    """The same subscripts in a chart's labels."""
    if isinstance(value, dict):
        return {name: _with_subscripts(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_subscripts(item) for item in value]
    return str(math(value)) if isinstance(value, str) and "_" in value else value


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
