"""Plotly figures as plain data: the parts that the experiments' charts are made of.

Nothing here imports Plotly. Each scale has the same colour everywhere. Fonts, grid and background
are the page's, so that they can follow light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._health.numbers import plain

Spec = dict[str, Any]
Values = Sequence[Any] | NDArray[Any]

# Most people can tell them apart, on white and on black.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    *("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a78bfa", "#94a3b8"),
)
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, GREY)
COLOURS = {"sqrt_dk": BLUE, "none": RED, "dk": GREEN, "sqrt_dmodel": PURPLE}
NAMES = {"sqrt_dk": "1/√d_k", "none": "no scale", "dk": "1/d_k", "sqrt_dmodel": "1/√d_model"}


def band(
    name: str,
    x: Values,
    runs: NDArray[Any],
    colour: str,
    *,
    geometric: bool = False,
    **options: Any,
) -> list[Spec]:
    """A line through the means, with the range over the seeds (axis 0 of runs) as a band.

    geometric: use the geometric mean, for values that span many powers of ten
    """
    x = _list(x)
    low, high = runs.min(axis=0), runs.max(axis=0)
    mean = np.exp(np.log(runs).mean(axis=0)) if geometric else runs.mean(axis=0)
    edge = {"x": x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    group = {"legendgroup": name}
    return [
        {**edge, **group, "y": _list(low)},
        {**edge, **group, "y": _list(high), "fill": "tonexty", "fillcolor": faded(colour)},
        line(name, x, mean, colour, **group, **options),
    ]


def line(name: str, x: Values, y: NDArray[Any], colour: str, **options: Any) -> Spec:
    """A line with a dot at every measured point."""
    style = {"color": colour, "width": 2} | options.pop("line", {})
    return {
        **{"type": "scatter", "mode": "lines+markers", "name": name, "x": _list(x), "y": _list(y)},
        **{"line": style, "marker": {"color": colour, "size": 6}},
        **options,
    }


def guide(name: str, x: Values, y: Any, **options: Any) -> Spec:
    """A dotted line for what the claim or the theory predicts."""
    style = {"color": GREY, "width": 1.5, "dash": "dot"}
    y = np.broadcast_to(np.asarray(y, np.float64), (len(x),))
    base = {"type": "scatter", "mode": "lines", "name": name, "x": _list(x), "y": _list(y)}
    return {**base, "line": style, **options}


def axis(title: str, *, log: bool = False, ticks: Values = (), **options: Any) -> Spec:
    """An axis with its title; with ticks, labels are at these values only."""
    spec: Spec = {"title": {"text": title}}
    if log:
        spec |= {"type": "log", "exponentformat": "power"}
    if len(ticks):
        spec |= {"tickvals": _list(ticks), "ticktext": [f"{tick:g}" for tick in ticks]}
    return spec | options


def picture(title: str, data: Sequence[Spec], x: Spec, y: Spec, **layout: Any) -> Spec:
    """One chart of an experiment; the page arranges several of them."""
    return {
        "data": list(data),
        "layout": {"title": {"text": title}, "xaxis": x, "yaxis": y, **layout},
    }


def faded(colour: str, alpha: float = 0.18) -> str:
    """The colour, transparent."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _list(values: Values) -> list[Any]:
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return list(array.tolist())
    return list(plain(array, 5))
