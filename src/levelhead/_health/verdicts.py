"""The table of verdicts: what the numbers of a head can mean, where that begins, and what to do.

Whoever names, colours, counts or explains a verdict reads it here. `judge` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from .._hints import shown
from .._options import number

LEVELS = ("critical", "error", "warning", "info", "ok")  # worst first
MARKS = dict(zip(LEVELS, "#E!-.", strict=True))  # of a head in a summary
LOUD = LEVELS[:3]  # someone should act


class Verdict(NamedTuple):
    """One head's verdict.

    head:    index of the head
    verdict: the name of the worst rule that holds, or "healthy"
    level:   "critical", "error", "warning", "info" or "ok"
    reason:  why, in words with the numbers
    hint:    what to do
    also:    names of the other rules that hold too
    pattern: what the head looks at, a name of PATTERNS
    benign:  why it is no illness although it may look like one; "" where nothing has to be said
    """

    head: int
    verdict: str
    level: str
    reason: str
    hint: str
    also: tuple[str, ...] = ()
    pattern: str = ""
    benign: str = ""


def _from(value: float, meaning: str, source: str) -> Any:
    return field(default=value, metadata={"meaning": meaning, "source": source})


_STUDY = "the study, docs/verdicts.md"


@dataclass(frozen=True)
class Thresholds:
    """Where each verdict begins. `health.verdicts(sink=0.5)` changes one of them."""

    large: float = _from(100.0, "a large |score|", "QK-clip caps scores there, arXiv 2507.20534")
    exploding: float = _from(
        1_000.0, "an exploding |score|", "the loss is worse near 1e3, arXiv 2309.14322"
    )
    exploding_critical: float = _from(
        10_000.0, "the same, critical", "every run past 1e4 diverged, arXiv 2309.14322"
    )
    saturated: float = _from(
        0.5,
        "share of saturated rows of a saturated head",
        "ours: such a row passes 4 % of the gradient at most, docs/health.md",
    )
    collapsed: float = _from(
        0.05,
        "entropy ratio of a collapsed head",
        "entropy collapse precedes divergence, arXiv 2303.06296",
    )
    uniform_entropy: float = _from(
        0.99, "entropy ratio of a uniform head", "ours: within 1 % of uniform"
    )
    uniform_score_std: float = _from(
        0.15,
        "standard deviation of a uniform head's scores",
        "ours: too flat for a larger scale to be the cure",
    )
    pattern: float = _from(
        0.5,
        "weight that makes a pattern",
        "ours: over half of the weight has one explanation",
    )
    sink: float = _from(
        0.3, "weight on the first key of a sink", "attention sinks are benign, arXiv 2410.10781"
    )
    sharp_entropy: float = _from(
        0.3, "entropy ratio of a sharp head", "ours: an observation, not an illness"
    )
    sharp_keys: float = _from(
        4.0, "effective keys of a sharp head", "ours: an observation, not an illness"
    )
    min_keys: float = _from(
        8,
        "keys that some row must see",
        "ours: with fewer keys, entropy and saturation say little",
    )
    # Over time, and of many heads at once.
    sharp_typical: float = _from(
        0.25, "entropy ratio below which a head counts among the sharp ones of a model", _STUDY
    )
    saturated_typical: float = _from(0.2, "share of saturated rows from which it does", _STUDY)
    most_heads: float = _from(0.6, "share of the heads that is most of them", _STUDY)
    learned: float = _from(
        0.6, "share of the first loss that must be gone before heads may be sharp", _STUDY
    )
    begun: float = _from(0.06, "share of it that is gone where there is something to learn", _STUDY)
    partly: float = _from(0.12, "share of it that may be all that there was to learn", _STUDY)
    quickly: float = _from(0.06, "share of it that a model loses in 10 steps if it learns", _STUDY)
    creeping: float = _from(0.01, "the same of a model that is flat", _STUDY)
    rising: float = _from(
        0.05, "growth of a gradient that is no noise, within some 30 steps", _STUDY
    )
    fading: float = _from(
        0.15, "loss of the gradient on the weights where nothing is to be gained from them", _STUDY
    )
    faded: float = _from(
        0.9, "loss of it, since the start, in a model that has learned to ignore attention", _STUDY
    )
    grown: float = _from(
        0.25, "growth of it, since the start, in a flat model that something is wanted of", _STUDY
    )
    choking: float = _from(
        0.2, "loss of the share of it that gets through the softmax, within some 30 steps", _STUDY
    )
    demanded: float = _from(
        0.3, "growth of the gradient on the weights that is too much while the loss falls", _STUDY
    )
    growing: float = _from(
        1.0, "growth of the scores of a typical head, within some 30 steps", _STUDY
    )
    slipping: float = _from(
        0.15, "share of what the loss had gained that is lost while scores grow", _STUDY
    )
    lost: float = _from(0.2, "share of it that may be lost again", _STUDY)
    scale_off: float = _from(
        1.5,
        "times 1/√d_k from which a scale is too large",
        "ours: rules that people use are below it, no scale at all is above it from d_k = 3 on",
    )
    scale_small: float = _from(
        0.5, "times 1/√d_k below which a scale is too small", "ours: 1/d_k is, from d_k = 5 on"
    )
    flat_typical: float = _from(
        0.97, "entropy ratio above which a head counts among the flat ones of a model", _STUDY
    )
    settling: float = _from(10, "steps in which sharp heads and growing scores may settle", _STUDY)
    beginning: float = _from(
        100, "steps in which the loss of a model with sharp heads need not fall yet", _STUDY
    )
    patience: float = _from(10, "steps that something must last before it is told", _STUDY)
    flat_patience: float = _from(100, "steps that a model must be flat before it is told", _STUDY)
    forecast: float = _from(
        300, "steps ahead within which a head on course to explode is told", _STUDY
    )

    def changed(self, changes: Mapping[str, float]) -> Thresholds:
        """A copy with some thresholds changed; infinity switches one off."""
        if not changes:
            return self
        names = [each.name for each in fields(self)]
        if unknown := sorted(set(changes) - set(names)):
            raise TypeError(f"unknown threshold {unknown[0]!r}; there are: {', '.join(names)}")
        return replace(self, **{name: _number(name, value) for name, value in changes.items()})

    @classmethod
    def stored(cls, values: Mapping[str, float]) -> Thresholds:
        """Those of a file; names that this version does not have are left out."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def _number(name: str, value: Any) -> float:
    found = number(f"threshold {name}", value)
    if math.isnan(found):
        raise ValueError(f"threshold {name}: expected a number, got {shown(value)}")
    return found


