"""Numbers for people, and for JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def number(value: float, form: str = "") -> str:
    """A number as it stands in a sentence or a table.

    >>> number(19154.03), number(0.05), number(0.123456, ".2g"), number(float("nan"))
    ('19,154', '0.05', '0.12', '-')

    form: as `format` takes it; by default four digits, and thousands apart
    """
    if math.isnan(value):
        return "-"
    return format(float(value), form or (",.0f" if abs(value) >= 1_000 else ".4g"))


def rough(value: float) -> str:
    """A number of which two digits say enough; a large one is written out.

    >>> rough(0.2433), rough(300), rough(12345.6)
    ('0.24', '300', '12,346')
    """
    return number(value, ".2g" if abs(value) < 99.5 else ",.0f")


class Spoken(float):
    """A number that stands in a formatted sentence as `number` writes it.

    >>> "{} of {:.1%}".format(Spoken(12345.6), Spoken(0.5))
    '12,346 of 50.0%'
    """

    def __format__(self, form: str) -> str:
        return number(self, form)


def plain(value: Any, digits: int | None = None) -> Any:
    """The same for JSON: Python's types, and None for NaN and infinity, which JSON does not have.

    >>> plain({"entropy": [0.51234, float("nan")], "rows": 3}, digits=2)
    {'entropy': [0.51, None], 'rows': 3}

    digits: how many significant ones to keep of a float
    """
    if isinstance(value, dict):
        return {name: plain(each, digits) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, digits) for each in value]
    if isinstance(value, np.generic):
        return plain(value.item(), digits)
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and digits is None:
            objects = value.astype(object)  # all at once: pages have a million of them
            objects[~np.isfinite(value)] = None
            return objects.tolist()
        return value.tolist() if value.dtype.kind in "iub" else plain(value.tolist(), digits)
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")


def place(layer: str) -> str:
    """A layer by its name; calls that no submodule makes have none."""
    return layer or "outside any submodule"
