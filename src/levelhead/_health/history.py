"""What the judge remembers of a run, and what it concludes from the course of things.

One head at one moment says little: a sharp head may be what learning made. Sickness shows in many
heads at once, in change over time, and in a loss that does not come down. All that is remembered
are running averages, so a run may be as long as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from .findings import HEAD, LAYER, MODEL, Fact, Finding, Key
from .numbers import number
from .statistics import Floats
from .trends import ALL, BEFORE, LATELY, RECORDS, STEPS, Drift, Loss, Trends, size, towards
from .verdicts import LEVELS, LOUD, MODEL_VERDICTS, SHARP, VERDICTS, Thresholds, explained

if TYPE_CHECKING:
    from .judge import Flags, Heads

_SUDDEN = "collapsing"  # rests on what changes for the worse, and needs not last to be told


@dataclass
class _Held:
    """How long something has been so: it begins, and ends, only after a while.

    first, last: by the clock of the history
    """

    since: int
    first: float
    last: float
    finding: Finding
    is_raised: bool = False


@dataclass
class History:
    """The memory of one run.

    trains:   whether the model learns; if not, sharp heads are as training left them
    findings: those that hold now. Of a head that its own numbers condemn, it has the words with
              which that began, or changed its level; the judge has those of now.
    """

    at: Thresholds
    trains: bool = True
    findings: tuple[Finding, ...] = ()
    loss: Loss = field(default_factory=Loss)
    # Of a typical head: the median.
    _asked: Drift = field(default_factory=Drift)  # gradient on the weights
    _let_through: Drift = field(default_factory=Drift)  # what of it gets through the softmax
    _survival: Drift = field(default_factory=Drift)  # the share of it that does
    _scores: Drift = field(default_factory=Drift)  # the largest one
    _trends: Trends = field(default_factory=Trends)
    _held: dict[Key, _Held] = field(default_factory=dict)
    _lately: dict[str | None, float] = field(
        default_factory=dict
    )  # entropy ratio, by layer and in all
    _last: int | None = None
    _clock: float = 0.0  # steps since the first; it goes on when a run goes back to a checkpoint
    _sharp_at_first: bool = False
    # Of the model, and of layers, that are sharp: whether the loss had settled when they became so.
    _was_settled: dict[str | None, bool] = field(default_factory=dict)
    _flat_since: float = math.inf  # by the clock; infinity while they are not

    def observe(self, step: int, heads: Heads, loss: float | None = None) -> None:
        """Take in a recorded step.

        heads: the statistics of all heads at that step, as the judge has them without a course
        loss:  its mean since the last record
        """
        passed = 1 if self._last is None else max(step - self._last, 1)
        self._clock += 0 if self._last is None else passed
        self._last = step
        self.loss.add(self._clock, loss)
        if not heads.count:
            return
        found = [*self._heads(heads), *self._growth(step, heads)]
        if self.trains:
            found += self._model(passed, heads)
        self._keep(step, passed, heads, found)

    # ------------------------------------------------------------ many heads at once

    def _model(self, passed: float, heads: Heads) -> list[Finding]:
        at, judged = self.at, heads.can_be_judged
        if not judged.any():
            return []
        entropy, sharp = heads.values("entropy_ratio"), heads.sharp
        for drift, statistic in (
            (self._asked, "weight_grad_norm"),
            (self._let_through, "score_grad_norm"),
            (self._survival, "survival"),
            (self._scores, "largest_score"),
        ):
            drift.add(passed, _median(heads.values(statistic)[judged]))
        total, any_sharp = int(judged.sum()), bool(sharp.any())
        if self._clock < STEPS / 2:
            self._sharp_at_first = bool(sharp.sum() > total / 2)
        if not any_sharp:
            self._was_settled.clear()
        known = np.where(judged, entropy, np.nan)
        # None is the whole model; a layer may be called "".
        parts: list[tuple[str | None, slice]] = [(None, ALL), *heads.places.items()]
        typical = [_median(known), *_medians(known, heads.places)]
        found: list[Finding] = []
        for (layer, place), now in zip(parts, typical, strict=True):
            lately = self._lately.get(layer, math.nan)
            if not math.isnan(now):
                self._lately[layer] = towards(lately, now, passed / LATELY)
            if found or not any_sharp or (layer is not None and size(place) < 2):
                continue  # a layer is told only where the model is not
            among, many = judged[place], sharp[place]
            needed = at.most_heads if layer is None else 1.0
            if many.sum() <= among.sum() / 2:
                self._was_settled.pop(layer, None)
            elif many.sum() >= needed * among.sum():
                self._was_settled.setdefault(layer, self.loss.is_settled)
                is_new = self._clock >= LATELY and now < lately / 2
                found += self._sharp(heads, layer, place, among, many, is_new)
        return found or self._running_away(heads, judged) or self._flat(heads, judged)

    def _running_away(self, heads: Heads, judged: Flags) -> list[Finding]:
        """Scores that grow while the loss gets worse, whether the heads are sharp yet or not."""
        at, loss, grown = self.at, self.loss, self._scores.change
        if self._clock < BEFORE or loss.most_learned < at.partly or not grown > at.growing:
            return []
        if not loss.is_broken and not (loss.is_rising and loss.lost > at.slipping):
            return []
        by = number(1 + grown, ".2g" if grown < 99 else "")
        return _wide(
            heads,
            _SUDDEN,
            reason=f"the scores have grown {by}-fold within some 30 steps, and {self._harm()}",
            facts=(
                Fact("growth of the largest |score|", grown, high=at.growing, form=".0%"),
                *self._lost(at.slipping),
            ),
            worst=int(np.argmax(np.where(judged, heads.values("largest_score"), -np.inf))),
            many=int(judged.sum()),
        )

    def _lost(self, high: float) -> list[Fact]:
        if self.loss.is_broken:
            return []
        return [Fact("loss lost again", self.loss.lost, high=high, form=".0%")]

    def _harm(self) -> str:
        """What has become of the loss, in words."""
        if self.loss.is_broken:
            return "the loss is no number any more"
        if self.loss.now > self.loss.start:
            return "the loss is higher than at the start"
        return f"the loss has lost {self.loss.lost_of_gain:.0%} of what it had gained"

    def _flat(self, heads: Heads, judged: Flags) -> list[Finding]:
        """Heads that choose nothing, while the scale is too small and the loss stands still."""
        at, loss = self.at, self.loss
        factors = [scale.factor for scale in heads.evidence.scales.values()]
        entropy = heads.values("entropy_ratio")
        flat = judged & (entropy > at.flat_typical)
        if flat.sum() < at.most_heads * judged.sum():
            self._flat_since = math.inf
            return []
        self._flat_since = min(self._flat_since, self._clock)
        if self._clock - self._flat_since < at.flat_patience - at.patience:
            return []
        if not loss.is_known or loss.learned >= at.learned or loss.falls > at.creeping:
            return []
        if not factors or not np.median(factors) < at.scale_small:
            return []
        rule = MODEL_VERDICTS["flat"]
        is_asked = self._is_told(MODEL, "flat") or not self._asked.in_all <= at.grown
        level = rule.level if is_asked else "info"
        why = (
            f"give every key nearly the same, the loss stands still, and the scale is "
            f"{np.median(factors):.2g} of 1/√d_k"
        )
        return _wide(
            heads,
            "flat",
            reason=rule.reason.format(many=int(flat.sum()), heads=int(judged.sum()), why=why),
            facts=(
                Fact(
                    "flat heads", float(flat.sum() / judged.sum()), high=at.most_heads, form=".0%"
                ),
                Fact("loss fallen by", loss.learned, low=at.learned, form=".0%"),
                Fact("scale, in units of 1/√d_k", float(np.median(factors)), form=".2g"),
            ),
            worst=int(np.argmax(np.where(flat, entropy, -1.0))),
            many=int(flat.sum()),
            level=level,
            hint="use 1/√d_k, or raise the learning rate of q and k",
        )

    def _sharp(
        self,
        heads: Heads,
        layer: str | None,
        place: slice,
        among: Flags,
        many: Flags,
        is_new: bool,
    ) -> list[Finding]:
        at, loss = self.at, self.loss
        entropy = heads.values("entropy_ratio")[place]
        saturated = heads.values("saturated")[place]
        worst = int(np.nanargmin(np.where(many, entropy, np.inf)))
        facts = [
            Fact("sharp heads", float(many.sum() / among.sum()), high=at.most_heads, form=".0%"),
            Fact(
                "entropy ratio, median",
                _median(entropy[among]),
                low=at.sharp_typical,
                form=".2f",
            ),
            Fact(
                "saturated rows, median",
                _median(saturated[among]),
                high=at.saturated_typical,
                form=".0%",
            ),
        ]
        is_mending = self._let_through.change > 2 * at.rising
        lost_again = loss.lost > at.lost and loss.most_learned >= at.begun and not is_mending
        has_lost = loss.is_broken or lost_again
        if not loss.is_known:
            if not self._sharp_at_first:
                return []
            name, why = "saturated", "they were so from the start; the loss is not known"
        elif self._was_settled[layer] and loss.lost <= at.lost:
            return []  # there was nothing more to learn when they turned sharp
        elif self._clock < at.settling:
            return []
        elif has_lost and (is_new or loss.learned >= at.learned):
            name, why = _SUDDEN, self._harm()
            facts += self._lost(at.lost)
        elif loss.most_learned < at.learned and self._chokes():
            name, why = _SUDDEN, "less and less of the gradient gets through the softmax"
            change = "survival, change within some 30 steps"
            facts.append(Fact(change, self._survival.change, low=-at.choking, form=".0%"))
        elif loss.most_learned < at.learned and self._stands_still(layer, is_new):
            name = "saturated"
            why = f"the loss has fallen by {max(loss.learned, 0.0):.0%} only"
            facts.append(Fact("loss fallen by", loss.learned, low=at.learned, form=".0%"))
        else:
            return []
        reason = MODEL_VERDICTS[name].reason.format(
            many=int(many.sum()),
            heads=int(among.sum()),
            turned="turned" if is_new else "are",
            why=why,
        )
        scope = MODEL if layer is None else LAYER
        worst += place.start or 0
        return _wide(heads, name, reason, tuple(facts), worst, int(many.sum()), scope=scope)

    def _chokes(self) -> bool:
        """Whether ever less gets through the softmax, of what is asked for more and more.

        While the loss falls all the same, much more must be asked for.
        """
        at, survival = self.at, self._survival
        if self._clock < BEFORE or self.loss.falls >= at.quickly:
            return False
        asked_for = self._asked.change > (at.demanded if self.loss.is_falling else 0.0)
        return asked_for and survival.change < -at.choking and survival.is_clear

    def _stands_still(self, layer: str | None, is_new: bool) -> bool:
        """Whether the loss does, although there is something to learn, and it does not begin.

        Gradients tell. More and more of it gets through the softmax before a model begins to learn.
        Less and less of it asks for other weights where nothing is to be gained from them: a model
        of noise learns to ignore its attention, and one that has learned what attention can give
        asks for no more. What is not known excuses nothing.
        """
        at, loss = self.at, self.loss
        asked, let_through = self._asked.change, self._let_through.change
        scope = MODEL if layer is None else LAYER
        if loss.is_falling:
            return False
        if any(self._is_told(scope, name, layer or "") for name in SHARP):
            return True
        if self._clock < at.beginning:
            return False
        if let_through > at.rising or asked < -at.fading or self._asked.in_all < -at.faded:
            return False
        if loss.most_learned >= at.partly:  # perhaps that was all
            return not asked < at.rising / 2
        if let_through > -at.rising and not loss.is_settled:  # perhaps it is about to
            return False
        if not is_new and loss.most_learned < at.begun:  # perhaps there is nothing to learn
            return not asked <= at.rising
        return True

    def _is_told(self, scope: str, name: str, layer: str = "", head: int | None = None) -> bool:
        """Whether someone was asked to act on it: then it takes more than a sign to end it."""
        held = self._held.get((scope, name, layer, head))
        return held is not None and held.is_raised and held.finding.is_loud

    # ------------------------------------------------------------ single heads

    def _heads(self, heads: Heads) -> list[Finding]:
        """Those whose verdict calls for action whatever the course of things."""
        found: list[Finding] = []
        if not heads.may_be_loud:  # usually
            return found
        loud = heads.worst < len(LOUD)
        for layer, place in heads.places.items() if loud.any() else ():
            for head in np.flatnonzero(loud[place]).tolist():
                at = place.start + head
                name, level = heads.order[heads.chosen[at]], LEVELS[heads.worst[at]]
                benign = self._unharmed(layer, head) if name == "exploding" else ""
                level = "info" if benign else level
                held = self._held.get((HEAD, name, layer, head))
                if held and held.finding.level == level and not held.finding.forecast:
                    found.append(held.finding)  # words take time
                else:
                    own = heads.finding(*heads.named(at))
                    if benign:
                        reason = f"the largest |score| is {number(own.evidence[0].value)}"
                        own = replace(own, level=level, benign=benign, reason=reason)
                    found.append(own)
        return found

    def _unharmed(self, layer: str, head: int) -> str:
        """Why scores may be as large as they like; "" if they may not."""
        if self._may_grow(layer, head, self.at.learned):
            return "most of the loss is gone, and stays so"
        return self._calm(layer, head)

    def _calm(self, layer: str, head: int) -> str:
        """Why growing scores have done no harm, little as has been learned."""
        if self._is_told(HEAD, "exploding", layer, head):
            return ""
        if not self._may_grow(layer, head, -math.inf):
            return ""
        if self.loss.is_falling:
            return "the loss is falling all the same"
        if self._may_grow(layer, head, self.at.begun) and self._asked.change < 0:
            return "less and less is asked of attention"
        if self.loss.is_settled:
            return "the loss has long stood still and has not suffered"
        return ""

    def _may_grow(self, layer: str, head: int, learned: float) -> bool:
        """Whether the scores may: so much was learned, and it is not lost."""
        is_told = self._is_told(HEAD, "exploding", layer, head)
        may_be_lost = self.at.lost / 2 if is_told else self.at.lost
        return self.loss.most_learned >= learned and self.loss.lost < may_be_lost

    def _growth(self, step: int, heads: Heads) -> list[Finding]:
        at, largest = self.at, heads.values("largest_score")
        where = self._trends.where(heads.places)
        self._trends.add(self._clock, largest, where)
        rising = (largest >= at.large) & (largest < at.exploding)
        if not rising.any() or self._clock < at.settling:
            return []
        steps = self._trends.steps_until(at.exploding, where)
        rising &= (steps < at.forecast) & heads.can_be_judged
        return [
            self._rising(step, heads, place, float(largest[place]), float(steps[place]))
            for place in np.flatnonzero(rising).tolist()
        ]

    def _rising(self, step: int, heads: Heads, place: int, now: float, steps: float) -> Finding:
        at, (layer, head) = self.at, heads.name_of(place)
        benign = self._calm(layer, head)
        if self._may_grow(layer, head, at.learned):
            benign = "the loss has not suffered so far"
        when = step + max(1, round(steps))
        return Finding(
            scope=HEAD,
            name="exploding",
            level="info" if benign else "warning",
            reason=f"the largest |score| is {number(now)} and grows",
            hint=VERDICTS["exploding"].hint,
            evidence=(Fact("largest |score|", now, high=at.large),),
            layer=layer,
            head=head,
            pattern=heads.pattern(place),
            benign=benign,
            forecast=f"At this rate {number(at.exploding)} at about step {number(when)}",
            explained=explained("exploding"),
        )

    # ------------------------------------------------------------ since when, and until when

    def _keep(self, step: int, passed: float, heads: Heads, found: list[Finding]) -> None:
        for finding in found:
            held = self._held.get(finding.key)
            if held is None:
                held = self._held[finding.key] = _Held(step, self._clock, self._clock, finding)
            held.last = self._clock
            if held.finding is not finding or finding.since is None:
                held.finding = replace(finding, since=held.since)
            lasted = self._clock - held.first
            held.is_raised = held.is_raised or lasted >= self._patience_with(finding)
        for key, held in list(self._held.items()):
            scope, _, layer, _ = key
            patience, gone = self.at.patience, self._clock - held.last
            if held.is_raised or (scope != MODEL and layer not in heads.places):
                patience = max(patience, RECORDS * passed)  # it may come, or take part, again
            else:
                patience = 0.0
            if gone > 0 and gone >= patience:
                del self._held[key]
        self.findings = tuple(held.finding for held in self._held.values() if held.is_raised)

    def _patience_with(self, finding: Finding) -> float:
        """How long it must last: the longer, the less has to happen for it."""
        return 0.0 if finding.scope == HEAD or finding.name == _SUDDEN else self.at.patience

    @property
    def pending(self) -> list[Finding]:
        """What is so, and has not lasted long enough to be told."""
        return [held.finding for held in self._held.values() if not held.is_raised]


def _wide(
    heads: Heads,
    name: str,
    reason: str,
    facts: tuple[Fact, ...],
    worst: int,
    many: int,
    *,
    scope: str = MODEL,
    level: str = "",
    hint: str = "",
) -> list[Finding]:
    """A finding about many heads; level and hint are those of the table if none are given."""
    rule = MODEL_VERDICTS[name]
    layer, head = heads.name_of(worst)
    return [
        Finding(
            scope=scope,
            name=name,
            level=level or rule.level,
            reason=reason,
            hint=hint or rule.hint,
            evidence=facts,
            layer=layer,
            head=head,
            heads=many,
            explained=explained(name),
        )
    ]


def _median(values: Floats) -> float:
    """Of those that are no NaN; NaN if there are none."""
    return _medians(values, {"": ALL})[0]


def _medians(values: Floats, places: Mapping[str, slice]) -> list[float]:
    """The same of several parts; np.nanmedian takes ten times as long."""
    found = []
    for place in places.values():
        ordered = np.sort(values[place]).tolist()  # NaN comes last
        while ordered and math.isnan(ordered[-1]):
            ordered.pop()
        half = len(ordered) // 2
        middle = ordered[half : half + 1] if len(ordered) % 2 else ordered[half - 1 : half + 1]
        found.append(sum(middle) / len(middle) if ordered else math.nan)
    return found
