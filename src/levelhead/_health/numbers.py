"""Numbers for people, and for JSON."""

from __future__ import annotations

import math
from string import Formatter
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
    return format(value, form or (",.0f" if abs(value) >= 1_000 else ".4g"))


class Sentence(Formatter):
    """str.format with numbers as `number` writes them."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return value if isinstance(value, str) else number(value, format_spec)


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
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and digits is None:
        return np.where(np.isfinite(value), value, None).tolist()  # pages have a million of them
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist(), digits)
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")
