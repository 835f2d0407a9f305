"""What the judge remembers of a run, and what it concludes from the course of things.

One head at one moment says little: a sharp head may be what learning made. Sickness shows in many
heads at once, in change over time, and in a loss that does not come down. All that is remembered
are running averages, so a run may be as long as it likes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from .findings import HEAD, LAYER, MODEL, Fact, Finding
from .numbers import number
from .statistics import Floats
from .verdicts import LOUD, MODEL_VERDICTS, VERDICTS, Thresholds, explained

if TYPE_CHECKING:
    from .judge import Heads

_STEPS = 10.0  # the loss is averaged over about so many
_LATELY = 40.0  # steps, for what was so before
_FALLING = 0.08  # of the first loss: a difference that is no noise
_TREND_STEPS, _TREND_RECORDS = 40.0, 6.0  # a trend is taken over so many, whichever is longer


class Loss:
    """The course of the loss: where it started, its best and its present value, smoothed."""

    def __init__(self) -> None:
        self.start = self.now = self.best = self.lately = math.nan
        self._first: list[float] = []
        self._step: int | None = None

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.now)

    def add(self, step: int, value: float | None) -> None:
        """The mean loss since the last record; what is no number is passed over."""
        if value is None or not math.isfinite(value):
            return
        if self._step is None:
            self._origin = step
        if step - self._origin < _STEPS / 2:
            self._first.append(value)
            self.start = sum(self._first) / len(self._first)
        passed = math.inf if self._step is None else max(step - self._step, 1)
        self.now = _towards(self.now, value, passed / _STEPS)
        self.lately = _towards(self.lately, value, passed / _LATELY)
        self.best = self.now if math.isnan(self.best) else min(self.best, self.now)
        self._step = step

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
        """Whether it is clearly lower than it was lately."""
        return self.lately - self.now > _FALLING * abs(self.start)

    @property
    def lost(self) -> float:
        """The share of what had been gained that was lost again."""
        gained = self.start - self.best
        return (self.now - self.best) / max(gained, 0.05 * abs(self.start), 1e-12)


def _towards(mean: float, value: float, share: float) -> float:
    """A running mean, moved."""
    return value if math.isnan(mean) else mean - math.expm1(-share) * (value - mean)


class Trend:
    """The line through the logarithms of the largest scores of a layer's heads, lately."""

    def __init__(self, heads: int) -> None:
        self.records = 0
        self._sums = np.zeros((5, heads))  # of weights, t, t², y, t·y; t counts back from now

    def add(self, passed: float, largest: Floats) -> None:
        kept = math.exp(-passed / max(_TREND_STEPS, _TREND_RECORDS * passed))
        n, t, tt, y, ty = self._sums
        # Earlier records lie further back now.
        t, tt, ty = t - passed * n, tt - 2 * passed * t + passed**2 * n, ty - passed * y
        now = np.log(np.maximum(largest, 1e-30))
        self._sums = kept * np.stack([n, t, tt, y, ty])
        known = np.isfinite(now)
        self._sums[0] += known
        self._sums[3] += np.where(known, now, 0.0)
        self.records += 1

    def steps_until(self, limit: float) -> Floats:
        """How many steps from now each head reaches a score of `limit`; infinity for never."""
        n, t, tt, y, ty = self._sums
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = tt - t * t / n
            slope = (ty - t * y / n) / spread
            level = y / n - slope * t / n
            steps = (math.log(limit) - level) / slope
        growing = (slope > 0) & (spread > 0)
        return np.where(growing, np.maximum(steps, 0.0), np.inf)


@dataclass
class _Held:
    """How long something has been so: it begins, and ends, only after a while."""

    since: int
    is_raised: bool = False
    last: int = 0
    finding: Finding | None = None


