"""Section: the forward pass, every case against every peer."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from benchmarks import contender
from benchmarks.agreement import TOLERANCE, difference
from benchmarks.cases import Case
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.machine import Limit
from benchmarks.peers import Peer, Unable, Variant
from benchmarks.timing import Call, alternate, race, wait_until_quiet

OURS, OURS_WITH_HEALTH = "levelhead", "levelhead with health"
CLOSE = 1.1  # a peer's variants this close to its fastest all go into the final race
HOPELESS_AT_ONCE = 4.0  # a slow variant this far behind in its checked call is not run again
SLOW = 0.02  # seconds; below, one call says too little to exclude anybody
HOPELESS = 2.0  # a peer this far behind the best peer keeps its time from the heats


@dataclass(frozen=True)
class PeerTime:
    peer: str
    variant: str
    seconds: float


@dataclass
class ForwardResult:
    case: Case
    limit: Limit  # measured in every round of the race
    seconds: float = float("nan")
    health_seconds: float = float("nan")
    # The best of many more calls, these two in turn: health costs less than the machine's moods do,
    # and only neighbours in time share them.
    alone_seconds: float = float("nan")
    alone_health_seconds: float = float("nan")
    peers: list[PeerTime] = field(default_factory=list)  # the fastest first
    unable: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def join(self, later: ForwardResult) -> None:
        """The best of two sweeps, contender by contender."""
        self.seconds = min(self.seconds, later.seconds)
        self.health_seconds = min(self.health_seconds, later.health_seconds)
        self.alone_seconds = min(self.alone_seconds, later.alone_seconds)
        self.alone_health_seconds = min(self.alone_health_seconds, later.alone_health_seconds)
        self.limit.join(later.limit)
        fastest: dict[tuple[str, str], PeerTime] = {}
        for time_ in sorted([*self.peers, *later.peers], key=lambda t: t.seconds):
            fastest.setdefault((time_.peer, time_.variant), time_)
        self.peers = list(fastest.values())
        self.unable = list(dict.fromkeys(self.unable + later.unable))
        self.mismatches = list(dict.fromkeys(self.mismatches + later.mismatches))

    @property
    def best(self) -> PeerTime | None:
        return self.peers[0] if self.peers else None

    @property
    def ratio(self) -> float:
        """How many times as fast as the best peer."""
        return self.best.seconds / self.seconds if self.best else float("nan")

    @property
    def health_ratio(self) -> float:
        """The same with health on, which no peer reports."""
        return self.best.seconds / self.health_seconds if self.best else float("nan")

    @property
    def health_overhead(self) -> float:
        return self.alone_health_seconds / self.alone_seconds - 1

    @property
    def rate(self) -> float:
        return self.limit.rate(self.case, self.seconds)

    @property
    def share(self) -> float:
        """Of the limit."""
        return self.rate / self.limit.best


def run_forward(case: Case, peers: list[Peer], seconds: float, limit: Limit) -> ForwardResult:
    """Check every variant, run heats within the peers, then race the fastest with ours."""
    inputs = make_inputs(case)
    result = ForwardResult(case, limit)
    with ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.context())
        ours = contender.forward(inputs)
        with_health = contender.forward_with_health(inputs)
        expected = np.asarray(ours(), dtype=np.float32)
        if not np.array_equal(np.asarray(with_health().output, np.float32), expected):
            result.mismatches.append("levelhead: health changed the output")
        variants, heats = _checked_variants(inputs, peers, expected, result)
        slowest = max(SLOW, HOPELESS_AT_ONCE * min(heats.values(), default=0.0))
        entered = {key: variants[key].run for key, first in heats.items() if first <= slowest}
        heats |= race(entered, seconds / 2, turns=2)
        finalists = _finalists(heats)
        calls: dict[str, Call] = {OURS: ours, OURS_WITH_HEALTH: with_health}
        calls |= {f"{name}: {label}": variants[name, label].run for name, label in finalists}
        times = race(calls, seconds, each_round=limit.measure)
        ours_alone = {name: calls[name] for name in (OURS, OURS_WITH_HEALTH)}
        alone = alternate(ours_alone, seconds / 2)
    result.seconds, result.health_seconds = times[OURS], times[OURS_WITH_HEALTH]
    result.alone_seconds, result.alone_health_seconds = alone[OURS], alone[OURS_WITH_HEALTH]
    for (name, label), heat in heats.items():  # in the race all have as many chances as ours
        result.peers.append(PeerTime(name, label, times.get(f"{name}: {label}", heat)))
    result.peers.sort(key=lambda t: t.seconds)
    return result


def _checked_variants(
    inputs: Inputs, peers: list[Peer], expected: np.ndarray, result: ForwardResult
) -> tuple[dict[tuple[str, str], Variant], dict[tuple[str, str], float]]:
    """The variants that give our result, and what the checked call took; the others are noted.

    Compiled variants made a call when they were built, so the checked call finds them warm.
    """
    variants: dict[tuple[str, str], Variant] = {}
    seconds: dict[tuple[str, str], float] = {}
    tolerance = TOLERANCE[inputs.case.dtype]
    for peer in peers:
        for variant in peer.variants(inputs):
            if isinstance(variant, Unable):
                result.unable.append(f"{peer.name}, {variant.label}: {variant.reason}")
                continue
            wait_until_quiet()
            start = time.perf_counter()
            raw = variant.run()
            took = time.perf_counter() - start
            off = difference(expected, np.asarray(variant.to_numpy(raw)))
            if off <= tolerance:
                variants[peer.name, variant.label] = variant
                seconds[peer.name, variant.label] = took
            else:
                result.mismatches.append(
                    f"{peer.name}, {variant.label}: differs by {off:.1e}, allowed {tolerance:.0e}"
                )
    return variants, seconds


def _finalists(heats: dict[tuple[str, str], float]) -> list[tuple[str, str]]:
    if not heats:
        return []
    overall = min(heats.values())
    fastest: dict[str, float] = {}
    for (peer, _), seconds in heats.items():
        fastest[peer] = min(seconds, fastest.get(peer, seconds))
    return [
        (peer, label)
        for (peer, label), seconds in heats.items()
        if seconds <= CLOSE * fastest[peer] and seconds <= HOPELESS * overall
    ]
