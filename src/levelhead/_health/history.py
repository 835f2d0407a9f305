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
from numpy.typing import NDArray

from .findings import HEAD, LAYER, MODEL, Fact, Finding, Key
from .numbers import number
from .statistics import Floats
from .verdicts import LEVELS, LOUD, MODEL_VERDICTS, VERDICTS, Thresholds, explained

if TYPE_CHECKING:
    from .judge import Flags, Heads

_STEPS = 10.0  # the loss is averaged over about so many
_BEFORE, _LATELY, _LONG = 20.0, 40.0, 100.0  # steps, for what was so just before, lately, for long
_FALLING, _SETTLED = 0.025, 0.02  # of the first loss: a difference that is no noise; none at all
_GAINED = 0.25  # of the first loss: what is lost again is measured by no less
_TREND_STEPS, _TREND_RECORDS = 40.0, 4.0  # a trend is taken over so many, whichever is longer

_SOLVED = "the loss is nearly gone and stays so: there is nothing left to harm"

Where = slice | NDArray[np.int64]
ALL = slice(None)


class Loss:
    """The course of the loss: where it started, its best and its present value, smoothed."""

    def __init__(self) -> None:
        self.start = self.now = self.best = self._before = self._long = math.nan
        self.is_broken = False  # it was a number, and is none now
        self._first: int | None = None  # step
        self._last = 0
        self._starts = (0.0, 0)  # sum and number of the first values
        self._starting = True

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.now)

    def add(self, step: int, value: float | None) -> None:
        """The mean loss since the last record. What is no number moves nothing."""
        if value is None:
            return
        self.is_broken = self.is_known and not math.isfinite(value)
        if not math.isfinite(value):
            return
        passed = math.inf if self._first is None else max(step - self._last, 1)
        self._first = step if self._first is None else self._first
        self._starting = self._starting and 0 <= step - self._first < _STEPS / 2
        if self._starting:
            self._starts = self._starts[0] + value, self._starts[1] + 1
            self.start = self._starts[0] / self._starts[1]
        self.now = _towards(self.now, value, passed / _STEPS)
        self._before = _towards(self._before, value, passed / _BEFORE)
        self._long = _towards(self._long, value, passed / _LONG)
        self.best = self.now if math.isnan(self.best) else min(self.best, self.now)
        self._last = step

    @property
    def learned(self) -> float:
        """The share of the first loss that is gone."""
        return (self.start - self.now) / max(abs(self.start), 1e-12)

    @property
    def most_learned(self) -> float:
        """The same at its best: what was learned once may come back."""
        return (self.start - self.best) / max(abs(self.start), 1e-12)

    @property
    def is_falling(self) -> bool:
        """Whether it is clearly lower than it was just before."""
        if self._first is None:
            return False
        # The averages lag behind a steady fall, each as far as it can after so few steps.
        passed = self._last - self._first
        lags = [steps * -math.expm1(-passed / steps) for steps in (_BEFORE, _STEPS)]
        share = (lags[0] - lags[1]) / (_BEFORE - _STEPS)
        return self._before - self.now > _FALLING * share * abs(self.start)

    @property
    def is_settled(self) -> bool:
        """Whether it has been the same for long: what the model can learn, it has learned."""
        if self._first is None or self._last - self._first < _LONG:
            return False
        return abs(self._long - self.now) < _SETTLED * abs(self.start)

    @property
    def lost(self) -> float:
        """The share of what had been gained that was lost again; infinite if it is no number."""
        if self.is_broken:
            return math.inf
        gained = self.start - self.best
        return (self.now - self.best) / max(gained, _GAINED * abs(self.start), 1e-12)


class Drift:
    """How a positive number changes: its present value as a share of what it was lately."""

    def __init__(self) -> None:
        self._now = self._lately = math.nan  # of its logarithm

    def add(self, passed: float, value: float) -> None:
        """Take in a value; what is no number moves nothing."""
        if value > 0 and math.isfinite(value):
            self._now = _towards(self._now, math.log(value), passed / _STEPS)
            self._lately = _towards(self._lately, math.log(value), passed / _LATELY)

    @property
    def change(self) -> float:
        """0.1 is growth by a tenth; NaN if nothing is known."""
        return math.expm1(self._now - self._lately)


