"""The table of statistics: whoever stores, sends, draws or explains one reads it here.

The bodies of `ForwardStatistics` and `BackwardStatistics` are the table. A line is a statistic and
also the attribute of `Health` or `GradHealth` that gives it, so editors and type checkers know it.
The columns that are summed stand in the order in which the engine writes them (csrc/problem.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing import Self

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

# Definitions, not thresholds: the sums are taken with them and cannot be judged anew.
LARGE_SCORE = 100.0
SATURATED_WEIGHT = 0.99


class HasSums(Protocol):
    """What statistics are taken from: sums of shape (..., heads, columns)."""

    @property
    def sums(self) -> Floats: ...


@dataclass(eq=False, kw_only=True)
class Statistic:
    """One number per head, and all that is to be known about it.

    label:      its name on pages
    meaning:    what it says, in one plain sentence
    definition: the formula, for docs/health.md
    bad:        which side is the worse one; "" where neither is
    heading:    of its column where a Health is printed; "" leaves it out
    tracked:    trackers such as TensorBoard get it unless others are asked for
    compared:   how one number is made of all heads where scales are compared; "" leaves it out
    form:       how such a number is written; with a percent sign it is a share
    chart:      the statistic whose chart shows it, for one that is no field: itself, or a field
    log:        its chart reads best with a logarithmic axis
    is_field:   it is one of FIELDS, which are stored, sent and shown everywhere
    column:     what is summed; by default it has the statistic's name, "" is none
    merge:      how the columns of two parts become one
    over:       the column that says over how many rows or pairs
    """

    label: str
    meaning: str
    definition: str = ""
    bad: Literal["high", "low", ""] = ""
    heading: str = ""
    tracked: bool = False
    compared: Literal["max", "mean", ""] = ""
    form: str = ".3g"
    chart: str = ""
    log: bool = False
    is_field: bool = True
    column: str | None = None
    merge: Literal["sum", "max", "min", "mean", "squares"] = "sum"
    over: str = ""
    name: str = field(init=False, default="")
    place: int = field(init=False, default=-1)  # of its column among all
    over_place: int = field(init=False, default=-1)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.__doc__ = name, self.meaning
        self.chart = self.chart or (name if self.is_field else "")
        self.column = name if self.column is None else self.column
        table = statistics_of(owner)
        columns = [each for each in table.values() if each.column != ""]
        self.place = columns.index(self) if self.column else -1
        self.over_place = table[self.over].place if self.over else -1

    def of(self, health: HasSums) -> Any:
        """Its values, from sums."""
        raise NotImplementedError

    def sql(self, table: str) -> str:
        """The same for the view of a store, from a table of sums."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class Count(Statistic):
    """A column of whole numbers."""

    @overload
    def __get__(self, health: None, owner: type) -> Self: ...
    @overload
    def __get__(self, health: HasSums, owner: type) -> Counts: ...
    def __get__(self, health: HasSums | None, owner: type) -> Self | Counts:
        return self if health is None else self.of(health)

    def of(self, health: HasSums) -> Any:
        """Integers; floats only where some are NaN, in a store from before the statistic was."""
        numbers = health.sums[..., self.place]
        return numbers if np.isnan(numbers).any() else numbers.astype(np.int64)

    def sql(self, table: str) -> str:
        return f"CAST({table}.{self.column} AS INTEGER)"


@dataclass(eq=False, kw_only=True)
class Number(Statistic):
    """Of floats."""

    @overload
    def __get__(self, health: None, owner: type) -> Self: ...
    @overload
    def __get__(self, health: HasSums, owner: type) -> Floats: ...
    def __get__(self, health: HasSums | None, owner: type) -> Self | Floats:
        return self if health is None else self.of(health)


@dataclass(eq=False, kw_only=True)
class Mean(Number):
    """A column divided by the number of rows or pairs that it was summed `over`."""

    def of(self, health: HasSums) -> Floats:
        return ratio(health.sums[..., self.place], health.sums[..., self.over_place])

    def sql(self, table: str) -> str:
        return f"{table}.{self.column} / {table}.{self.over}"


@dataclass(eq=False, kw_only=True)
class OfScores(Number):
    """A maximum, minimum or mean, kept as such; NaN where there is no score."""

    over: str = "score_count"

    def of(self, health: HasSums) -> Floats:
        seen = health.sums[..., self.over_place] > 0
        return np.where(seen, health.sums[..., self.place], np.nan)

    def sql(self, table: str) -> str:
        return f"CASE WHEN {table}.{self.over} > 0 THEN {table}.{self.column} END"


