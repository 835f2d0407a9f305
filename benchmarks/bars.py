"""The bars: what the numbers must reach, and whether they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, log, nan

from benchmarks.backward import BackwardResult
from benchmarks.forward import ForwardResult
from benchmarks.machine import Limits
from benchmarks.memory import BARS_MB, MemoryResult
from benchmarks.tiny import TinyResult


@dataclass
class Results:
    """All that a run measured; a section that did not run is empty."""

    limits: Limits = field(default_factory=Limits)
    forward: list[ForwardResult] = field(default_factory=list)
    backward: list[BackwardResult] = field(default_factory=list)
    tiny: TinyResult | None = None
    memory: list[MemoryResult] = field(default_factory=list)
    outside: set[str] = field(default_factory=set)  # cases that no bar speaks of


@dataclass(frozen=True)
class Bar:
    what: str
    value: float
    must: float
    aim: float | None
    at_least: bool  # else at most
    unit: str = "x"  # x, %, us, MB
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.value >= self.must if self.at_least else self.value <= self.must

    @property
    def aim_met(self) -> bool:
        if self.aim is None:
            return self.passed
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def geometric_mean(values: Iterable[float]) -> float:
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs)) if logs else nan


def bars(results: Results) -> list[Bar]:
    """Every bar that the run measured, in the order of the summary."""
    return [
        *_forward_bars(results),
        *_limit_bars(results),
        *_backward_bars(results),
        *_tiny_bars(results),
        *_memory_bars(results),
    ]


def _forward_bars(results: Results) -> list[Bar]:
    judged = [
        r
        for r in results.forward
        if r.case.dtype == "float32" and r.case.name not in results.outside and r.best
    ]
    found: list[Bar] = []
    if not judged:
        return found
    worst = min(judged, key=lambda r: r.ratio)
    mean = geometric_mean(r.ratio for r in judged)
    found += [
        Bar("forward / best peer, worst case", worst.ratio, 1.05, None, True, "x", worst.case.name),
        Bar("forward / best peer, geometric mean", mean, 1.25, 1.5, True, "x", _count(judged)),
    ]
    # Two timings of equal code differ by chance either way, so the mean takes them as they come;
    # only ratios have a geometric mean, hence the detour over 1 + overhead.
    mean = geometric_mean(1 + r.health_overhead for r in judged) - 1
    found.append(
        Bar("cost of health, geometric mean", 100 * mean, 6, 3, False, "%", _count(judged))
    )
    long = [r for r in judged if r.case.S >= 64]
    if long:
        most = max(long, key=lambda r: r.health_overhead)
        what = "cost of health, worst case with 64 keys or more"
        cost = 100 * most.health_overhead
        found.append(Bar(what, cost, 12, None, False, "%", most.case.name))
    worst = min(judged, key=lambda r: r.health_ratio)
    what = "forward with health / best peer, worst case"
    found.append(Bar(what, worst.health_ratio, 1, None, True, "x", worst.case.name))
    return found


def _limit_bars(results: Results) -> list[Bar]:
    floors = {
        "prefill-2048-d64": (78.0, 85.0),
        "prefill-2048-d128": (82.0, 90.0),
        "decode-4096-mha": (75.0, 90.0),
        "decode-4096-gqa": (75.0, 90.0),
        "decode-16384-mha": (75.0, 90.0),
        "decode-16384-gqa": (75.0, 90.0),
    }
    found = []
    for r in results.forward:
        if r.case.name in floors:
            must, aim = floors[r.case.name]
            of = "read bandwidth" if r.limit.unit == "GB/s" else "FMA peak"
            what = f"{r.case.name}, share of {of}"
            detail = f"{r.rate:.1f} of {r.limit.best:.1f} {r.limit.unit}"
            found.append(Bar(what, 100 * r.share, must, aim, True, "%", detail))
    return found


def _backward_bars(results: Results) -> list[Bar]:
    judged = [
        r
        for r in results.backward
        if r.case.name not in results.outside and r.torch_seconds == r.torch_seconds
    ]
    if not judged:
        return []
    worst = min(judged, key=lambda r: r.ratio)
    mean = geometric_mean(r.ratio for r in judged)
    name = worst.case.name
    return [
        Bar("forward + backward / PyTorch, worst case", worst.ratio, 1.0, None, True, "x", name),
        Bar(
            "forward + backward / PyTorch, geometric mean",
            mean, 1.15, 1.4, True, "x", _count(judged),
        ),
    ]  # fmt: skip


def _tiny_bars(results: Results) -> list[Bar]:
    tiny = results.tiny
    if tiny is None:
        return []
    micro = tiny.seconds * 1e6
    detail = f"{micro:.2f} us, PyTorch {tiny.torch_seconds * 1e6:.2f} us; aim 3 us"
    # One bar with two measures: the must is a share of PyTorch's time, the aim a time.
    aim = 0.6 if micro <= 3 else 0.0
    return [Bar("3×3 call, share of PyTorch's time", tiny.share, 0.6, aim, False, "x", detail)]


def _memory_bars(results: Results) -> list[Bar]:
    return [
        Bar(
            f"extra memory, {r.what}, 16384 keys, {_heads(r.heads)}",
            r.extra_mb, BARS_MB[r.what], None, False, "MB",
        )
        for r in results.memory
    ]  # fmt: skip


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def _count(judged: Sequence[object]) -> str:
    return f"{len(judged)} cases"
