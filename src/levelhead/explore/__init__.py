"""The page that makes √d_k playable: one HTML file, no server, no network.

The page computes everything but two things while the reader moves its controls: the training runs
and the pretrained model's scores come from data/, where `measure.py` puts them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from .._files import write_whole
from ..lab import experiments
from ..report import asset, page

__all__ = ["PARTS", "Part", "Playable", "explorer_page", "playable", "write_explorer"]


@dataclass(frozen=True)
class Part:
    """A part of the page: its title in the contents, and the claims that it makes playable."""

    title: str
    claims: tuple[str, ...]


# In their order; each has a script of its name, and core.js has what they share.
PARTS = {
    "steps": Part("Five steps", ("five_steps",)),
    "scores": Part(
        "Variance, softmax, gradient",
        ("variance", "divisor", "saturation", "jacobian", "gradients"),
    ),
    "width": Part("Heads against width", ("head_width",)),
    "rivals": Part("Additive and cosine", ("additive", "cosine")),
    "training": Part("Training", ("training",)),
    "pronoun": Part("What is “it”?", ("pronoun",)),
    "confusions": Part("Four confusions", ("confusions",)),
}


@dataclass(frozen=True)
class Playable:
    """The parts for another page, from the same files.

    body:   a section for each part, with its name as id
    style:  for what stands in an element of class "play", and nothing else
    script: a function, explorer(), that brings the parts to life once they are in the page
    data:   what they expect in the page's data
    """

    body: Markup
    style: str
    script: str
    data: dict[str, Any]


def write_explorer(path: str | Path) -> None:
    """Write the page; it is the same every time, byte for byte.

    >>> write_explorer("explore.html")  # doctest: +SKIP

    path: where to; its folder must exist
    """
    write_whole(Path(path), explorer_page())


def explorer_page() -> str:
    """The page as text."""
    title = "Why √d_k? Move it and see"
    return page(title, _body(whole=True), _data(), _script(), _asset("explore.css"), plotly=False)


def playable() -> Playable:
    """The parts for another page."""
    style = _asset("explore.css").replace(":root", "&")
    return Playable(
        body=_body(whole=False),
        style=f".play {{\n{style}}}\n",
        script=f"function explorer() {{\n{_script()}\n}}\n",
        data=_data(),
    )


def _body(whole: bool) -> Markup:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_asset("explore.html"))
    return Markup(template.render(claim=_claim, parts=PARTS, whole=whole))


def _script() -> str:
    return "\n".join([asset("paint.js"), *(_asset(f"{name}.js") for name in ("core", *PARTS))])


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


def _data() -> dict[str, Any]:
    folder = files(__package__) / "data"
    return {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("training", "pronoun")
    }
