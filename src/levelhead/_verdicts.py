"""What the numbers of a head mean: one verdict each, with its reason and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

LEVELS = ("critical", "error", "warning", "info", "ok")  # worst first


@dataclass(frozen=True)
class Thresholds:
    """Where each verdict begins. `health.verdicts(sink=0.5)` changes one of them."""

    # Kimi K2 (arXiv 2507.20534) clips scores at 100; past it they tend to keep growing.
    exploding_warning: float = 100.0
    # Loss is already worse near 1e3 (arXiv 2309.14322, small-scale proxies).
    exploding: float = 1_000.0
    # Every run past 1e4 diverged (the same paper).
    exploding_critical: float = 10_000.0
    # Share of rows with a weight p > 0.99. Such a row's Jacobian has a norm of 2p(1 - p) or less,
    # 4 % of the most a softmax can pass, which is 1/2.
    saturated: float = 0.5
    # Entropy collapse precedes divergence (arXiv 2303.06296).
    collapsed: float = 0.05
    # Ours: weights within 1 % of uniform, and scores too flat for a larger scale to be the cure.
    uniform_entropy: float = 0.99
    uniform_score_std: float = 0.15
    # Share of weight on the first key that makes a head a sink (arXiv 2410.10781).
    sink: float = 0.3
    # Ours: a head that looks at few keys; an observation, no illness.
    sharp_entropy: float = 0.3
    sharp_keys: float = 4.0
    # Ours: with fewer visible keys, entropy and saturation say little.
    min_keys: float = 8

    def changed(self, changes: Mapping[str, float]) -> Thresholds:
        """A copy with some thresholds changed."""
        names = [field.name for field in fields(self)]
        if unknown := sorted(set(changes) - set(names)):
            raise TypeError(f"unknown threshold {unknown[0]!r}; there are: {', '.join(names)}")
        return replace(self, **changes)


class Verdict(NamedTuple):
    """One head's verdict.

    head:    index of the head
    verdict: the name of the worst rule that holds, or "healthy"
    level:   "critical", "error", "warning", "info" or "ok"
    reason:  why, in words with the numbers
    hint:    what to do
    also:    names of the milder rules that hold too
    """

    head: int
    verdict: str
    level: str
    reason: str
    hint: str
    also: tuple[str, ...] = ()


class _Finding(NamedTuple):
    level: str
    badness: float  # orders heads with the same verdict and level; larger is worse
    reason: str


Head = Mapping[str, float]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1_000 else f"{x:.4g}"


def _is_sink(head: Head, at: Thresholds) -> bool:
    return head["first_key"] > at.sink


def _nonfinite(head: Head, at: Thresholds) -> _Finding | None:
    bad = head["nonfinite_rows"]
    if bad == 0:
        return None
    return _Finding(
        "critical", bad, f"{bad:.0f} of {head['rows']:.0f} rows have a NaN or infinite score"
    )


def _exploding(head: Head, at: Thresholds) -> _Finding | None:
    largest = max(abs(head["score_max"]), abs(head["score_min"]))
    for level, limit in (
        ("critical", at.exploding_critical),
        ("error", at.exploding),
        ("warning", at.exploding_warning),
    ):
        if largest >= limit:
            reason = f"the largest |score| is {_number(largest)} ({level} from {_number(limit)})"
            return _Finding(level, largest, reason)
    return None


def _saturated(head: Head, at: Thresholds) -> _Finding | None:
    share = head["saturated"]
    if not share > at.saturated or _is_sink(head, at):
        return None
    reason = (
        f"{share:.0%} of the rows put over 0.99 of their weight on one key; "
        f"the softmax passes a signal of {head['signal']:.2g}"
    )
    return _Finding("warning", share, reason)


def _collapsed(head: Head, at: Thresholds) -> _Finding | None:
    entropy = head["entropy_ratio"]
    if not entropy < at.collapsed or _is_sink(head, at):
        return None
    reason = f"the entropy is {entropy:.2g} of its maximum (below {at.collapsed:g})"
    return _Finding("warning", -entropy, reason)


def _uniform(head: Head, at: Thresholds) -> _Finding | None:
    entropy, std = head["entropy_ratio"], math.sqrt(head["score_var"])
    if not (entropy > at.uniform_entropy and std < at.uniform_score_std):
        return None
    reason = (
        f"the entropy is {entropy:.4f} of its maximum and the scores' standard deviation "
        f"{std:.2g}: the head selects nothing"
    )
    return _Finding("info", entropy, reason)


def _sink(head: Head, at: Thresholds) -> _Finding | None:
    share = head["first_key"]
    if not share > at.sink:
        return None
    return _Finding("info", share, f"{share:.0%} of the weight goes to the first key")


def _sharp(head: Head, at: Thresholds) -> _Finding | None:
    entropy, keys = head["entropy_ratio"], head["effective_keys"]
    if not (entropy < at.sharp_entropy or keys < at.sharp_keys):
        return None
    reason = f"a row looks at {keys:.2g} keys; the entropy is {entropy:.2g} of its maximum"
    return _Finding("info", -entropy, reason)


_TAME = "QK-norm, QK-clip (threshold 100), a softcap, or a smaller learning rate on q and k"

# In order of severity: no rule can find a level worse than one above it, so the first rule
# that holds is also the worst.
_RULES: tuple[tuple[str, Callable[[Head, Thresholds], _Finding | None], str], ...] = (
    ("nonfinite", _nonfinite, "look for NaN or infinity in q and k, or an overflow in their dtype"),
    ("exploding", _exploding, f"tame the scores: {_TAME}"),
    ("saturated", _saturated, f"check the scale (1/sqrt(d_k)), then tame the scores: {_TAME}"),
    ("collapsed", _collapsed, f"watch for divergence; a copying head is benign, else: {_TAME}"),
    ("uniform", _uniform, "normal at initialisation; in long contexts try log-n scaling"),
    ("sink", _sink, "benign: a head parks there the weight it does not need"),
    ("sharp", _sharp, "nothing: copying heads look like this; watch the trend"),
)
_ORDER = {name: place for place, (name, _, _) in enumerate(_RULES)} | {"healthy": len(_RULES)}


def judge(heads: Sequence[Head], at: Thresholds) -> list[Verdict]:
    """Verdicts worst first. A head that never sees min_keys keys is judged by nonfinite alone."""
    judged: list[tuple[float, Verdict]] = []
    for index, head in enumerate(heads):
        short = head["widest_row"] < at.min_keys
        found = [
            (name, finding, hint)
            for name, rule, hint in (_RULES[:1] if short else _RULES)
            if (finding := rule(head, at)) is not None
        ]
        if found:
            name, (level, badness, reason), hint = found[0]
            also = tuple(milder for milder, _, _ in found[1:])
            judged.append((badness, Verdict(index, name, level, reason, hint, also)))
        elif not short:
            reason = (
                f"the entropy is {head['entropy_ratio']:.2g} of its maximum, "
                f"the signal {head['signal']:.2g}"
            )
            judged.append((0.0, Verdict(index, "healthy", "ok", reason, "nothing to do")))
    judged.sort(
        key=lambda entry: (
            LEVELS.index(entry[1].level),
            _ORDER[entry[1].verdict],
            -entry[0],
            entry[1].head,
        )
    )
    return [verdict for _, verdict in judged]
