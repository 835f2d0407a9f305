"""The page that makes √d_k playable: one HTML file, no server, no network.

The page computes everything but two things while the reader moves its controls: the training runs
and the pretrained model's scores come from data/, where `measure.py` puts them.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from .._files import write_whole
from ..lab import experiments
from ..report import asset, page

__all__ = ["explorer_page", "write_explorer"]

# The parts of the page, in their order; each file draws one. core.js has what they share.
SCRIPTS = ("core", "steps", "scores", "width", "rivals", "training", "pronoun", "confusions")


def write_explorer(path: str | Path) -> None:
    """Write the page; it is the same every time, byte for byte.

    >>> write_explorer("explore.html")  # doctest: +SKIP

    path: where to; its folder must exist
    """
    write_whole(Path(path), explorer_page())


def explorer_page() -> str:
    """The page as text."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    body = environment.from_string(_asset("explore.html")).render(claim=_claim)
    script = "\n".join([asset("paint.js"), *(_asset(f"{name}.js") for name in SCRIPTS)])
    data = {name: _data(name) for name in ("training", "pronoun")}
    return page(
        "Why √d_k? Move it and see", body, data, script, _asset("explore.css"), plotly=False
    )


def _claim(*names: str) -> Markup:
    """Who measured it: the claims of these experiments, and the command that repeats them.

    >>> print(_claim("variance"))
    claim 2 of the lab: <code>levelhead lab variance</code>
    """
    numbers = [str(experiments()[name].claim) for name in names]
    words = f"claim {numbers[0]}" if len(names) == 1 else f"claims {_listed(numbers)}"
    return Markup("{} of the lab: <code>levelhead lab {}</code>").format(words, " ".join(names))


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _data(name: str) -> Any:
    return json.loads((files(__package__) / "data" / f"{name}.json").read_text(encoding="utf-8"))
