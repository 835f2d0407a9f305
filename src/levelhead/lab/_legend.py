"""The legend above a picture: HTML, so that it wraps as text does and never covers the plot.

Each entry is a button; lab.js lets it hide and show its line.
"""

from __future__ import annotations

from ._plot import Spec
from ._rich import rich

_DASHES = {"dot": "2 3", "dash": "7 4"}


def legend(picture: Spec) -> str:
    """An entry for every trace with a name, if there are two or more; else nothing to see."""
    named = [trace for trace in picture["data"] if _entry(trace)]
    buttons = "".join(
        f'<button type="button" aria-pressed="true">{_mark(trace)}'
        f"<span>{rich(trace['name'])}</span></button>"
        for trace in (named if len(named) > 1 else [])
    )
    return f'<div class="legend">{buttons}</div>'


def _entry(trace: Spec) -> bool:
    """Whether a trace has an entry of its own; lab.js asks the same."""
    return bool(trace.get("name")) and trace.get("showlegend", True)


def _mark(trace: Spec) -> str:
    """What the trace looks like, in small."""
    line, mode = trace.get("line", {}), trace.get("mode", "lines")
    colour = line.get("color") or trace["marker"]["color"]
    if trace.get("type") == "bar":
        shapes = f'<rect x="6" width="12" height="12" rx="2" fill="{colour}"/>'
    else:
        dashes = _DASHES.get(line.get("dash", "solid"), "none")
        stroke = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        shapes = f'<path d="M0 6h24" {stroke}/>' if "lines" in mode else ""
        shapes += f'<circle cx="12" cy="6" r="3.5" fill="{colour}"/>' if "markers" in mode else ""
    return f'<svg viewBox="0 0 24 12" width="24" height="12" aria-hidden="true">{shapes}</svg>'
