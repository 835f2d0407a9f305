"""Findings: what the judge has to say, of a head, a layer or the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .numbers import number, place, plain
from .verdicts import LEVELS, LOUD

HEAD, LAYER, MODEL = SCOPES = ("head", "layer", "model")
EXPLAINED = "docs/verdicts.md"
Key = tuple[str, str, str, int | None]  # scope, name, layer, head


@dataclass(frozen=True)
class Fact:
    """A number that a finding rests on, and where it would be healthy.

    >>> print(Fact("saturated rows", 0.61, high=0.3, form=".0%"))
    saturated rows 61% (healthy: at most 30%)
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    form: str = ""

    def __str__(self) -> str:
        low, high = (None if x is None else number(x, self.form) for x in (self.low, self.high))
        if low is not None and high is not None:
            healthy = f" (healthy: {low} to {high})"
        elif low is not None or high is not None:
            healthy = (
                f" (healthy: at least {low})" if low is not None else f" (healthy: at most {high})"
            )
        else:
            healthy = ""
        return f"{self.name} {number(self.value, self.form)}{healthy}"


@dataclass(frozen=True)
class Finding:
    """One thing that the judge has to say.

    scope:    "head", "layer" or "model"
    name:     what it is: a verdict, or a name of MODEL_VERDICTS
    level:    "critical", "error", "warning" (someone should act), "info" or "ok"
    reason:   why, in words with the numbers
    hint:     what to do
    evidence: the numbers, each with its healthy range
    layer, head: which one; of a layer or a model the worst head
    heads:    how many heads it is about
    pattern:  what the head looks at
    benign:   why it is no illness although it may look like one; "" if it is one
    since:    the step since which it has been so; None without a history
    forecast: what comes if it goes on; "" where nothing can be said
    explained: where to read more
    """

    scope: str
    name: str
    level: str
    reason: str
    hint: str
    evidence: tuple[Fact, ...] = ()
    layer: str = ""
    head: int | None = None
    heads: int = 1
    pattern: str = ""
    benign: str = ""
    since: int | None = None
    forecast: str = ""
    explained: str = field(default=EXPLAINED)

    @property
    def is_loud(self) -> bool:
        """Whether someone should act: a warning or worse."""
        return self.level in LOUD

    @property
    def key(self) -> Key:
        """What makes it the same finding at the next step."""
        if self.scope == MODEL:
            return self.scope, self.name, "", None
        return self.scope, self.name, self.layer, self.head if self.scope == HEAD else None

    def __str__(self) -> str:
        since = "" if self.since is None else f", since step {self.since:,}"
        said = f"{self.where}: {self.name} ({self.level}{since}); {self.reason}."
        for more in (self.forecast, self.benign and f"Benign: {self.benign}"):
            said += f" {more}." if more else ""
        return f"{said} What to do: {self.hint}." if self.is_loud else said

    @property
    def where(self) -> str:
        """Its place, in words."""
        if self.scope == MODEL:
            return "the model"
        layer = place(self.layer)
        return layer if self.scope == LAYER else f"{layer}, head {self.head}"

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; `from_dict` takes it back."""
        found: dict[str, Any] = plain(asdict(self))
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Finding:
        """As `to_dict` gave it; what this version does not know is left out."""
        facts = (_known(Fact, fact) for fact in found.get("evidence", ()))
        evidence = (
            Fact(**fact | {"value": math.nan}) if fact["value"] is None else Fact(**fact)
            for fact in facts
        )
        return cls(**_known(cls, found) | {"evidence": tuple(evidence)})


def _known(kind: type[Fact | Finding], found: Mapping[str, Any]) -> dict[str, Any]:
    """What of a file this version has a field for."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in found.items() if name in names}


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By level; those of the model before those of layers and heads."""
    return sorted(
        findings, key=lambda each: (LEVELS.index(each.level), SCOPES[::-1].index(each.scope))
    )
