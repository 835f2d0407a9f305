"""The judge: the only place that says what the numbers of a head mean.

It applies the table of verdicts to all heads of a model at once, and makes words only for those
who ask: a watch judges every recorded step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .numbers import Sentence
from .statistics import Floats
from .verdicts import HEALTHY, LEVELS, LOUD, SHORT, VERDICTS, Rule, Thresholds, Verdict, ranked

if TYPE_CHECKING:
    from .health import GradHealth, Health

_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt}
_NO_LEVEL = len(LEVELS)

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Evidence:
    """What the judge may look at: a model at one moment, layer by layer.

    health:    layer → Health of shape (heads,)
    gradients: layer → GradHealth, for layers whose backward ran

    All that is known of the model is here, although today's rules look at one head at a time. What
    else a rule should see, such as earlier steps, becomes a field.
    """

    health: Mapping[str, Health]
    gradients: Mapping[str, GradHealth] = field(default_factory=dict)


def judge(evidence: Evidence, thresholds: Thresholds | None = None) -> dict[str, Judgement]:
    """The verdicts of every head, layer by layer.

    >>> import numpy as np, levelhead as lh
    >>> q = 200 * np.eye(16)[None]
    >>> health = lh.reference(q, q, q, return_health=True).health
    >>> judged = judge(Evidence({"layers.0": health}))["layers.0"]
    >>> judged.names, judged.levels, judged[0].reason
    (['exploding'], ['critical'], 'the largest |score| is 10,000 (critical from 10,000)')
    """
    if not evidence.health:
        return {}
    at, heads, rules = thresholds or Thresholds(), _Heads(evidence), ranked()
    held = {name: _case(rule, heads, at) for name, rule in rules.items()}
    short = held[SHORT] >= 0
    cases, worst = [], np.full(heads.count, _NO_LEVEL)
    chosen = np.zeros(heads.count, np.int64)
    for place, (name, rule) in enumerate(rules.items()):
        excused = short & (not rule.any_keys and name != SHORT)
        if rule.unless:
            excused = excused | (held[rule.unless] >= 0)
        case = np.where(excused, -1, held[name])
        # The case of -1, none, takes the last entry.
        level = np.array([*(LEVELS.index(each.level) for each in rule.cases), _NO_LEVEL])[case]
        chosen = np.where(level < worst, place, chosen)
        worst = np.minimum(level, worst)
        cases.append(case)
    together = Judgement(heads, at, tuple(rules), np.array(cases), chosen, worst)
    return {layer: together.part(place) for layer, place in heads.places.items()}


Severity = tuple[bool, int, int, float]


def severity(head: Mapping[str, Any]) -> Severity:
    """Sorts heads worst first: by level, by verdict, then by how bad; the unjudged come last.

    head: verdict, level, and the statistic that the verdict rests on
    """
    name, limit = head["verdict"], VERDICTS[head["verdict"]].rests_on
    value = None if limit is None else head.get(limit.statistic)
    order = list(ranked()).index(name)
    return _severity(name, LEVELS.index(head["level"]), order, value)


def _severity(verdict: str, level: int, order: int, value: float | None) -> Severity:
    limit = VERDICTS[verdict].rests_on
    bad = 0.0 if limit is None or value is None or math.isnan(value) else value
    return verdict == SHORT, level, order, bad if limit and limit.sign == "<" else -bad


class Judgement:
    """The verdicts of a layer's heads, by head: names and levels at once, words on request."""

    def __init__(
        self,
        heads: _Heads,
        thresholds: Thresholds,
        rules: tuple[str, ...],
        cases: Indices,
        chosen: Indices,
        worst: Indices,
        first: int = 0,
    ) -> None:
        """cases: (rules, heads), which case of a rule holds, -1 for none; first: among `heads`."""
        self._heads, self._at, self._first = heads, thresholds, first
        self._rules, self._cases, self._chosen, self._worst = rules, cases, chosen, worst

    def part(self, place: slice) -> Judgement:
        """The heads at some place among all."""
        cases, chosen, worst = self._cases[:, place], self._chosen[place], self._worst[place]
        return Judgement(self._heads, self._at, self._rules, cases, chosen, worst, place.start)

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def names(self) -> list[str]:
        """The verdict of each head; "short" for one with too few keys to be judged."""
        return [self._rules[rule] for rule in self._chosen.tolist()]

    @property
    def levels(self) -> list[str]:
        """The level of each head's verdict."""
        return [LEVELS[level] for level in self._worst.tolist()]

    @property
    def loud(self) -> list[int]:
        """The heads that someone should look after, in no order."""
        return np.flatnonzero(self._worst < len(LOUD)).tolist()

    def worst_first(self) -> list[int]:
        """All heads, those that could not be judged at the end."""
        return sorted(range(len(self)), key=self.severity)

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """How bad each head's verdict is, by level, then by rule; smaller is worse."""
        return list(zip(self._worst.tolist(), self._chosen.tolist(), strict=True))

    def severity(self, head: int) -> Severity:
        """How bad a head is: its rank, then how far the statistic of its verdict has gone."""
        level, order = int(self._worst[head]), int(self._chosen[head])
        return _severity(self._rules[order], level, order, self.value(head))

    def value(self, head: int) -> float:
        """The statistic that a head's verdict rests on; NaN where it rests on none."""
        limit = VERDICTS[self._rules[self._chosen[head]]].rests_on
        return math.nan if limit is None else self._of(limit.statistic, head)

    def _of(self, statistic: str, head: int) -> float:
        return float(self._heads.values(statistic)[self._first + head])

    def __getitem__(self, head: int) -> Verdict:
        """A head's verdict in words."""
        name, level = self._rules[self._chosen[head]], LEVELS[self._worst[head]]
        rule = VERDICTS[name]
        limits = rule.cases[self._cases[self._chosen[head], head]].limits
        words = {"level": level, **({"limit": limits[0].at(self._at)} if limits else {})}
        named = {each for _, each, _, _ in Sentence().parse(rule.reason) if each} - set(words)
        numbers = {each: self._of(each, head) for each in named}
        also = tuple(
            other
            for other, case in zip(self._rules, self._cases[:, head].tolist(), strict=True)
            if case >= 0 and other not in (name, HEALTHY, SHORT)
        )
        reason = Sentence().format(rule.reason, **words, **numbers)
        return Verdict(head, name, level, reason, rule.hint, also)


