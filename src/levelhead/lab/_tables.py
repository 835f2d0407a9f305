"""Figures as tables that people read."""

from __future__ import annotations

import math
import re

from ._figures import Array, powers, stack
from ._plot import NAMES
from ._results import Outcome

Table = tuple[str, list[str], list[list[str]]]


def shown_tables(one: Outcome) -> list[Table]:
    """Name, header and rows of each table that the experiment wants shown."""
    figures = stack(one.runs)
    tables = [name for name, value in figures.items() if isinstance(value, dict)]
    names = one.experiment.show or tables[:1]
    return [(_words(name), [*map(_words, figures[name])], _rows(figures[name])) for name in names]


def _words(name: str) -> str:
    """A column's name in words: top_weight is top weight, but W_q and d_k stay."""
    for rule, words in NAMES.items():
        name = name.removesuffix(f"_{rule}") + (f" {words}" if name.endswith(f"_{rule}") else "")
    return re.sub(r"(?<![^\W_])([dW])_|_", lambda found: f"{found[1]}_" if found[1] else " ", name)


def _rows(table: dict[str, Array]) -> list[list[str]]:
    columns = [[cell(values) for values in array.T] for array in table.values()]
    return [list(row) for row in zip(*columns, strict=True)]


def cell(values: Array) -> str:
    """One number over the seeds.

    >>> import numpy as np
    >>> cell(np.array([0.99, 1.01, 1.0])), cell(np.array([64.0, 64.0])), cell(np.array(["none"]))
    ('1.000 ± 0.010', '64', 'no scale')
    """
    if values.dtype.kind in "US":
        return NAMES.get(str(values[0]), str(values[0]))
    mean, std = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
    if math.isnan(mean):
        return "–"
    if std < 1e-6 * abs(mean) or std == 0:
        return powers(f"{mean:,.0f}" if mean == round(mean) and abs(mean) < 1e9 else f"{mean:.3g}")
    if not 1e-3 <= abs(mean) < 1e5 or std < 1e-4:
        return powers(f"{mean:.2g} ± {std:.1g}")
    digits = max(0, 1 - math.floor(math.log10(std)))
    return f"{mean:,.{digits}f} ± {std:,.{digits}f}"