class Limit(NamedTuple):
    """A statistic on one side of a threshold.

    sign:      ">", ">=" or "<"
    threshold: a name of `Thresholds`, or a number that cannot be changed
    """

    statistic: str
    sign: str
    threshold: str | float

    def at(self, thresholds: Thresholds) -> float:
        """The threshold as a number."""
        name = self.threshold
        return float(getattr(thresholds, name) if isinstance(name, str) else name)


class Case(NamedTuple):
    """A level, and the limits that must all be passed for it."""

    level: str
    limits: tuple[Limit, ...] = ()


class Pattern(NamedTuple):
    """What a head looks at: a statistic of sampled rows that passes the threshold `pattern`.

    words:  "looks at …"
    benign: training makes such heads on purpose, so it explains why a head is sharp
    is_common: it is whatever the rows of a sequence happen to have in common, so that it takes some
    """

    statistic: str
    words: str
    benign: bool
    is_common: bool = False


# The first that holds names the head; one without any of them spreads its weight or chooses by
# content.
PATTERNS: dict[str, Pattern] = {
    "self": Pattern("self_weight", "its own position", benign=True),
    "previous": Pattern("previous_weight", "the position before", benign=True),
    "offset": Pattern("offset_weight", "a fixed distance", benign=True, is_common=True),
    "first key": Pattern("first_key", "the first key", benign=True),
    "shared key": Pattern(
        "shared_key", "one key that all rows share", benign=False, is_common=True
    ),
}
SPREAD = "spread"


class Colour(NamedTuple):
    """(fill, ink) for light pages and for dark ones; terminals take the light pair."""

    light: tuple[str, str]
    dark: tuple[str, str]


