"""What the machine itself can do: the limits that every case is measured against."""

from __future__ import annotations

import os
from dataclasses import dataclass

from benchmarks.cases import Case
from levelhead.lab._machine import cpu_name

__all__ = ["Limit", "Limits", "cores", "cpu_name"]


def cores() -> int:
    """Cores this process may use; every contender gets as many threads."""
    return len(os.sched_getaffinity(0))


@dataclass
class Limit:
    """One limit of the machine. The best value seen counts, so shares of it only fall."""

    unit: str  # "GFLOP/s" of float32 multiply-adds, two operations each; "GB/s" read
    best: float = 0.0

    def measure(self) -> None:
        from levelhead import _engine

        bandwidth = self.unit == "GB/s"
        limit = _engine.measure_read_bandwidth if bandwidth else _engine.measure_fma_peak
        self.best = max(self.best, limit(cores()))

    def join(self, other: Limit) -> None:
        if other.unit == self.unit:
            self.best = max(self.best, other.best)

    def rate(self, case: Case, seconds: float) -> float:
        """What the case reached, in the limit's unit."""
        return (case.min_bytes if self.unit == "GB/s" else case.flops) / seconds / 1e9


class Limits:
    """Both limits, over a whole run."""

    def __init__(self) -> None:
        self.arithmetic, self.reading = Limit("GFLOP/s"), Limit("GB/s")

    def measure(self) -> None:
        self.arithmetic.measure()
        self.reading.measure()

    def binding(self, case: Case) -> Limit:
        """The limit that keeps the case longer, to be measured anew beside it."""
        moving, computing = case.min_bytes / self.reading.best, case.flops / self.arithmetic.best
        return Limit((self.reading if moving > computing else self.arithmetic).unit)

    def join(self, beside: Limit) -> None:
        self.arithmetic.join(beside)
        self.reading.join(beside)
