"""What the machine itself can do: the limits that every case is measured against."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from benchmarks.cases import Case


def cores() -> int:
    """Cores this process may use; every contender gets as many threads."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass
class Limits:
    """The best values seen so far. A limit only ever rises, so shares of it only fall."""

    gflops: float = 0.0  # float32 multiply-adds, two operations each
    gbytes: float = 0.0  # read bandwidth, GB/s

    def measure(self) -> None:
        from levelhead import _engine

        threads = cores()
        self.gflops = max(self.gflops, _engine.measure_fma_peak(threads))
        self.gbytes = max(self.gbytes, _engine.measure_read_bandwidth(threads))

    def is_bandwidth_bound(self, case: Case) -> bool:
        """Moving the bytes would take longer than the arithmetic, both at their limits."""
        return case.min_bytes / self.gbytes > case.flops / self.gflops

    def rate(self, case: Case, seconds: float) -> tuple[float, str, float]:
        """The case's rate in the unit of the limit that binds it, and its share of that limit."""
        if self.is_bandwidth_bound(case):
            rate = case.min_bytes / seconds / 1e9
            return rate, "GB/s", rate / self.gbytes
        rate = case.flops / seconds / 1e9
        return rate, "GFLOP/s", rate / self.gflops