class Rule(NamedTuple):
    """One verdict. It rests on the statistic of its first limit.

    cases:   worst first; the first that holds gives the level. One without limits always holds
    letter:  stands for it where there is no room, and carries it where colour cannot
    colour:  None is none
    meaning: in a few words
    reason:  why a head has it: {name} is a statistic of the head, {level} the level, {limit}
             the threshold that it passed
    hint:    what to do
    code:    the same as a line of Python, where there is one
    unless:  a verdict that excuses this one
    is_sharp: it says that few keys get the weight: information where the head's pattern or the
             course of the training explains it
    any_keys: it is given to heads that see too few keys to be judged, too
    """

    cases: tuple[Case, ...]
    letter: str
    colour: Colour | None
    meaning: str
    reason: str
    hint: str
    code: str = ""
    unless: str = ""
    is_sharp: bool = False
    any_keys: bool = False

    @property
    def rests_on(self) -> Limit | None:
        """The limit whose statistic says how bad it is; None where there is none."""
        limits = self.cases[0].limits
        return limits[0] if limits else None


HEALTHY, SHORT = "healthy", "short"
_QK_NORM = "q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])"
_SCALED = "F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)"
_WATCH = 'levelhead.torch.watch(model, store="run.db")'
_TAME = "QK-norm, QK-clip (threshold 100), a softcap, or a smaller learning rate on q and k"

# Of verdicts with the same level the first one here is the worse one.
VERDICTS: dict[str, Rule] = {
    "nonfinite": Rule(
        cases=(Case("critical", (Limit("nonfinite_rows", ">", 0),)),),
        letter="N",
        colour=Colour(light=("#7b1fa2", "#ffffff"), dark=("#b565dc", "#1d0528")),
        meaning="NaN or infinite scores",
        reason="{nonfinite_rows} of {rows} rows have a NaN or infinite score",
        hint="look for NaN or infinity in q and k, or an overflow in their dtype",
        code="assert q.isfinite().all() and k.isfinite().all()",
        any_keys=True,
    ),
    "exploding": Rule(
        cases=(
            Case("critical", (Limit("largest_score", ">=", "exploding_critical"),)),
            Case("error", (Limit("largest_score", ">=", "exploding"),)),
        ),
        letter="X",
        colour=Colour(light=("#c62828", "#ffffff"), dark=("#ef6461", "#2b0303")),
        meaning="scores so large that training tends to break",
        reason="the largest |score| is {largest_score} ({level} from {limit})",
        hint=f"tame the scores: {_TAME}",
        code=_QK_NORM,
    ),
    "saturated": Rule(
        cases=(Case("warning", (Limit("saturated", ">", "saturated"),)),),
        letter="S",
        colour=Colour(light=("#ee8f45", "#341600"), dark=("#e08a45", "#2b1200")),
        meaning="one key takes all; hardly any gradient",
        reason="{saturated:.0%} of the rows put over 0.99 of their weight on one key; "
        "the softmax passes a signal of {signal:.2g}",
        hint=f"check the scale (1/sqrt(d_k)), then tame the scores: {_TAME}",
        code=_SCALED,
        unless="sink",
        is_sharp=True,
    ),
    "collapsed": Rule(
        cases=(Case("warning", (Limit("entropy_ratio", "<", "collapsed"),)),),
        letter="C",
        colour=Colour(light=("#f2c94c", "#3a2c00"), dark=("#dcb83f", "#2b2000")),
        meaning="almost no choice is left",
        reason="the entropy is {entropy_ratio:.2g} of its maximum (below {limit})",
        hint=f"check the scale (1/sqrt(d_k)), then tame the scores: {_TAME}",
        code=_SCALED,
        unless="sink",
        is_sharp=True,
    ),
    "large": Rule(
        cases=(Case("info", (Limit("largest_score", ">=", "large"),)),),
        letter="l",
        colour=Colour(light=("#f6d5d3", "#7a1f1c"), dark=("#4a2422", "#f3bab6")),
        meaning="large scores; harmless as long as they do not grow",
        reason="the largest |score| is {largest_score} (large from {limit})",
        hint="watch whether it grows; low precision rounds such scores coarsely",
        code=_WATCH,
    ),
    "uniform": Rule(
        cases=(
            Case(
                "info",
                (
                    Limit("entropy_ratio", ">", "uniform_entropy"),
                    Limit("score_std", "<", "uniform_score_std"),
                ),
            ),
        ),
        letter="u",
        colour=Colour(light=("#e3dccb", "#5b4f35"), dark=("#3d382b", "#d9cdae")),
        meaning="every key gets the same; normal in a new model",
        reason="the entropy is {entropy_ratio:.4f} of its maximum and the scores' standard "
        "deviation {score_std:.2g}: the head selects nothing",
        hint="normal at initialisation; in long contexts try log-n scaling",
        code="q = q * math.log(k.shape[-2]) / math.log(512)  # 512: the length in training",
    ),
    "sink": Rule(
        cases=(Case("info", (Limit("first_key", ">", "sink"),)),),
        letter="k",
        colour=Colour(light=("#d3d8f6", "#2f3a8c"), dark=("#2c3468", "#c0c8fb")),
        meaning="parks its weight on the first key; benign",
        reason="{first_key:.0%} of the weight goes to the first key",
        hint="benign: a head parks there the weight it does not need",
    ),
    "sharp": Rule(
        cases=(
            Case("info", (Limit("entropy_ratio", "<", "sharp_entropy"),)),
            Case("info", (Limit("effective_keys", "<", "sharp_keys"),)),
        ),
        letter="p",
        colour=Colour(light=("#cde5ea", "#1b4d5a"), dark=("#1d3d48", "#a9d8e6")),
        meaning="looks at few keys; copying heads do",
        reason="a row looks at {effective_keys:.2g} keys; the entropy is {entropy_ratio:.2g} of "
        "its maximum",
        hint="nothing: copying heads look like this; watch the trend",
        code=_WATCH,
    ),
    HEALTHY: Rule(
        cases=(Case("ok"),),
        letter="·",
        colour=Colour(light=("#dcead9", "#38593a"), dark=("#25382a", "#b2d3ae")),
        meaning="spread enough to choose and to learn",
        reason="the entropy is {entropy_ratio:.2g} of its maximum, the signal {signal:.2g}",
        hint="nothing to do",
    ),
    SHORT: Rule(
        cases=(Case("info", (Limit("widest_row", "<", "min_keys"),)),),
        letter="–",
        colour=None,
        meaning="not judged: rows too short to say anything",
        reason="no row sees {limit} keys or more, which is too little to judge by",
        hint="check it on a longer input",
    ),
}


