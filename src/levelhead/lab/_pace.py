"""How far a run is, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ._experiment import Experiment


@dataclass(frozen=True)
class Progress:
    """Where a run is: before each measurement, within a long one, and once more at the end.

    experiment, seed: what is measured next; "" and -1 at the end
    done, total:      measurements; a long one counts piece by piece, as a fraction
    elapsed, left:    seconds since the start, and about how many are still to come
    """

    experiment: str
    seed: int
    done: float
    total: int
    elapsed: float
    left: float


class Pace:
    """Tells the progress of measurements, one after another."""

    def __init__(
        self,
        todo: Sequence[tuple[Experiment, int]],
        size: str,
        tell: Callable[[Progress], None] | None,
    ) -> None:
        self._todo, self._tell, self._start = todo, tell, time.monotonic()
        self._expected = [one.seconds[size] for one, _ in todo]
        self._found = 0.0  # expected seconds of what did not have to be done

    def at(self, done: int, part: float = 0.0, found: float = 0.0) -> None:
        """So many measurements are done, and part of the next; found of it was there already."""
        if self._tell is None:
            return
        one, seed = self._todo[done] if done < len(self._todo) else (None, -1)
        now = self._expected[done] if one else 0.0
        behind, self._found = sum(self._expected[:done]) + part * now, self._found + found * now
        elapsed = time.monotonic() - self._start
        # The estimates are of another machine: rescaled by what was seen on this one.
        worked = behind - self._found
        pace = elapsed / worked if worked > 1e-9 else 1.0
        left = pace * (sum(self._expected) - behind)
        name = one.name if one else ""
        self._tell(Progress(name, seed, done + part, len(self._todo), elapsed, left))