def _towards(mean: float, value: float, share: float) -> float:
    """A running mean, moved."""
    return value if math.isnan(mean) else mean - math.expm1(-share) * (value - mean)


class Trend:
    """The lines through the logarithms of the largest scores of heads, lately.

    where: which of the heads; all by default
    """

    def __init__(self, heads: int) -> None:
        # Of weights, t, t², y and t·y, t counted back from the head's last record; when that was,
        # and how many there are.
        self._sums, self._last = np.zeros((5, heads)), np.zeros(heads)
        self._records = np.zeros(heads, np.int64)

    def add(self, now: float, largest: Floats, where: Where = ALL) -> None:
        """Take in a record at a time, in steps."""
        n, t, tt, y, ty = self._sums[:, where]
        passed = np.where(self._sums[0, where] > 0, now - self._last[where], 0.0)
        kept = np.exp(-passed / np.maximum(_TREND_STEPS, _TREND_RECORDS * passed))
        # Earlier records lie further back now.
        t, tt, ty = t - passed * n, tt - 2 * passed * t + passed**2 * n, ty - passed * y
        logs = np.log(np.maximum(largest, 1e-30))
        known = np.isfinite(logs)
        sums = kept * np.stack([n, t, tt, y, ty])
        sums[0] += known
        sums[3] += np.where(known, logs, 0.0)
        self._sums[:, where], self._last[where] = sums, now
        self._records[where] += known

    def steps_until(self, limit: float, where: Where = ALL) -> Floats:
        """How many steps from now each head reaches a score of `limit`; infinity for never."""
        n, t, tt, y, ty = self._sums[:, where]
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = tt - t * t / n
            slope = (ty - t * y / n) / spread
            level = y / n - slope * t / n
            steps = (math.log(limit) - level) / slope
        growing = (slope > 0) & (spread > 0) & (self._records[where] >= _TREND_RECORDS)
        return np.where(growing, np.maximum(steps, 0.0), np.inf)