class ModelVerdict(NamedTuple):
    """What many heads at once can mean, over time. `History` has the rules.

    reason: {many} of {heads} heads, {why}; whether they {turned} so, or "are"
    """

    level: str
    meaning: str
    reason: str
    hint: str


def explained(name: str) -> str:
    """Where a finding is explained."""
    on_its_own = name in ("nonfinite", "exploding", "scale", *MODEL_VERDICTS)
    return f"docs/verdicts.md#{name}" if on_its_own else "docs/health.md#verdicts"


SHARP = ("saturated", "collapsing")  # those that say that heads are sharp and should not be

MODEL_VERDICTS: dict[str, ModelVerdict] = {
    "saturated": ModelVerdict(
        level="warning",
        meaning="most heads are sharp although little has been learned",
        reason="{many} of {heads} heads are sharp, and {why}",
        hint=f"check the scale (1/sqrt(d_k)), then tame the scores: {_TAME}",
    ),
    "collapsing": ModelVerdict(
        level="warning",
        meaning="heads turn sharp, or scores grow, and training suffers",
        reason="{many} of {heads} heads {turned} sharp, and {why}",
        hint=f"go back to a checkpoint and tame the scores: {_TAME}",
    ),
    "flat": ModelVerdict(
        level="warning",
        meaning="most heads choose nothing; normal in a new model",
        reason="{many} of {heads} heads {why}",
        hint="normal at the start; if it lasts, check the scale and the learning rate",
    ),
}


def ranked() -> dict[str, Rule]:
    """The verdicts worst first: by their worst level, then by their place in the table."""

    def rank(entry: tuple[str, Rule]) -> tuple[bool, int]:
        name, rule = entry
        return name == SHORT, min(LEVELS.index(case.level) for case in rule.cases)

    return dict(sorted(VERDICTS.items(), key=rank))


def failable() -> tuple[str, ...]:
    """Every verdict that says something, worst first."""
    return tuple(name for name in ranked() if name not in (HEALTHY, SHORT))
