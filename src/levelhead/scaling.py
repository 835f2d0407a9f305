"""The scale rules: by what to multiply the scores, as named functions.

>>> import levelhead as lh
>>> lh.scaling.sqrt_dk(64), lh.scaling.dk(64)
(0.125, 0.015625)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ._health.numbers import rough

ScaleRule = Callable[[int, int | None], float]


def sqrt_dk(d_k: int, d_model: int | None = None) -> float:
    """1/√d_k, the standard: keeps the variance of q·k at 1 when q and k have unit variance.

    >>> import levelhead as lh
    >>> lh.scaling.sqrt_dk(64)
    0.125

    d_k:     the dimension of one head's queries and keys
    d_model: not used
    """
    return 1.0 / math.sqrt(_positive("d_k", d_k))


def none(d_k: int, d_model: int | None = None) -> float:
    """No scaling: the standard deviation of q·k grows as √d_k.

    >>> import levelhead as lh
    >>> lh.scaling.none(64)
    1.0
    """
    return 1.0


def dk(d_k: int, d_model: int | None = None) -> float:
    """1/d_k: right where q and k are aligned rather than independent, for q·k then grows as d_k.

    >>> import levelhead as lh
    >>> lh.scaling.dk(64)
    0.015625
    """
    return 1.0 / _positive("d_k", d_k)


def sqrt_dmodel(d_k: int, d_model: int | None = None) -> float:
    """1/√d_model: the width of the model instead of the head's, a common slip.

    >>> import levelhead as lh
    >>> lh.scaling.sqrt_dmodel(64, 1024)
    0.03125
    """
    if d_model is None:
        raise ValueError("d_model is needed by the scale rule 'sqrt_dmodel', got None")
    return 1.0 / math.sqrt(_positive("d_model", d_model))


SCALE_RULES: dict[str, ScaleRule] = {
    "sqrt_dk": sqrt_dk,
    "none": none,
    "dk": dk,
    "sqrt_dmodel": sqrt_dmodel,
}
FORMULAS = {"sqrt_dk": "1/√d_k", "none": "none", "dk": "1/d_k", "sqrt_dmodel": "1/√d_model"}
OTHER, UNKNOWN = "other", "unknown"
SAME = 1e-3  # scales that differ by less are the same: a dtype of 16 bits may have rounded one


def scale_rule(name: str) -> ScaleRule:
    """The rule of that name: a function of (d_k, d_model) that gives the factor for the scores.

    >>> import levelhead as lh
    >>> lh.scaling.scale_rule("sqrt_dk")(256, None)
    0.0625

    name: one of SCALE_RULES
    """
    try:
        return SCALE_RULES[name]
    except KeyError:
        raise ValueError(
            f"scale rule must be one of {', '.join(SCALE_RULES)}; got {name!r}"
        ) from None


class ScaleInUse(NamedTuple):
    """The scale that a layer multiplies its scores by, and the rule behind it.

    rule:    a name of SCALE_RULES, "other", or "unknown" where the scale cannot be known
    scale:   the number itself
    d_k:     the dimension of one head's queries and keys
    d_model: the width of the model
    """

    rule: str
    scale: float | None
    d_k: int
    d_model: int | None = None

    @property
    def factor(self) -> float:
        """The scale relative to 1/√d_k; NaN where it is unknown."""
        if self.rule == UNKNOWN or self.scale is None:
            return math.nan
        return self.scale / sqrt_dk(self.d_k)

    @property
    def words(self) -> str:
        """The rule as people write it, or the number and how it stands to 1/√d_k."""
        if self.rule == UNKNOWN or self.scale is None:
            return "not known"
        if self.rule == OTHER:
            times = "of" if abs(self.factor) < 1 else "times"
            return f"{rough(self.scale)}, which is {rough(self.factor)} {times} 1/√d_k"
        return FORMULAS[self.rule]


def in_use(scale: float | None, d_k: int, d_model: int | None = None) -> ScaleInUse:
    """The rule that gives a scale; of several that do, the first in SCALE_RULES.

    >>> import levelhead as lh
    >>> lh.scaling.in_use(0.051, d_k=32, d_model=384).words
    '1/√d_model'
    >>> lh.scaling.in_use(0.043, d_k=32, d_model=384).words
    '0.043, which is 0.24 of 1/√d_k'

    scale:   what the products of queries and keys are multiplied by; None if that is not known
    d_k:     the dimension of one head's queries and keys
    d_model: the width of the model; None if that is not known
    """
    if scale is None or not math.isfinite(scale) or d_k < 1:
        return ScaleInUse(UNKNOWN, scale, d_k, d_model)
    for name, rule in SCALE_RULES.items():
        known = name != "sqrt_dmodel" or d_model
        if known and math.isclose(scale, rule(d_k, d_model), rel_tol=SAME):
            return ScaleInUse(name, scale, d_k, d_model)
    return ScaleInUse(OTHER, scale, d_k, d_model)


def _positive(name: str, size: int) -> int:
    if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    return size