@dataclass
class History:
    """The memory of one run.

    trains:   whether the model learns; if not, sharp heads are as training left them
    findings: those that hold now
    """

    at: Thresholds
    trains: bool = True
    findings: tuple[Finding, ...] = ()
    loss: Loss = field(default_factory=Loss)
    _trends: dict[str, Trend] = field(default_factory=dict)
    _held: dict[tuple[str, str, str, int | None], _Held] = field(default_factory=dict)
    _lately: dict[str, float] = field(default_factory=dict)  # entropy ratio, by layer and in all
    _first: int | None = None
    _last: int = 0
    _sharp_at_first: bool = False

    def observe(self, step: int, heads: Heads, loss: float | None = None) -> None:
        """Take in a recorded step.

        heads: the statistics of all heads at that step, as the judge has them
        loss:  its mean since the last record
        """
        if self._first is None:
            self._first = self._last = step
        passed = max(step - self._last, 1)
        self.loss.add(step, loss)
        found = [*self._heads(heads), *self._growth(step, passed, heads)]
        if self.trains:
            found += self._model(step, passed, heads)
        self._last = step
        self._keep(step, found)

    # ------------------------------------------------------------ many heads at once

    def _model(self, step: int, passed: float, heads: Heads) -> list[Finding]:
        at, judged = self.at, heads.can_be_judged
        if not judged.any():
            return []
        entropy, saturated = heads.values("entropy_ratio"), heads.values("saturated")
        sharp = judged & (
            (entropy < at.sharp_typical) & (saturated > at.saturated_typical) & ~heads.explained
        )
        if step - (self._first or 0) < _STEPS / 2:
            self._sharp_at_first = bool(sharp.sum() > judged.sum() / 2)
        found = []
        for layer, place in (("", slice(None)), *heads.places.items()):
            among, many = judged[place], sharp[place]
            if not among.any():
                continue
            typical = float(np.nanmedian(entropy[place][among]))
            lately = self._lately.get(layer, math.nan)
            self._lately[layer] = _towards(lately, typical, passed / _LATELY)
            needed = at.most_heads if not layer else 1.0
            if many.sum() < needed * among.sum() or (layer and len(among) < 2):
                continue
            found += self._sharp(heads, layer, place, among, many, typical < lately / 2)
        return found[:1] or self._flat(heads, judged)  # a layer only where the model is not

    def _flat(self, heads: Heads, judged: Floats) -> list[Finding]:
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
        why = (
            f"give every key nearly the same, the loss stands still, and the scale is "
            f"{np.median(factors):.2g} of 1/√d_k"
        )
        where, head = heads.name_of(int(np.argmax(np.where(flat, entropy, -1.0))))
        return [
            Finding(
                scope=MODEL,
                name="flat",
                level=rule.level,
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
        self, heads: Heads, layer: str, place: slice, among: Floats, many: Floats, is_new: bool
    ) -> list[Finding]:
        at, loss = self.at, self.loss
        entropy = heads.values("entropy_ratio")[place]
        saturated = heads.values("saturated")[place]
        worst = int(np.nanargmin(np.where(many, entropy, np.inf)))
        facts = [
            Fact("sharp heads", float(many.sum() / among.sum()), high=at.most_heads, form=".0%"),
            Fact(
                "entropy ratio, median",
                float(np.nanmedian(entropy[among])),
                low=at.sharp_typical,
                form=".2f",
            ),
            Fact(
                "saturated rows, median",
                float(np.nanmedian(saturated[among])),
                high=at.saturated_typical,
                form=".0%",
            ),
        ]
        if not loss.is_known:
            if not self._sharp_at_first:
                return []
            name, why = "saturated", "they were so from the start; the loss is not known"
        elif loss.lost > at.lost and (is_new or loss.learned >= at.learned):
            name = "collapsing"
            why = f"the loss has lost {loss.lost:.0%} of what it had gained"
            facts.append(Fact("loss lost again", loss.lost, high=at.lost, form=".0%"))
        elif is_new and loss.learned < at.learned and not loss.is_falling:
            name = "collapsing"
            why = "the loss stands still"
        elif loss.most_learned < at.learned and not loss.is_falling:
            name = "saturated"
            why = f"the loss has fallen by {max(loss.learned, 0.0):.0%} only"
            facts.append(Fact("loss fallen by", loss.learned, low=at.learned, form=".0%"))
        else:
            return []
        rule = MODEL_VERDICTS[name]
        where, head = heads.name_of((place.start or 0) + worst)
        return [
            Finding(
                scope=LAYER if layer else MODEL,
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

    # ------------------------------------------------------------ single heads

    def _heads(self, heads: Heads) -> list[Finding]:
        """Those whose verdict calls for action whatever the course of things."""
        return [
            heads.finding(*heads.named(int(at))) for at in np.flatnonzero(heads.worst < len(LOUD))
        ]

    def _growth(self, step: int, passed: float, heads: Heads) -> list[Finding]:
        at, found = self.at, []
        largest = heads.values("largest_score")
        for layer, place in heads.places.items():
            here = largest[place]
            trend = self._trends.get(layer)
            if trend is None or trend._sums.shape[1] != len(here):
                trend = self._trends[layer] = Trend(len(here))
            trend.add(passed, here)
            rising = (here >= at.large) & (here < at.exploding) & heads.can_be_judged[place]
            if not rising.any() or trend.records < _TREND_RECORDS:
                continue
            steps = trend.steps_until(at.exploding)
            found += [
                self._rising(step, layer, int(head), float(here[head]), float(steps[head]))
                for head in np.flatnonzero(rising & (steps < at.forecast))
            ]
        return found

    def _rising(self, step: int, layer: str, head: int, now: float, steps: float) -> Finding:
        at, loss = self.at, self.loss
        unharmed = loss.is_known and loss.learned >= at.learned and loss.lost < at.lost
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

    def _keep(self, step: int, found: list[Finding]) -> None:
        patience = self.at.patience
        for finding in found:
            held = self._held.setdefault(finding.key, _Held(step))
            held.last, held.finding = step, replace(finding, since=held.since)
            patience = self.at.patience
            if finding.name == "collapsing":
                patience = 0.25 * patience
            elif finding.name == "flat":
                patience = self.at.flat_patience
            urgent = finding.scope == HEAD and not finding.forecast
            held.is_raised = held.is_raised or urgent or step - held.since >= patience
        for key, held in list(self._held.items()):
            if held.last < step and (not held.is_raised or step - held.last >= patience):
                del self._held[key]
        raised = (held.finding for held in self._held.values() if held.is_raised)
        self.findings = tuple(finding for finding in raised if finding is not None)
