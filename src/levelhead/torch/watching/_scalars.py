"""The loss, and other scalars that are logged: which step each belongs to, and their means."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._health.statistics import Floats
from ..._hints import shown
from ..._options import number
from ._transfers import Transfers

_log = logging.getLogger("levelhead")
_Value = float | Tensor
_Sum = tuple[_Value, _Value]  # and how many values are in it


class Scalars:
    """Values by name: those of the current step, and sums since the last recorded one.

    Tensors stay on their device until a recorded step asks for numbers: to read one waits for all
    that the device has yet to do.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()  # names that have been told of
        self._told_twice = False
        self.restart()

    def restart(self) -> None:
        self._now: dict[str, _Value] = {}
        self._sums: dict[str, _Sum] = {}  # with how many there are in it
        # The names that the step which just ended has; None once the next is seen to begin.
        self._ended: set[str] | None = None

    def log(self, given: Mapping[str, Any]) -> dict[str, _Value]:
        """Take values; those for the step that just ended are returned.

        Between steps a value belongs to the one that ended, unless that has it: then the next may
        have begun unseen, as in a compiled model.
        """
        late = {}
        for name, raw in given.items():
            try:
                value = _value(name, raw)
            except Exception:  # whatever it is: it must not stop the training
                self._refuse(name, raw)
                continue
            if self._ended is not None and name not in self._ended:
                self._ended.add(name)
                self._add(name, value)  # the mean of its own step is out
                late[name] = value
            else:
                if name in self._now:
                    self._tell_twice(name)
                self._now[name] = value
        return late

    def begin_step(self) -> dict[str, _Value]:
        """A step is seen to begin: what came since the last one ended is returned, as its own."""
        if self._ended is None:
            return {}
        self._ended, late = None, self._now
        self._now = {}
        for name in late:
            self._tell_twice(name)
        return late

    def end_step(self, recorded: bool) -> None:
        """Recorded: the means are out, and others begin."""
        if recorded:
            self.forget_means()
        else:
            for name, value in self._now.items():
                self._add(name, value)
        self._ended, self._now = {*self._now}, {}

    def forget_means(self) -> None:
        self._sums.clear()

    def send(self, transfers: Transfers) -> None:
        """Let what lies on devices be fetched with all else that is."""
        for name, value in self._now.items():
            if isinstance(value, Tensor) and not value.is_cpu:
                transfers.add(value, functools.partial(self._came, name))
        for name, (total, many) in self._sums.items():
            if isinstance(total, Tensor) and isinstance(many, Tensor) and not total.is_cpu:
                transfers.add(torch.stack([total, many]), functools.partial(self._came_sum, name))

    def _came(self, name: str, value: Floats) -> None:
        self._now[name] = float(value)

    def _came_sum(self, name: str, values: Floats) -> None:
        self._sums[name] = float(values[0]), float(values[1])

    def numbers(self) -> dict[str, float]:
        """Of the current step."""
        return self.read(self._now)

    def means(self) -> dict[str, float]:
        """Over the steps since the last recorded one, the current step included.

        What is no finite number has no part in them: one step that overflows, and is skipped,
        spoils no mean.
        """
        sums = self._sums | {name: self._with(name, value) for name, value in self._now.items()}
        totals = self.read({name: total for name, (total, _) in sums.items()})
        counts, now = self.read({name: many for name, (_, many) in sums.items()}), self.numbers()
        return {
            name: total / counts[name] if counts[name] else now.get(name, math.nan)
            for name, total in totals.items()
        }

    def read(self, values: Mapping[str, _Value]) -> dict[str, float]:
        found = {}
        for name, value in values.items():
            try:
                found[name] = float(value)
            except Exception:  # a tensor that turns out to have no value
                self._refuse(name, value)
        return found

    def _add(self, name: str, value: _Value) -> None:
        self._sums[name] = self._with(name, value)

    def _with(self, name: str, value: _Value) -> _Sum:
        """The sum of a name with one value more, if that is a finite number."""
        total, many = self._sums.get(name, (0.0, 0.0))
        if not isinstance(value, Tensor):
            return (total + value, many + 1) if math.isfinite(value) else (total, many)
        if value.dtype != torch.float64:
            value = value.float()  # half precision has too few digits for a sum
        if isinstance(total, Tensor):
            value = value.to(total.device)
        known = value.isfinite()
        return total + torch.where(known, value, 0.0), many + known.to(value.dtype)

    def _refuse(self, name: str, value: Any) -> None:
        if name not in self._refused:
            self._refused.add(name)
            _log.warning(
                "watch.log: %s: expected a number, or a tensor with one element, got %s; left out",
                *(name, _came(value)),
            )

    def _tell_twice(self, name: str) -> None:
        if not self._told_twice:
            self._told_twice = True
            _log.warning(
                "watch.log: %s came more than once in a step; the last value counts. If gradients "
                "accumulate over several batches, log the mean of their losses once.",
                name,
            )


def _value(name: str, given: Any) -> _Value:
    """A float, or a copy of a tensor: the original may be written over."""
    if not isinstance(given, Tensor):
        if getattr(getattr(given, "dtype", None), "kind", "") in ("c", "U", "S"):
            raise TypeError  # float() would take an array of these
        return number(name, given)
    if given.numel() != 1 or given.is_meta or given.is_complex():
        raise TypeError
    return given.detach().reshape(()).clone()


def _came(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return f"a tensor of shape {shape}, {dtype} on {value.device}"
