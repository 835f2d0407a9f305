"""The judge: the only place that says what the numbers of a head mean.

It applies the table of verdicts to all heads of a model at once, and makes words only for those
who ask: a watch judges every recorded step.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import numbers
from .findings import HEAD, LAYER, MODEL, Fact, Finding, worst_first
from .numbers import Spoken, number
from .sampling import PATTERN_KEYS
from .statistics import Floats, statistics_of
from .verdicts import (
    HEALTHY,
    LEVELS,
    LOUD,
    MODEL_VERDICTS,
    PATTERNS,
    SHARP,
    SHORT,
    SPREAD,
    VERDICTS,
    Case,
    Limit,
    Rule,
    Thresholds,
    Verdict,
    explained,
    ranked,
)

if TYPE_CHECKING:
    from ..scaling import ScaleInUse
    from .health import GradHealth, Health, PerHead

_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt}
_NAMED = 4  # layers in a sentence
_ROWS = 4  # sampled of a sequence; of fewer, some have a key or a distance in common by chance
_INFO, _NO_LEVEL = LEVELS.index("info"), len(LEVELS)

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Evidence:
    """What the judge may look at: a model at one moment, layer by layer.

    health:    layer → Health of shape (heads,)
    gradients: layer → GradHealth, for layers whose backward ran
    course:    what the course of the training says at that moment (`History.findings`); None if it
               is not known, as in a checkup
    scales:    layer → the scale rule in use
    trains:    whether that course is of a training, which may say why a head is sharp
    """

    health: Mapping[str, Health]
    gradients: Mapping[str, GradHealth] = field(default_factory=dict)
    course: tuple[Finding, ...] | None = None
    scales: Mapping[str, ScaleInUse] = field(default_factory=dict)
    trains: bool = True


def judge(evidence: Evidence, thresholds: Thresholds | None = None) -> dict[str, Judgement]:
    """The verdicts of every head, layer by layer.

    >>> import numpy as np, levelhead as lh
    >>> q = 200 * np.eye(16)[None]
    >>> health = lh.reference(q, q, q, return_health=True).health
    >>> judged = judge(Evidence({"layers.0": health}))["layers.0"]
    >>> judged.names, judged.levels, judged[0].reason
    (['exploding'], ['critical'], 'the largest |score| is 10,000 (critical from 10,000)')
    """
    model = Heads(evidence, thresholds or Thresholds())
    return {layer: Judgement(model, heads) for layer, heads in model.places.items()}


def findings(evidence: Evidence, thresholds: Thresholds | None = None) -> list[Finding]:
    """All that there is to say, the worst first: of the model, of layers, of single heads."""
    heads = Heads(evidence, thresholds or Thresholds())
    found = wide_findings(heads)
    since = {finding.key: finding.since for finding in evidence.course or ()}
    for layer, place in heads.places.items():
        for verdict in Judgement(heads, place):
            if told := heads.told.get(place.start + verdict.head):
                found.append(told)
            elif verdict.verdict not in (HEALTHY, SHORT):
                own = heads.finding(layer, verdict)
                found.append(replace(own, since=since.get(own.key)))
    return worst_first(found)


def wide_findings(heads: Heads) -> list[Finding]:
    """Those of the model and of layers, the worst first."""
    course = [finding for finding in heads.evidence.course or () if finding.scope != HEAD]
    return worst_first([*course, *_choosing_nothing(heads), *_scales(heads)])


def _scales(heads: Heads) -> list[Finding]:
    """The scale rule in use, where it is not the usual one; a warning where it does harm."""
    used: dict[ScaleInUse, list[str]] = {}
    for layer, scale in heads.evidence.scales.items():
        if layer in heads.places:
            used.setdefault(scale, []).append(layer)
    harm = {scale: _harm(heads, scale, layers) for scale, layers in used.items()}
    odd = [scale for scale in used if scale.rule not in ("sqrt_dk", "unknown")]
    learned = [scale for scale in odd if scale.rule == "other" and not harm[scale]]
    groups = [[scale] for scale in odd]
    if len(learned) > _NAMED:  # as many as there are layers, perhaps
        groups = [[scale] for scale in odd if scale not in learned] + [learned]
    found = []
    for scales in groups:
        layers = [layer for scale in scales for layer in used[scale]]
        hurts = harm[scales[0]]
        everywhere = len(layers) == sum(map(len, used.values()))
        said = _scaled(scales, [] if everywhere else layers)
        found.append(
            Finding(
                scope=MODEL if everywhere else LAYER,
                name="scale",
                level="warning" if hurts else "info",
                reason=f"{said}; {hurts or 'no harm is seen'}",
                hint="multiply the scores by 1/√d_k"
                if hurts
                else "nothing if the model was meant so; if it was not, multiply by 1/√d_k",
                evidence=tuple(
                    Fact(
                        "scale, in units of 1/√d_k",
                        factor,
                        low=heads.at.scale_small,
                        high=heads.at.scale_off,
                        form=".3g",
                    )
                    for factor in _ends(scale.factor for scale in scales)
                ),
                layer=layers[0],
                heads=sum(heads.places[layer].stop - heads.places[layer].start for layer in layers),
                explained=explained("scale"),
            )
        )
    return found


def _harm(heads: Heads, scale: ScaleInUse, layers: list[str]) -> str:
    """What a scale does to the heads of its layers, if that is told as an illness; else ""."""
    told = {
        finding.name
        for finding in heads.evidence.course or ()
        if finding.is_loud
        and (finding.scope == MODEL or (finding.scope == LAYER and finding.layer in layers))
    }
    sharp = np.concatenate([heads.sharp[heads.places[layer]] for layer in layers])
    if scale.factor > heads.at.scale_off and told.intersection(SHARP):
        return "most heads are sharp" if sharp.mean() >= heads.at.most_heads else ""
    if scale.factor < heads.at.scale_small and "flat" in told:
        return "most heads give every key the same"
    return ""


def _ends(numbers: Iterable[float]) -> list[float]:
    """The smallest and the largest, or the only one."""
    return sorted({min(all_of := list(numbers)), max(all_of)})


def _scaled(scales: list[ScaleInUse], layers: list[str]) -> str:
    """What some layers scale by, in words; without any it is every layer."""
    where = f"in {', '.join(map(numbers.place, layers[:_NAMED]))}"
    where += f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
    times = " to ".join(number(each, ".3g") for each in _ends(scale.factor for scale in scales))
    times = f"{times} times 1/√d_k"
    if scales[0].rule == "none":
        nobody = f"{where} the scores are not scaled" if layers else "no layer scales the scores"
        return f"{nobody}, which is {times}"
    verb = f"{where} the scores are scaled by" if layers else "every layer scales by"
    if len(scales) > 1:
        return f"{verb} a number of its own, {times}"
    (scale,) = scales
    return f"{verb} {scale.words}" + ("" if scale.rule == "other" else f", {times}")


def _choosing_nothing(heads: Heads) -> list[Finding]:
    """That most heads are flat: normal in a new model, and nothing to call healthy."""
    told = any(finding.name == "flat" for finding in heads.evidence.course or ())
    if not heads.count or told:
        return []
    flat = heads.chosen == heads.order.index("uniform")
    many, judged = int(flat.sum()), int(heads.can_be_judged.sum())
    if not judged or many <= heads.at.most_heads * judged:
        return []
    rule = MODEL_VERDICTS["flat"]
    layer, head = heads.name_of(int(np.argmax(flat)))
    return [
        Finding(
            scope=MODEL,
            name="flat",
            level="info",
            reason=rule.reason.format(many=many, heads=judged, why="give every key the same"),
            hint=rule.hint,
            evidence=(Fact("flat heads", many / judged, high=heads.at.most_heads, form=".0%"),),
            layer=layer,
            head=head,
            heads=many,
            explained=explained("flat"),
        )
    ]


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
    """The verdicts of a layer's heads, by head. Only what is asked for is worked out."""

    def __init__(self, model: Heads, heads: slice) -> None:
        self._model, self._heads = model, heads

    def __len__(self) -> int:
        return int(self._heads.stop - self._heads.start)

    @property
    def names(self) -> list[str]:
        """The verdict of each head; "short" for one with too few keys to be judged."""
        return [self._model.order[rule] for rule in self._model.chosen[self._heads].tolist()]

    @property
    def levels(self) -> list[str]:
        """The level of each head's verdict."""
        return [LEVELS[level] for level in self._model.worst[self._heads].tolist()]

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """How bad each head's verdict is, by level, then by rule; smaller is worse."""
        worst, chosen = self._model.worst[self._heads], self._model.chosen[self._heads]
        return list(zip(worst.tolist(), chosen.tolist(), strict=True))

    def worst_first(self) -> list[int]:
        """All heads, those that could not be judged at the end."""
        return sorted(range(len(self)), key=self.severity)

    def severity(self, head: int) -> Severity:
        """How bad a head is: its rank, then how far the statistic of its verdict has gone."""
        at = self._heads.start + head
        level, order = int(self._model.worst[at]), int(self._model.chosen[at])
        return _severity(self._model.order[order], level, order, self.value(head))

    def value(self, head: int) -> float:
        """The statistic that a head's verdict rests on; NaN where it rests on none."""
        at = self._heads.start + head
        limit = self._model.rules[self._model.order[self._model.chosen[at]]].rests_on
        return math.nan if limit is None else float(self._model.values(limit.statistic)[at])

    def __iter__(self) -> Iterator[Verdict]:
        return (self[head] for head in range(len(self)))

    def __getitem__(self, head: int) -> Verdict:
        """A head's verdict in words."""
        if not 0 <= head < len(self):
            raise IndexError(f"head {head} of {len(self)}")
        model, at = self._model, self._heads.start + head
        pattern = model.pattern(at)
        if told := model.told.get(at):
            reason = f"{told.reason}. {told.forecast}" if told.forecast else told.reason
            also = model.holding(at, told.name)
            words = (reason, told.hint, also, pattern, told.benign)
            return Verdict(head, told.name, told.level, *words)
        name, level = model.order[model.chosen[at]], LEVELS[model.worst[at]]
        rule = model.rules[name]
        limits = rule.cases[model.cases[name][at]].limits
        limit = limits[0].at(model.at) if limits else math.nan
        reason = rule.reason.format_map(_Numbers(model, at, level, limit))
        also, benign = model.holding(at, name), model.benign(at, rule)
        hint = f"nothing to do: {benign}" if benign else rule.hint
        return Verdict(head, name, level, reason, hint, also, pattern, benign)


