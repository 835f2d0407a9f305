"""Reading the mask functions of transformers: which of them are a band around the diagonal.

transformers describes a mask by nested closures. A closure is known by its code object, which all
that come from one factory share; what is not known is not guessed, and becomes a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

Band = tuple[int | None, int | None]
"""(left, right): a query at position p sees the keys p - left ... p + right; None is open."""

_AND: Any = and_masks(causal_mask_function).__code__
_LAST: Any = sliding_window_overlay(1).__code__
_AROUND: Any = sliding_window_bidirectional_overlay(1).__code__


def band(mask_function: Callable[..., Any]) -> Band | None:
    """The band of keys that a mask function shows; None if it is anything else."""
    if mask_function is causal_mask_function:
        return None, 0
    if mask_function is bidirectional_mask_function:
        return None, None
    code = getattr(mask_function, "__code__", None)
    if code is _AND:
        return _intersection([band(part) for part in _captured(mask_function, "mask_functions")])
    if code is _LAST or code is _AROUND:
        width = _captured(mask_function, "sliding_window")
        if type(width) is not int or width < 1:
            return None
        return (width - 1, None) if code is _LAST else (width, width)
    return None


def _captured(function: Any, name: str) -> Any:
    """The value of a variable that a closure has captured."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _intersection(bands: list[Band | None]) -> Band | None:
    left: int | None = None
    right: int | None = None
    for one in bands:
        if one is None:
            return None
        left, right = _smaller(left, one[0]), _smaller(right, one[1])
    return left, right


def _smaller(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)
