"""Interleaved timing, best of many.

Every contender keeps a thread pool in the one process that all of them share, and an idle pool
spins for a while before it sleeps; on a machine with few cores that spinning would be charged to
whoever runs next. So a turn begins by waiting until the process is quiet, goes on with unmeasured
calls that wake the contender's own pool and refill the caches, and only then measures. Turns
rotate: slow drifts of the machine hit all contenders alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

Call = Callable[[], object]
Key = TypeVar("Key")

SHORTEST_SAMPLE = 200e-6  # a shorter call is repeated in an inner loop until it lasts this long
TURNS = 6  # turns each contender gets within the budget, at least
QUIET_SLICE = 0.003
QUIET_SHARE = 0.1  # below this share of one core the process counts as quiet
QUIET_LIMIT = 0.3


def wait_until_quiet() -> bool:
    """Sleep until no thread of this process is spinning; False if the limit came first."""
    deadline = time.perf_counter() + QUIET_LIMIT
    while time.perf_counter() < deadline:
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(QUIET_SLICE)
        used = (time.process_time() - cpu) / (time.perf_counter() - wall)
        if used < QUIET_SHARE:
            return True
    return False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def sample(call: Call, repeats: int) -> float:
    """Seconds per call over `repeats` calls in a row."""
    clock = time.perf_counter
    if repeats == 1:
        start = clock()
        call()
        return clock() - start
    turns = range(repeats)
    start = clock()
    for _ in turns:
        call()
    return (clock() - start) / repeats


def turn(call: Call, seconds: float) -> float:
    """One turn of one contender: settle, warm up, then the best sample within `seconds`."""
    wait_until_quiet()
    first = sample(call, 1)
    if first > seconds:  # so slow that the second call is all it gets
        return min(first, sample(call, 1))
    # A slow call is warm after one; a fast one needs its pool awake and its branches learned.
    for _ in range(min(50, int(0.1 * seconds / max(first, 1e-7)))):
        call()
    estimate = min(first, sample(call, 1))
    repeats = max(1, round(SHORTEST_SAMPLE / max(estimate, 1e-8)))
    best = sample(call, repeats)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() + best * repeats < deadline:
        best = min(best, sample(call, repeats))
    return best


def race(
    contenders: Mapping[Key, Call],
    seconds: float,
    turns: int = TURNS,
    each_round: Call | None = None,
) -> dict[Key, float]:
    """Best seconds per call of each contender, in about `seconds` for all of them together.

    Every contender gets `turns` turns of equal length, in rotating order, and at least one
    measured call a turn however slow it is. `each_round` is called once a round, untimed.
    """
    names = list(contenders)
    best = dict.fromkeys(names, float("inf"))
    slice_seconds = seconds / (turns * max(1, len(names)))
    with no_garbage_collection():
        for round_number in range(turns):
            if each_round:
                wait_until_quiet()
                each_round()
            shift = round_number % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                best[name] = min(best[name], turn(contenders[name], slice_seconds))
    return best


def alternate(contenders: Mapping[Key, Call], seconds: float) -> dict[Key, float]:
    """Best seconds per call of contenders that share a thread pool, one call after the other.

    With nothing to settle in between, a quiet moment of the machine serves all of them. Every
    second round goes the other way, so that nobody always follows the same one.
    """
    calls = list(contenders.items())
    best = {name: min(sample(call, 1), sample(call, 1)) for name, call in calls}
    repeats = {name: max(1, round(SHORTEST_SAMPLE / max(s, 1e-8))) for name, s in best.items()}
    with no_garbage_collection():
        deadline = time.perf_counter() + seconds
        rounds = 0
        while rounds < TURNS or time.perf_counter() < deadline:
            rounds += 1
            for name, call in calls[:: 1 if rounds % 2 else -1]:
                best[name] = min(best[name], sample(call, repeats[name]))
    return best
