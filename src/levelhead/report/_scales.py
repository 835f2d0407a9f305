"""The scale in use and the other scales, as the terminal and the page tell of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .._health.describe import plural
from .._health.numbers import rough
from ..checkup._what_if import IN_USE, scale_words, with_scale
from ..scaling import UNKNOWN
from ._names import short_names

Result = Mapping[str, Any]
Scale = Mapping[str, Any]

ABOUT = "Nothing is trained anew: the more weight moves, the further it is from what was learned."
NOT_KNOWN = "The scale in use is not known, so it cannot be compared with other rules."
_HEADLINES = {
    "ok": "much the same as trained",
    "info": "not quite as trained, a little {}",
    "warning": "worse than as trained, {}",
    "error": "much worse than as trained, {}",
}
_IN_SHORT = {
    "ok": "",
    "info": "a little {}: ",
    "warning": "worse, {}: ",
    "error": "much worse, {}: ",
}
_FEW = 3  # layers, or different scales, that are named


def in_use(result: Result) -> Iterator[str]:
    """By what the layers multiply their scores, and what should be known about it."""
    names = short_names([layer["name"] for layer in result["layers"]])
    places: dict[str, list[str]] = {}
    for name, layer in zip(names, result["layers"], strict=True):
        places.setdefault(scale_words(layer), []).append(name)
    if len(places) == 1:
        (words,), many = places, len(names)
        yield f"Scale: {words}{f' in all {many} layers' if many > 1 else ''}."
    elif len(places) > _FEW:
        scales = [layer["scale"] for layer in result["layers"] if layer["scale"] is not None]
        ends = f"from {rough(min(scales))} to {rough(max(scales))}"
        yield f"Scale: {len(places)} different ones in {len(names)} layers, {ends}."
    else:
        parts = (
            f"{words} in {' and '.join(some) if len(some) <= _FEW else plural(len(some), 'layer')}"
            for words, some in places.items()
        )
        yield f"Scale: {'; '.join(parts)}."
    for finding in result["scale_findings"]:
        where = (
            "" if finding["scope"] == "model" else f" ({plural(len(finding['layers']), 'layer')})"
        )
        yield f"{finding['reason'][0].upper()}{finding['reason'][1:]}{where}. → {finding['hint']}"


def label(scale: Scale) -> str:
    """How a scale is called in a table."""
    words: str = scale["words"]
    # Of a number without a rule, how it stands to 1/√d_k is told above.
    return f"as trained ({words.partition(',')[0]})" if scale["rule"] == IN_USE else words


def headline(scale: Scale) -> str:
    """What a hurried reader takes along of another scale."""
    return f"{with_scale(scale['rule'])}: {_HEADLINES[scale['level']].format(scale['direction'])}."


def in_short(scale: Scale) -> tuple[str, str]:
    """The same for a table: how bad it is, and why."""
    return _IN_SHORT[scale["level"]].format(scale["direction"]), scale["why"]


def is_known(result: Result) -> bool:
    """Whether the scale in use is known in every layer."""
    return all(layer["scale_rule"] != UNKNOWN for layer in result["layers"])
