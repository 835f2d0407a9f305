"""What other scales would make of a model: how far they move it from what it learned, and where to.

Another scale is not judged as if it were a model of its own. A head that parks its weight on the
first key is benign because training made it so; the same numbers at a scale that the model has
never seen are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._health import Health
from .._health.describe import Head
from .._health.numbers import plain
from .._health.statistics import Statistic, statistics_of
from .._health.verdicts import SHORT
from ..scaling import FORMULAS, in_use

# From how much moved weight on another scale is how bad, a rule of thumb. `python -m
# benchmarks.scales` prints what it rests on: of 27 small models, each run at 12 other scales, none
# got more than 1 % of its answers wrong below 0.05, half of them did between 0.2 and 0.3, and all
# of them from 0.3 on. The demo's embeddings keep a cosine of 0.998 with 0.05 moved, 0.9 with 0.25
# and 0.6 to 0.8 from 0.4 on.
MOVED = {"error": 0.3, "warning": 0.2, "info": 0.05}
AS_TRAINED, TOO_SHARP, TOO_FLAT = "as trained", "too sharp", "too flat"
IN_USE = "as_trained"  # in the place of a rule: the scale that the model was trained with
MIXED = "mixed"  # layers follow different rules

# Multiples of the scale in use that a page's slider is judged at, beside the rules: eight a decade.
SLIDER = tuple(float(f"{10 ** (place / 8):.2g}") for place in range(-10, 11) if place)

# Where the statistics look as if the scale in use were a slip: most rows saturated without any,
# hardly a choice left with the model's width. This is information: models that learned their task
# with such a scale may look the same.
SLIPS = {"none": ("saturated", 0.5), "sqrt_dmodel": ("entropy_ratio", 0.9)}

Layer = Mapping[str, Any]


def compared() -> list[Statistic]:
    """What scales are compared by, beside the weight that they move."""
    return [each for each in statistics_of(Health).values() if each.compared]


def mean(heads: Sequence[Head], name: str) -> float:
    """Over the heads that have a number; NaN where none has."""
    values = _values(heads, name)
    return sum(values) / len(values) if values else math.nan


def _values(heads: Sequence[Head], name: str) -> list[float]:
    return [head[name] for head in heads if head[name] is not None]


def scale_words(layer: Layer) -> str:
    """The scale that a layer uses, in words."""
    return in_use(layer["scale"], layer["d_k"], layer["d_model"]).words


def what_if(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """The whole model at each scale: the one in use first, then by how little weight they move."""
    rules, words = {layer["scale_rule"] for layer in layers}, {scale_words(each) for each in layers}
    rule = rules.pop() if len(rules) == 1 else MIXED
    shown = words.pop() if len(words) == 1 else f"{len(words)} different scales"
    used = {
        **{"rule": IN_USE, "follows": rule, "words": shown},
        **{"weight_moved": 0.0, "output_changed": 0.0},
        **_numbers([head for layer in layers for head in layer["heads"]]),
        **{"direction": AS_TRAINED, "level": "ok", "why": "nothing: this is what it learned"},
        "sentence": f"As trained ({shown}).",
    }
    others = [
        _other(name, [h for each in layers for h in each["scales"][name]["heads"]], used)
        for name in layers[0]["scales"]
        if name != rule and all(name in layer["scales"] for layer in layers)
    ]
    others.sort(key=lambda scale: _known(scale["weight_moved"]))
    found: list[dict[str, Any]] = plain([used, *others])
    return found


def _numbers(heads: Sequence[Head]) -> dict[str, float]:
    """One number for all heads, of each statistic that scales are compared by."""
    return {
        each.name: max(_values(heads, each.name), default=math.nan)
        if each.compared == "max"
        else mean(heads, each.name)
        for each in compared()
    }


def _other(name: str, heads: Sequence[Head], used: Mapping[str, Any]) -> dict[str, Any]:
    """The model at another scale, beside the one in use."""
    moved, numbers = mean(heads, "weight_moved"), _numbers(heads)
    level = level_of(moved)
    sharp = numbers["entropy_ratio"] < used["entropy_ratio"]
    direction = AS_TRAINED if level == "ok" else TOO_SHARP if sharp else TOO_FLAT
    end = "" if level == "ok" else f": {direction}"
    if level == "ok":
        why = "hardly anything changes"
    elif sharp and numbers["saturated"] > used["saturated"] + 0.1:
        now, before = (_share(each["saturated"]) for each in (numbers, used))
        why = f"{now} of the rows saturate ({before} as trained)"
    else:
        now, before = (f"{each['entropy_ratio']:.2f}" for each in (numbers, used))
        why = f"the entropy ratio {'falls' if sharp else 'rises'} from {before} to {now}"
    return {
        **{"rule": name, "words": words_of(name), "weight_moved": moved},
        **{"output_changed": mean(heads, "output_changed")},
        **numbers,
        **{"direction": direction, "level": level, "why": why},
        "sentence": f"{with_scale(name)}: {_share(moved)} of the weight moves, {why}{end}.",
    }


def factor_name(factor: float) -> str:
    """What a multiple of the scale in use is called."""
    return f"x{factor:g}"


def words_of(name: str) -> str:
    """A rule, or a multiple of the scale in use, as people write it."""
    return FORMULAS.get(name) or f"{name[1:]} times the scale"


def with_scale(name: str) -> str:
    """How a sentence about it begins."""
    return "Without the scale" if name == "none" else f"With {words_of(name)}"


def level_of(moved: float) -> str:
    """How bad it is if so much of the weight moves."""
    return next((level for level, least in MOVED.items() if moved >= least), "ok")


def _known(moved: float) -> float:
    return 0.0 if math.isnan(moved) else moved


def _share(value: float) -> str:
    return "none" if value == 0 else "under 1%" if _known(value) < 0.01 else f"{value:.0%}"


def scale_findings(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """What should be known of the scale in use: layers where it looks like a slip."""
    return [finding for rule in SLIPS for finding in _slip(rule, layers)]


def _slip(rule: str, layers: Sequence[Layer]) -> Iterator[dict[str, Any]]:
    statistic, limit = SLIPS[rule]
    concerned = [layer for layer in layers if layer["scale_rule"] == rule]
    pairs = [
        (head, other)
        for layer in concerned
        for head, other in zip(layer["heads"], layer["scales"]["sqrt_dk"]["heads"], strict=True)
        if head["verdict"] != SHORT
    ]
    used, standard = ([pair[at] for pair in pairs] for at in (0, 1))
    now, then = mean(used, statistic), mean(standard, statistic)
    moved = mean(standard, "weight_moved")
    if not (now > limit and moved >= MOVED["warning"]):
        return
    reason = (
        f"there is no scale, and {now:.0%} of the rows are saturated; 1/√d_k would leave {then:.0%}"
        if rule == "none"
        else f"the scale is 1/√d_model, the model's width instead of the head's, and the entropy "
        f"is {now:.2f} of its maximum; with 1/√d_k it would be {then:.2f}"
    )
    yield {
        "name": "scale",
        "scope": "model" if len(concerned) == len(layers) else "layer",
        "layers": [layer["name"] for layer in concerned],
        "rule": rule,
        "level": "info",
        "evidence": {statistic: now, f"{statistic}_at_sqrt_dk": then, "weight_moved": moved},
        "reason": reason,
        "hint": "nothing if the model was trained like this; "
        "otherwise multiply its scores by 1/√d_k",
    }