@dataclass(eq=False, kw_only=True)
class Norm(Number):
    """The root of a sum of squares."""

    def of(self, health: HasSums) -> Floats:
        return np.sqrt(health.sums[..., self.place])

    def sql(self, table: str) -> str:
        return f"sqrt({table}.{self.column})"


@dataclass(eq=False, kw_only=True)
class Derived(Number):
    """Made of other statistics.

    formula: of a Health or GradHealth
    query:   the same in SQL, {0} for the table; for fields
    """

    formula: Callable[[Any], Floats]
    query: str = ""
    column: str | None = ""

    def of(self, health: HasSums) -> Floats:
        return self.formula(health)

    def sql(self, table: str) -> str:
        return self.query.format(table)


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise quotient, NaN where the denominator is 0: nothing to average."""
    nothing = denominator == 0
    return np.where(nothing, np.nan, numerator / np.where(nothing, 1.0, denominator))


def statistics_of(kind: type) -> dict[str, Statistic]:
    """The statistics of Health or GradHealth by name, in the order of the table."""
    return {
        name: each
        for part in reversed(kind.__mro__)
        for name, each in vars(part).items()
        if isinstance(each, Statistic)
    }


class ForwardStatistics:
    """What `Health` says of a head."""

    __slots__ = ()

    rows = Count(
        label="rows",
        meaning="How many rows, one per query, there are.",
        definition="query rows",
    )
    pairs = Count(
        label="pairs",
        meaning="How many pairs of a query and a key are visible.",
        definition="visible pairs, those of nonfinite rows included",
    )
    empty_rows = Count(
        label="empty rows",
        meaning="How many rows see no key.",
        definition="rows that see no key",
        bad="high",
    )
    nonfinite_rows = Count(
        label="nonfinite rows",
        meaning="How many rows have a NaN or infinite score.",
        definition="rows with a NaN or infinite score, logit or sink",
        bad="high",
    )
    finite_rows = Count(
        label="finite rows",
        meaning="How many rows see a key and have only finite scores.",
        is_field=False,
    )
    choice_rows = Count(
        label="choice rows",
        meaning="How many finite rows see more than one key.",
        is_field=False,
    )
    widest_row = Count(
        label="widest row",
        meaning="The most keys that any row sees.",
        definition="the most keys that any row sees",
        merge="max",
    )
    score_count = Count(
        label="pairs of finite rows",
        meaning="How many visible pairs the finite rows have.",
        is_field=False,
    )
    score_max = OfScores(
        label="largest score",
        meaning="The largest score, scale·q·k before the softmax.",
        definition="the largest score",
        bad="high",
        tracked=True,
        log=True,
        merge="max",
    )
    score_min = OfScores(
        label="smallest score",
        meaning="The smallest score, scale·q·k before the softmax.",
        definition="the smallest score",
        bad="low",
        merge="min",
    )
    score_mean = OfScores(
        label="mean score",
        meaning="The mean of all visible scores.",
        definition="the mean of the scores",
        merge="mean",
    )
    score_var = Mean(
        label="score variance",
        meaning="The variance of the scores; 1/√d_k aims at 1.",
        definition="the variance of the scores",
        bad="high",
        over="score_count",
        column="score_m2",
        merge="squares",
    )
    largest_score = Derived(
        label="largest |score|",
        meaning="The size of the largest score, whatever its sign.",
        formula=lambda health: np.maximum(np.abs(health.score_max), np.abs(health.score_min)),
        bad="high",
        heading="|score|",
        compared="max",
        form=",.3g",
        chart="largest_score",
        log=True,
        is_field=False,
    )
    score_std = Derived(
        label="score standard deviation",
        meaning="The standard deviation of the scores; 1/√d_k aims at 1.",
        formula=lambda health: np.sqrt(health.score_var),
        bad="high",
        heading="std",
        chart="score_std",
        is_field=False,
    )
    large_scores = Mean(
        label="large scores",
        meaning="The share of scores beyond ±100.",
        definition="share with |score| > 100",
        bad="high",
        form=".0%",
        over="score_count",
    )
    entropy = Mean(
        label="entropy",
        meaning="How spread out the weights of a row are, in nats.",
        definition="H = −Σ p ln p, in nats",
        bad="low",
        over="finite_rows",
    )
    entropy_ratio = Mean(
        label="entropy ratio",
        meaning="The entropy as a share of its maximum: 1 is uniform, 0 is one-hot.",
        definition="H / ln n for n visible keys (n + 1 with sinks)",
        bad="low",
        heading="entropy",
        tracked=True,
        compared="mean",
        form=".2f",
        over="choice_rows",
    )
    effective_keys = Mean(
        label="effective keys",
        meaning="How many keys a row really looks at.",
        definition="1 / Σp²",
        bad="low",
        heading="eff.keys",
        over="finite_rows",
    )
    top_weight = Mean(
        label="top weight",
        meaning="The largest weight of a row, on average.",
        definition="max p",
        bad="high",
        heading="top",
        form=".0%",
        over="finite_rows",
    )
    saturated = Mean(
        label="saturated rows",
        meaning="The share of rows that put more than 0.99 of their weight on one key.",
        definition="share with max p > 0.99",
        bad="high",
        heading="saturat.",
        tracked=True,
        compared="mean",
        form=".0%",
        over="choice_rows",
    )
    signal = Mean(
        label="signal",
        meaning="How much the softmax lets through, the trace of its Jacobian: 0 is no gradient.",
        definition="tr J = 1 − Σp², J = diag(p) − ppᵀ the softmax's Jacobian",
        bad="low",
        heading="signal",
        tracked=True,
        compared="mean",
        form=".2f",
        over="finite_rows",
    )
    jacobian_norm = Mean(
        label="Jacobian norm",
        meaning="The Frobenius norm of the softmax's Jacobian.",
        definition="‖J‖_F, where ‖J‖_F² = Σp² − 2Σp³ + (Σp²)²",
        bad="low",
        over="finite_rows",
    )
    first_key = Mean(
        label="first key",
        meaning="The weight on the first key; much of it makes the head a sink.",
        definition="weight on key 0",
        bad="high",
        heading="1st key",
        form=".0%",
        over="choice_rows",
    )
    distance = Mean(
        label="distance",
        meaning="How far away, in positions, the keys are that a row looks at.",
        definition="Σ p·|i − j| in positions",
        over="finite_rows",
    )
    null_mass = Mean(
        label="null mass",
        meaning="The weight that a learned sink takes; 0 without one.",
        definition="weight that a learned sink takes; 0 without one",
        form=".0%",
        over="finite_rows",
    )
    pattern_sequences = Count(
        label="sequences",
        meaning="How many sequences, one per batch entry, have rows that patterns are taken from.",
        is_field=False,
    )
    self_weight = Mean(
        label="self weight",
        meaning="The weight on a query's own position.",
        definition="mean over sampled rows of p at j = i",
        form=".0%",
        over="pattern_sequences",
    )
    previous_weight = Mean(
        label="previous weight",
        meaning="The weight on the position before a query's own.",
        definition="mean over sampled rows of p at j = i − 1",
        form=".0%",
        over="pattern_sequences",
    )
    offset_weight = Mean(
        label="offset weight",
        meaning="The weight at the distance, ahead or behind, that gets the most.",
        definition="max over o of the mean over sampled rows of p at j = i − o",
        form=".0%",
        over="pattern_sequences",
    )
    shared_key = Mean(
        label="shared key",
        meaning="The weight on the key that gets the most from all rows, the first key aside.",
        definition="max over j > 0 of the mean over sampled rows of p at j",
        form=".0%",
        over="pattern_sequences",
    )


class BackwardStatistics:
    """What `GradHealth` says of a head."""

    __slots__ = ()

    weight_grad_norm = Norm(
        label="weight gradient",
        meaning="The norm of the loss's gradient with respect to the weights.",
        definition="‖dL/dP‖_F, by the weights before dropout",
        bad="low",
        heading="|dL/dP|",
        column="weight_grad_sq",
    )
    score_grad_norm = Norm(
        label="score gradient",
        meaning="The norm of the loss's gradient with respect to the scores.",
        definition="‖dL/dS‖_F, by the scores as they enter the softmax",
        bad="low",
        heading="|dL/dS|",
        column="score_grad_sq",
    )
    survival = Derived(
        label="gradient survival",
        meaning="The share of the gradient that gets through the softmax.",
        definition="score_grad_norm / weight_grad_norm; NaN where no gradient arrived",
        formula=lambda gradients: ratio(gradients.score_grad_norm, gradients.weight_grad_norm),
        query="sqrt({0}.score_grad_sq) / sqrt({0}.weight_grad_sq)",
        bad="low",
        heading="survival",
        tracked=True,
        form=".2g",
    )
