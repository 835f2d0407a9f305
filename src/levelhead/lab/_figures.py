"""Figures: what an experiment measures, one dict per seed, and how several seeds become one number.

A dict of figures holds plain numbers and tables. A table is a dict of columns, all of one length.
The name "timings" is reserved for what the clock says, which no seed can repeat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._health import numbers

Array = NDArray[Any]
Figures = dict[str, Any]
TIMINGS = "timings"

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_DIGITS = 6  # of a stored figure; the last bits of a float are no result


class Spread(float):
    """The mean over seeds, with its standard deviation and its range.

    >>> x = Spread([62.0, 64.0, 66.0])
    >>> f"{x:.1f} or {x:.1f±}"
    '64.0 or 64.0 ± 2.0'
    """

    std: float
    low: float
    high: float

    def __new__(cls, values: Iterable[float]) -> Spread:
        """Take one value per seed."""
        array = np.asarray(list(values), np.float64)
        self = super().__new__(cls, array.mean())
        self.std = float(array.std(ddof=1)) if array.size > 1 else 0.0
        self.low, self.high = float(array.min()), float(array.max())
        return self

    def __format__(self, spec: str) -> str:
        plain = spec.removesuffix("±")
        mean, std = format(float(self), plain), format(self.std, plain)
        # A spread that rounds to 0 says nothing.
        return mean if plain == spec or not re.search("[1-9]", std) else f"{mean} ± {std}"


def powers(text: str) -> str:
    """Numbers with an exponent as people write them.

    >>> powers("within 3e-07")
    'within 3·10⁻⁷'
    """
    return re.sub(
        r"(?<=\d)e([+-])0*(\d+)",
        lambda e: "·10" + (e[1].strip("+") + e[2]).translate(_SUPERSCRIPTS),
        text,
    )


def table(rows: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns."""
    listed = list(rows)
    return {name: [row[name] for row in listed] for name in listed[0]}


def stack(runs: Sequence[Figures]) -> dict[str, Any]:
    """The same figures with every number or column an array whose first axis is the seed.

    >>> stack([{"t": {"d": [1, 2]}, "x": 3.0}, {"t": {"d": [1, 2]}, "x": None}])["t"]["d"].shape
    (2, 2)
    """
    stacked: dict[str, Any] = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        stacked[name] = stack(values) if isinstance(value, dict) else _array(values)
    return stacked


def at(table: Mapping[str, Array], column: str, **where: Any) -> Spread:
    """One cell of a stacked table over the seeds, found by the values of other columns.

    >>> figures = stack([{"t": {"d": [1, 2], "x": [10.0, 20.0]}}])
    >>> at(figures["t"], "x", d=2)
    20.0
    """
    rows = np.logical_and.reduce([table[name][0] == value for name, value in where.items()])
    (row,) = np.flatnonzero(rows)
    return Spread(table[column][:, row])


def typical(table: Mapping[str, Array], column: str, **where: Any) -> float:
    """As `at`, but the geometric mean, for figures that span many powers of ten."""
    rows = np.logical_and.reduce([table[name][0] == value for name, value in where.items()])
    return float(np.exp(np.log(table[column][:, rows]).mean()))


def _array(values: list[Any]) -> Array:
    array = np.array(values)
    # None stands for NaN and infinity, which JSON does not have.
    return array if array.dtype.kind in "US" else np.array(values, np.float64)


def plain(value: Any) -> Any:
    """Figures as JSON takes them: NumPy's types made Python's, floats cut to six digits."""
    return numbers.plain(value, _DIGITS)


def summary(runs: Sequence[Figures]) -> Figures:
    """Figures over the seeds: mean, std, min and max of what was measured.

    >>> summary([{"d": 8, "x": 1.0}, {"d": 8, "x": 3.0}])
    {'d': 8, 'x': {'mean': 2.0, 'std': 1.41421, 'min': 1.0, 'max': 3.0}}

    What is the same for every seed, such as a setting, stays as it is.
    """
    found: Figures = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(value, dict):
            found[name] = summary(values)
        elif all(other == value for other in values):
            found[name] = value
        else:
            found[name] = plain(_statistics(_array(values)))
    return found


def _statistics(array: Array) -> dict[str, Array]:
    std = array.std(axis=0, ddof=1) if len(array) > 1 else np.zeros(array.shape[1:])
    return {
        "mean": array.mean(axis=0),
        "std": std,
        "min": array.min(axis=0),
        "max": array.max(axis=0),
    }
