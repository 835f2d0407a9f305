"""Running averages of a run: of its loss, of gradients, of the largest scores of its heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .statistics import Floats

# Of the study, as the thresholds over time are (docs/verdicts.md).
STEPS = 10.0  # the loss is averaged over about so many
BEFORE, LATELY, _LONG = 20.0, 40.0, 100.0  # steps, for what was so just before, lately, for long
_MOVES, _SETTLED = 0.015, 0.02  # of the first loss: a difference that is no noise; none at all
_GAINED = 0.25  # of the first loss: what is lost again is measured by no less
RECORDS = 4.0  # a trend takes so many where they are rarer than that
_CLEAR = 3.0  # standard errors: a change, or a slope, that is no noise

Where = slice | NDArray[np.int64]
ALL = slice(None)


class Loss:
    """The course of the loss: where it started, its best and its present value, smoothed."""

    def __init__(self) -> None:
        self.start = self.now = self.best = self._before = self._long = math.nan
        self._first: float | None = None  # step
        self._last = 0.0
        self._broken = 0.0  # steps since it was a number
        self._heard, self._gap, self._time = math.nan, 0.0, 0.0  # last logged, how often, and now
        self._starts = (0.0, 0)  # sum and number of the first values
        self._starting = True

    @property
    def is_known(self) -> bool:
        """Whether it was a number, and is logged still."""
        return not math.isnan(self.now) and not self.is_silent

    @property
    def was_logged(self) -> bool:
        return not math.isnan(self._heard)

    @property
    def is_silent(self) -> bool:
        """Whether it was logged, but not for 100 steps, or four times as long as before."""
        return self._time - self._heard > max(_LONG, RECORDS * self._gap)

    @property
    def is_broken(self) -> bool:
        """Whether it was a number, and has been none for a while: a single one may be skipped."""
        return self.is_known and self._broken >= STEPS

    def add(self, step: float, value: float | None) -> None:
        """The mean loss since the last record. What is no number moves nothing."""
        self._time = step
        if value is None:
            return
        self._gap = step if math.isnan(self._heard) else step - self._heard
        self._heard = step
        if not math.isfinite(value):
            self._broken = step - self._last
            return
        self._broken = 0
        passed = math.inf if self._first is None else max(step - self._last, 1)
        self._first = step if self._first is None else self._first
        self._starting = self._starting and 0 <= step - self._first < STEPS / 2
        if self._starting:
            self._starts = self._starts[0] + value, self._starts[1] + 1
            self.start = self._starts[0] / self._starts[1]
        self.now = towards(self.now, value, passed / STEPS)
        self._before = towards(self._before, value, passed / BEFORE)
        self._long = towards(self._long, value, passed / _LONG)
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
    def falls(self) -> float:
        """How much of the first loss it loses, lately, in 10 steps; less than 0 if it rises."""
        if self._first is None or self.is_silent:
            return 0.0
        # The averages lag behind a steady fall, each as far as it can after so few steps.
        passed = self._last - self._first
        lags = [steps * -math.expm1(-passed / steps) for steps in (BEFORE, STEPS)]
        share = (lags[0] - lags[1]) / (BEFORE - STEPS)
        return (self._before - self.now) / max(share * abs(self.start), 1e-12)

    @property
    def is_falling(self) -> bool:
        """Whether it is clearly lower than it was just before."""
        return self.falls > _MOVES

    @property
    def is_rising(self) -> bool:
        """Whether it is clearly higher than it was just before."""
        return self.falls < -_MOVES

    @property
    def is_settled(self) -> bool:
        """Whether it has been the same for long: what the model can learn, it has learned."""
        if self._first is None or self._last - self._first < _LONG:
            return False
        return abs(self._long - self.now) < _SETTLED * abs(self.start)

    @property
    def lost(self) -> float:
        """The share of what had been gained that was lost again; infinite if it is no number.

        A gain of less than a quarter of the first loss counts as that quarter.
        """
        return self._lost(at_least=_GAINED * abs(self.start))

    @property
    def lost_of_gain(self) -> float:
        """The same, however little had been gained."""
        return self._lost(at_least=0.0)

    def _lost(self, at_least: float) -> float:
        if self.is_broken:
            return math.inf
        return (self.now - self.best) / max(self.start - self.best, at_least, 1e-12)


class Drift:
    """How a positive number changes: its present value as a share of what it was lately."""

    def __init__(self) -> None:
        self._start = self._last = self._now = self._lately = math.nan  # of its logarithm
        self._noise = math.nan  # variance of a record, from the differences of neighbours
        self._share = 1.0  # of the last record in the present value

    def add(self, passed: float, value: float) -> None:
        """Take in a value; what is no number moves nothing."""
        if not (value > 0 and math.isfinite(value)):
            return
        new = math.log(value)
        if not math.isnan(self._last):
            jump = (new - self._last) ** 2 / 2
            self._noise = towards(self._noise, jump, passed / max(LATELY, RECORDS * passed))
        self._start = new if math.isnan(self._start) else self._start
        self._now = towards(self._now, new, passed / STEPS)
        self._lately = towards(self._lately, new, passed / LATELY)
        self._last, self._share = new, -math.expm1(-passed / STEPS)

    @property
    def change(self) -> float:
        """0.1 is growth by a tenth; NaN if nothing is known."""
        return math.expm1(min(self._now - self._lately, 700.0))  # beyond, a float overflows

    @property
    def is_clear(self) -> bool:
        """Whether it changes by more than its records scatter."""
        scatter = self._noise * self._share / (2 - self._share)  # of the present value
        return abs(self._now - self._lately) > _CLEAR * math.sqrt(scatter)

    @property
    def in_all(self) -> float:
        """The same since the start."""
        return math.expm1(min(self._now - self._start, 700.0))


def towards(mean: float, value: float, share: float) -> float:
    """A running mean, moved."""
    return value if math.isnan(mean) else mean - math.expm1(-share) * (value - mean)


class Trend:
    """The lines through the logarithms of the largest scores of heads, lately.

    where: which of the heads; all by default
    """

    def __init__(self, heads: int) -> None:
        # Of weights, t, t², y, t·y and y², t counted back from the head's last record; when that
        # was, and how many there are.
        self._sums, self._last = np.zeros((6, heads)), np.zeros(heads)
        self._records = np.zeros(heads, np.int64)
        self._newest = np.zeros(heads)  # logarithm

    @property
    def _kept(self) -> tuple[NDArray[Any], ...]:
        """All that is kept, by head."""
        return self._sums, self._last, self._records, self._newest

    def add(self, now: float, largest: Floats, where: Where = ALL) -> None:
        """Take in a record at a time, in steps."""
        n, t, tt, y, ty, yy = self._sums[:, where]
        passed = np.where(self._sums[0, where] > 0, now - self._last[where], 0.0)
        kept = np.exp(-passed / np.maximum(BEFORE, RECORDS * passed))
        # Earlier records lie further back now.
        t, tt, ty = t - passed * n, tt - 2 * passed * t + passed**2 * n, ty - passed * y
        logs = np.log(np.maximum(largest, 1e-30))
        known = np.isfinite(logs)
        sums = kept * np.stack([n, t, tt, y, ty, yy])
        sums[0] += known
        sums[3] += np.where(known, logs, 0.0)
        sums[5] += np.where(known, logs * logs, 0.0)
        self._sums[:, where], self._last[where] = sums, now
        self._records[where] += known
        self._newest[where] = np.where(known, logs, self._newest[where])

    def steps_until(self, limit: float, where: Where = ALL) -> Floats:
        """How many steps from now each head reaches a score of `limit`; infinity for never.

        A head whose scores scatter more than they grow never does.
        """
        n, t, tt, y, ty, yy = self._sums[:, where]
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = tt - t * t / n
            slope = (ty - t * y / n) / spread
            steps = (math.log(limit) - self._newest[where]) / slope
            scatter = (yy - y * y / n - slope * slope * spread).clip(0) / np.maximum(n - 2, 0.5)
            error = np.sqrt(scatter / spread)
        growing = (slope > _CLEAR * error) & (self._records[where] >= RECORDS)
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
        if any(size(self._places.get(name)) != size(part) for name, part in layers.items()):
            self._take_in(layers)
        places = (self._places[name] for name in layers)
        return np.concatenate([np.arange(place.start, place.stop) for place in places])

    def _take_in(self, layers: Mapping[str, slice]) -> None:
        """Layers that are new, or have other heads than before, begin anew."""
        before, past = self._places, self._kept
        sizes = {name: size(place) for name, place in {**before, **layers}.items()}
        ends = np.cumsum([*sizes.values()]).tolist()
        self._places = {
            name: slice(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        super().__init__(ends[-1])
        for name, place in before.items():
            if sizes[name] == size(place):
                for new, old in zip(self._kept, past, strict=True):
                    new[..., self._places[name]] = old[..., place]


def size(place: slice | None) -> int:
    return -1 if place is None else int(place.stop - place.start)