class Trends(Trend):
    """The same of all heads of a model, whichever layers take part in a step."""

    def __init__(self) -> None:
        super().__init__(0)
        self._places: dict[str, slice] = {}

    def where(self, layers: Mapping[str, slice]) -> Where:
        """The places of the heads of some layers, in their order."""
        if layers == self._places:  # usually
            return ALL
        if any(_size(self._places.get(name)) != _size(part) for name, part in layers.items()):
            self._take_in(layers)
        places = (self._places[name] for name in layers)
        return np.concatenate([np.arange(place.start, place.stop) for place in places])

    def _take_in(self, layers: Mapping[str, slice]) -> None:
        """Layers that are new, or have other heads than before, begin anew."""
        before, past = self._places, (self._sums, self._last, self._records)
        sizes = {name: _size(place) for name, place in {**before, **layers}.items()}
        ends = np.cumsum([*sizes.values()]).tolist()
        self._places = {
            name: slice(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        super().__init__(ends[-1])
        for name, place in before.items():
            if sizes[name] == _size(place):
                for new, old in zip((self._sums, self._last, self._records), past, strict=True):
                    new[..., self._places[name]] = old[..., place]


def _size(place: slice | None) -> int:
    return -1 if place is None else int(place.stop - place.start)


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
    _asked: Drift = field(default_factory=Drift)  # gradient on the weights
    _let_through: Drift = field(default_factory=Drift)  # what of it gets through the softmax
    _trends: Trends = field(default_factory=Trends)
    _held: dict[Key, _Held] = field(default_factory=dict)
    _lately: dict[str | None, float] = field(
        default_factory=dict
    )  # entropy ratio, by layer and in all
    _last: int | None = None
    _clock: float = 0.0  # steps since the first; it goes on when a run goes back to a checkpoint
    _sharp_at_first: bool = False
    _was_settled: bool = False  # the loss, when heads were last not sharp

    def observe(self, step: int, heads: Heads, loss: float | None = None) -> None:
        """Take in a recorded step.

        heads: the statistics of all heads at that step, as the judge has them without a course
        loss:  its mean since the last record
        """
        passed = 1 if self._last is None else max(step - self._last, 1)
        self._clock += 0 if self._last is None else passed
        self._last = step
        self.loss.add(step, loss)
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
        entropy, saturated = heads.values("entropy_ratio"), heads.values("saturated")
        sharp = judged & (entropy < at.sharp_typical) & (saturated > at.saturated_typical)
        if sharp.any():
            sharp &= ~heads.explained
        self._asked.add(passed, _median(heads.values("weight_grad_norm")[judged]))
        self._let_through.add(passed, _median(heads.values("score_grad_norm")[judged]))
        total, any_sharp = int(judged.sum()), bool(sharp.any())
        if self._clock < _STEPS / 2:
            self._sharp_at_first = bool(sharp.sum() > total / 2)
        if sharp.sum() <= total / 2:
            self._was_settled = self.loss.is_settled
        known = np.where(judged, entropy, np.nan)
        # None is the whole model; a layer may be called "".
        parts: list[tuple[str | None, slice]] = [(None, ALL), *heads.places.items()]
        typical = [_median(known), *_medians(known, heads.places)]
        found: list[Finding] = []
        for (layer, place), now in zip(parts, typical, strict=True):
            lately = self._lately.get(layer, math.nan)
            if not math.isnan(now):
                self._lately[layer] = _towards(lately, now, passed / _LATELY)
            if found or not any_sharp or (layer is not None and _size(place) < 2):
                continue  # a layer is told only where the model is not
            among, many = judged[place], sharp[place]
            needed = at.most_heads if layer is None else 1.0
            if among.any() and many.sum() >= needed * among.sum():
                found += self._sharp(heads, layer, place, among, many, now < lately / 2)
        return found or self._flat(heads, judged)

    def _flat(self, heads: Heads, judged: Flags) -> list[Finding]:
        """Heads that choose nothing, while the scale is too small and the loss stands still."""
        at, loss = self.at, self.loss
        factors = [scale.factor for scale in heads.evidence.scales.values()]
        if not loss.is_known or loss.learned >= at.learned or loss.is_falling:
            return []
        if not factors or not np.median(factors) < at.scale_small:
            return []
        entropy = heads.values("entropy_ratio")
        flat = judged & (entropy > at.flat_typical)
        if flat.sum() < at.most_heads * judged.sum():
            return []
        rule = MODEL_VERDICTS["flat"]
        level = rule.level if not self._asked.change <= at.rising else "info"
        why = (
            f"give every key nearly the same, the loss stands still, and the scale is "
            f"{np.median(factors):.2g} of 1/√d_k"
        )
        where, head = heads.name_of(int(np.argmax(np.where(flat, entropy, -1.0))))
        return [
            Finding(
                scope=MODEL,
                name="flat",
                level=level,
                reason=rule.reason.format(many=int(flat.sum()), heads=int(judged.sum()), why=why),
                hint="use 1/√d_k, or raise the learning rate of q and k",
                evidence=(
                    Fact("flat heads", float(flat.sum() / judged.sum()), high=at.most_heads),
                    Fact("loss fallen by", loss.learned, low=at.learned, form=".0%"),
                    Fact("scale, in units of 1/√d_k", float(np.median(factors)), form=".2g"),
                ),
                layer=where,
                head=head,
                heads=int(flat.sum()),
                explained=explained("flat"),
            )
        ]

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
        if not loss.is_known:
            if not self._sharp_at_first:
                return []
            name, why = "saturated", "they were so from the start; the loss is not known"
        elif self._was_settled and loss.lost <= at.lost:
            return []  # there was nothing more to learn when they turned sharp
        elif self._clock < at.settling:
            return []
        elif loss.lost > at.lost and (is_new or loss.learned >= at.learned):
            name = "collapsing"
            why = f"the loss has lost {loss.lost:.0%} of what it had gained"
            if loss.is_broken:
                why = "the loss is no number any more"
            else:
                facts.append(Fact("loss lost again", loss.lost, high=at.lost, form=".0%"))
            if loss.now > loss.start:
                why = "the loss is higher than at the start"
        elif loss.most_learned < at.learned and self._stands_still(is_new):
            name = "collapsing" if is_new else "saturated"
            why = f"the loss has fallen by {max(loss.learned, 0.0):.0%} only"
            facts.append(Fact("loss fallen by", loss.learned, low=at.learned, form=".0%"))
        else:
            return []
        rule = MODEL_VERDICTS[name]
        where, head = heads.name_of((place.start or 0) + worst)
        return [
            Finding(
                scope=MODEL if layer is None else LAYER,
                name=name,
                level=rule.level,
                reason=rule.reason.format(many=int(many.sum()), heads=int(among.sum()), why=why),
                hint=rule.hint,
                evidence=tuple(facts),
                layer=where,
                head=head,
                heads=int(many.sum()),
                explained=explained(name),
            )
        ]

    def _stands_still(self, is_new: bool) -> bool:
        """Whether the loss does, although there is something to learn, and it does not begin.

        Gradients tell. More and more of it gets through the softmax before a model begins to learn.
        Less and less of it asks for other weights where nothing is to be gained from them: a model
        of noise learns to ignore its attention. What is not known excuses nothing.
        """
        at, loss = self.at, self.loss
        if (
            loss.is_falling
            or self._let_through.change > at.rising
            or self._asked.change < -at.fading
        ):
            return False
        if not is_new and loss.most_learned < at.begun:  # perhaps there is nothing to learn
            return not self._asked.change <= at.rising
        return True

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
                benign = self._unharmed() if name == "exploding" else ""
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

    def _unharmed(self) -> str:
        """Why scores may be as large as they like; "" if they may not."""
        if self._may_grow(self.at.solved):
            return _SOLVED
        if self._may_grow(-math.inf):
            if self.loss.is_falling:
                return "the loss is falling all the same"
            if self.loss.is_settled:
                return "the loss has long stood still and has not suffered"
        return ""

    def _may_grow(self, learned: float) -> bool:
        """Whether the scores may: so much has been learned, and it is not lost."""
        loss = self.loss
        return loss.is_known and loss.learned >= learned and loss.lost < self.at.lost

    def _growth(self, step: int, heads: Heads) -> list[Finding]:
        at, largest = self.at, heads.values("largest_score")
        where = self._trends.where(heads.places)
        self._trends.add(self._clock, largest, where)
        rising = (largest >= at.large) & (largest < at.exploding)
        if not rising.any():
            return []
        steps = self._trends.steps_until(at.exploding, where)
        rising &= (steps < at.forecast) & heads.can_be_judged
        return [
            self._rising(step, *heads.name_of(place), float(largest[place]), float(steps[place]))
            for place in np.flatnonzero(rising).tolist()
        ]

    def _rising(self, step: int, layer: str, head: int, now: float, steps: float) -> Finding:
        at = self.at
        calm = self.loss.is_settled or self.loss.is_falling
        unharmed = self._may_grow(-math.inf if calm else at.learned)
        when = step + max(1, round(steps))
        return Finding(
            scope=HEAD,
            name="exploding",
            level="info" if unharmed else "warning",
            reason=f"the largest |score| is {number(now)} and grows",
            hint=VERDICTS["exploding"].hint,
            evidence=(Fact("largest |score|", now, high=at.large),),
            layer=layer,
            head=head,
            benign="the loss has not suffered so far" if unharmed else "",
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
            patience = self.at.flat_patience if finding.name == "flat" else self.at.patience
            urgent = finding.scope == HEAD and not finding.forecast
            held.is_raised = held.is_raised or urgent or self._clock - held.first >= patience
        for key, held in list(self._held.items()):
            scope, _, layer, _ = key
            patience, gone = self.at.patience, self._clock - held.last
            if scope != MODEL and layer not in heads.places:
                patience = max(patience, 2 * passed)  # it may take part again
            elif not held.is_raised:
                patience = 0.0
            if gone > 0 and gone >= patience:
                del self._held[key]
        self.findings = tuple(held.finding for held in self._held.values() if held.is_raised)


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