class _Heads:
    """All heads of all layers side by side: a statistic is one array."""

    def __init__(self, evidence: Evidence) -> None:
        health = {layer: part.over_batch() for layer, part in evidence.health.items()}
        ends = np.cumsum([part.shape[0] for part in health.values()]).tolist()
        self.places = {
            layer: slice(end - part.shape[0], end)
            for (layer, part), end in zip(health.items(), ends, strict=True)
        }
        self.count: int = ends[-1]
        self._health = _joined(list(health.values()))
        self._gradients = self._of_gradients(evidence)
        self._values: dict[str, Floats] = {}

    def _of_gradients(self, evidence: Evidence) -> GradHealth | None:
        """NaN for layers whose backward did not run."""
        kind = next((type(part) for part in evidence.gradients.values()), None)
        if kind is None:
            return None
        sums = np.full((self.count, len(kind.COLUMNS)), np.nan)
        for layer, part in evidence.gradients.items():
            if layer in self.places:
                there, known = sums[self.places[layer]], part.over_batch().sums
                heads = min(len(there), len(known))
                there[:heads] = known[:heads]
        return kind(sums)

    def values(self, statistic: str) -> Floats:
        """Of every head; NaN where the statistic is one of gradients that are not there."""
        if statistic not in self._values:
            if hasattr(type(self._health), statistic):
                source: Health | GradHealth | None = self._health
            else:
                source = self._gradients
            nothing = np.full(self.count, np.nan)
            self._values[statistic] = nothing if source is None else getattr(source, statistic)
        return self._values[statistic]


def _joined(parts: list[Health]) -> Health:
    if len(parts) == 1:
        return parts[0]
    return type(parts[0])(np.concatenate([part.sums for part in parts]))


def _case(rule: Rule, heads: _Heads, at: Thresholds) -> Indices:
    """Which case of a rule holds for each head: the first one; -1 for none."""
    found = np.full(heads.count, -1)
    for place, case in reversed(list(enumerate(rule.cases))):
        holds = np.ones(heads.count, np.bool_)
        for limit in case.limits:
            holds &= _SIGNS[limit.sign](heads.values(limit.statistic), limit.at(at))
        found[holds] = place
    return found