class _Numbers(dict[str, Any]):
    """What a reason may name: the level, the threshold that was passed, any statistic."""

    def __init__(self, model: Heads, at: int, level: str, limit: float) -> None:
        super().__init__(level=level, limit=Spoken(limit))
        self._model, self._at = model, at

    def __missing__(self, statistic: str) -> Spoken:
        return Spoken(self._model.values(statistic)[self._at])


class Heads:
    """All heads of all layers side by side: a statistic is one array, and so is a verdict.

    places: where the heads of each layer stand
    """

    def __init__(self, evidence: Evidence, at: Thresholds) -> None:
        self.at, self.rules = at, ranked()
        self.order = list(self.rules)
        self.places: dict[str, slice] = {}
        self.count = 0
        for layer, part in evidence.health.items():
            self.places[layer] = slice(self.count, self.count + part.shape[-1])
            self.count += part.shape[-1]
        self.evidence = evidence
        self._values: dict[str, Floats] = {}
        self._held: dict[str, Indices] = {}

    @cached_property
    def cases(self) -> dict[str, Indices]:
        """For each rule which of its cases applies to each head, -1 for none."""
        short = self._holds(SHORT) >= 0
        any_short, cases = bool(short.any()), {}
        for name, rule in self.rules.items():
            held = self._holds(name)
            if any_short and not rule.any_keys and name != SHORT:
                held = np.where(short, -1, held)
            if rule.unless:
                held = np.where(self._holds(rule.unless) >= 0, -1, held)
            cases[name] = held
        return cases

    def seen_in(self, course: tuple[Finding, ...]) -> Heads:
        """The same heads in the light of another course; what was worked out is kept."""
        if course == self.evidence.course:
            return self
        other = copy.copy(self)
        other.evidence = replace(self.evidence, course=course)
        for name in ("_verdicts", "unharmed"):
            other.__dict__.pop(name, None)
        return other

    @cached_property
    def _verdicts(self) -> tuple[Indices, Indices, dict[int, Finding]]:
        """Rule and level of each head, and those that the course says instead of a rule."""
        chosen, worst = np.zeros(self.count, np.int64), np.full(self.count, _NO_LEVEL)
        course = list(self._of_heads())
        for place, (name, rule) in enumerate(self.rules.items()):
            case = self.cases[name]
            if not case.size or case.max() < 0:  # usually
                continue
            # The case of -1, none, takes the last entry.
            levels = np.array([*(LEVELS.index(case.level) for case in rule.cases), _NO_LEVEL])
            level = levels[case]
            if rule.is_sharp:
                level = np.where(self.explained | self.unharmed, np.maximum(level, _INFO), level)
            for at, finding in course:
                if finding.name == name and finding.benign:
                    level[at] = max(level[at], _INFO)
            chosen = np.where(level < worst, place, chosen)
            worst = np.minimum(level, worst)
        told = {}
        for at, finding in course:
            rank = LEVELS.index(finding.level), self.order.index(finding.name)
            if rank <= (worst[at], chosen[at]):
                (worst[at], chosen[at]), told[at] = rank, finding
        return chosen, worst, told

    def _of_heads(self) -> Iterator[tuple[int, Finding]]:
        """What the course says of single heads that no single moment shows, by their place.

        That is a forecast, or why it is benign. The rest of it the head's own numbers say, and as
        they are now.
        """
        for finding in self.evidence.course or ():
            shown = not (finding.forecast or finding.benign)
            if finding.scope == HEAD and not shown and finding.name in self.rules:
                place, head = self.places.get(finding.layer, slice(0, 0)), finding.head or 0
                if head < place.stop - place.start:
                    yield place.start + head, finding

    @property
    def told(self) -> dict[int, Finding]:
        """By their place the heads whose verdict is what the course says of them."""
        return self._verdicts[2]

    @cached_property
    def unharmed(self) -> Flags:
        """Which heads may be sharp: all is well with the training, or with all but other layers."""
        course = self.evidence.course
        fine = np.full(self.count, course is not None and self.evidence.trains)
        for finding in course or ():
            if finding.scope == MODEL:
                fine[:] = False
            elif finding.scope == LAYER and finding.layer in self.places:
                fine[self.places[finding.layer]] = False
        return fine

    def benign(self, at: int, rule: Rule) -> str:
        """Why a sharp head is no illness; "" where nothing has to be said."""
        if not rule.is_sharp:
            return ""
        if self.explained[at]:
            return f"it looks at {PATTERNS[self.pattern(at)].words}, a pattern that training makes"
        return (
            "nothing in the course of the training speaks against it" if self.unharmed[at] else ""
        )

    @property
    def chosen(self) -> Indices:
        """The place in `order` of each head's verdict."""
        return self._verdicts[0]

    @property
    def worst(self) -> Indices:
        """The place among LEVELS of its level."""
        return self._verdicts[1]

    @cached_property
    def may_be_loud(self) -> bool:
        """Whether some head passes the limits of a rule that asks to act: quicker than verdicts."""
        loud = (name for name, rule in self.rules.items() if rule.cases[0].level in LOUD)
        return any(self._holds(name).max(initial=-1) >= 0 for name in loud)

    @cached_property
    def sharp(self) -> Flags:
        """Which heads count among the sharp ones of a model, and no pattern explains it."""
        entropy, saturated = self.values("entropy_ratio"), self.values("saturated")
        sharp: Flags = self.can_be_judged & (entropy < self.at.sharp_typical)
        sharp &= saturated > self.at.saturated_typical
        return sharp & ~self.explained if sharp.any() else sharp

    @cached_property
    def can_be_judged(self) -> Flags:
        """Which heads see enough keys, and have only finite scores."""
        judged: Flags = (self._holds(SHORT) < 0) & (self.values("nonfinite_rows") == 0)
        return judged

    def pattern(self, at: int) -> str:
        """What a head looks at, a name of PATTERNS or SPREAD."""
        return next((name for name in PATTERNS if self._looks_at(name)[at]), SPREAD)

    def _looks_at(self, name: str) -> Flags:
        """Which heads have a pattern."""
        pattern = PATTERNS[name]
        found: Flags = self.values(pattern.statistic) > self.at.pattern
        return found & self._many_sampled if pattern.is_common and found.any() else found

    @cached_property
    def _many_sampled(self) -> Flags:
        """Which heads have sequences with enough rows to have something in common."""
        rows, sequences = self.values("rows"), self.values("pattern_sequences")
        is_full = self.values("pairs") == rows * self.values("widest_row")
        short = np.where(is_full, 0, PATTERN_KEYS - 1)  # the first rows of a causal head
        many: Flags = rows >= (_ROWS + short) * sequences
        return many

    @cached_property
    def explained(self) -> Flags:
        """Which heads look at something that training makes heads look at on purpose."""
        found = np.zeros(self.count, np.bool_)
        for name, pattern in reversed(PATTERNS.items()):  # the first that holds counts
            found[self._looks_at(name)] = pattern.benign
        return found

    def holding(self, at: int, but: str) -> tuple[str, ...]:
        """The other rules that hold for a head."""
        passed = (name for name, case in self.cases.items() if case[at] >= 0)
        return tuple(name for name in passed if name not in (but, HEALTHY, SHORT))

    def finding(self, layer: str, verdict: Verdict) -> Finding:
        """A head's verdict as a finding, with the numbers that it rests on."""
        at, rule = self.places[layer].start + verdict.head, self.rules[verdict.verdict]
        case = rule.cases[self.cases[verdict.verdict][at]]
        sources = [part for part in (self._health, self._gradients) if part is not None]
        table = {name: each for part in sources for name, each in statistics_of(type(part)).items()}
        facts = tuple(
            Fact(
                table[limit.statistic].label,
                float(self.values(limit.statistic)[at]),
                low=self._healthy(limit) if limit.sign == "<" else None,
                high=self._healthy(limit) if limit.sign != "<" else None,
            )
            for limit in case.limits
            if limit.statistic in table
        )
        return Finding(
            scope=HEAD,
            name=verdict.verdict,
            level=verdict.level,
            reason=verdict.reason,
            hint=verdict.hint,
            evidence=facts,
            layer=layer,
            head=verdict.head,
            pattern=verdict.pattern,
            benign=verdict.benign,
            explained=explained(verdict.verdict),
        )

    def _healthy(self, limit: Limit) -> float:
        """Up to where its statistic is healthy: no rule, however mild, asks for less."""
        limits = (
            each for rule in self.rules.values() for case in rule.cases for each in case.limits
        )
        same = [each.at(self.at) for each in limits if each[:2] == limit[:2]] or [limit.at(self.at)]
        # ">" and ">=" are the same here, as far as a reader can see.
        return max(same) if limit.sign == "<" else min(same)

    def named(self, at: int) -> tuple[str, Verdict]:
        """A head's layer and verdict, by its place."""
        layer, head = self.name_of(at)
        return layer, Judgement(self, self.places[layer])[head]

    def name_of(self, at: int) -> tuple[str, int]:
        """The layer of a head, and its number there."""
        for layer, place in self.places.items():
            if place.start <= at < place.stop:
                return layer, at - place.start
        raise IndexError(f"head {at} of {self.count}")

    def _holds(self, name: str) -> Indices:
        """Which case of a rule holds for each head: the first one; -1 for none."""
        if name not in self._held:
            found = np.full(self.count, -1)
            for place, case in reversed(list(enumerate(self.rules[name].cases))):
                np.putmask(found, self._passed(case), place)
            self._held[name] = found
        return self._held[name]

    def _passed(self, case: Case) -> Flags:
        """Which heads have passed all limits of a case."""
        passed = [
            _SIGNS[limit.sign](self.values(limit.statistic), limit.at(self.at))
            for limit in case.limits
        ]
        every: Flags = reduce(operator.and_, passed) if passed else np.ones(self.count, np.bool_)
        return every

    def values(self, statistic: str) -> Floats:
        """Of every head; NaN where the statistic is one of gradients that are not there."""
        if statistic not in self._values:
            source = self._health if hasattr(type(self._health), statistic) else self._gradients
            nothing = np.full(self.count, np.nan)
            self._values[statistic] = nothing if source is None else getattr(source, statistic)
        return self._values[statistic]

    @cached_property
    def _health(self) -> PerHead:
        parts = [part.over_batch() for part in self.evidence.health.values()]
        return type(parts[0])(np.concatenate([part.sums for part in parts]))

    @cached_property
    def _gradients(self) -> PerHead | None:
        """NaN for layers whose backward did not run."""
        parts = {layer: part.over_batch() for layer, part in self.evidence.gradients.items()}
        if not parts:
            return None
        kind = type(next(iter(parts.values())))
        sums = np.full((self.count, len(kind.COLUMNS)), np.nan)
        for layer in self.places.keys() & parts.keys():
            there, known = sums[self.places[layer]], parts[layer].sums
            heads = min(len(there), len(known))
            there[:heads] = known[:heads]
        return kind(sums)
