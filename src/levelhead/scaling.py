"""The scale rules: by what to multiply the scores, as named functions.

>>> import levelhead as lh
>>> lh.scaling.sqrt_dk(64), lh.scaling.dk(64)
(0.125, 0.015625)
"""

from __future__ import annotations

import math
from collections.abc import Callable

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


def _positive(name: str, size: int) -> int:
    if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    return size
