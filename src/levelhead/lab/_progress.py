"""How far a run is, how long the rest will take, and a bar that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .._progress import progress
from ._experiment import Experiment


@dataclass(frozen=True)
class Progress:
    """Where a run is: before each measurement, within a long one, and once more at the end.

    experiment, seed: what is measured next; "" and -1 at the end
    done, total:      measurements; a long one counts as a fraction while its models are trained
    elapsed, left:    seconds since the start, and about how many are still to come
    """

    experiment: str
    seed: int
    done: float
    total: int
    elapsed: float
    left: float


@dataclass(frozen=True)
class Finished:
    """An experiment all of whose figures are there.

    verdict, why: as in results.json
    seconds:      how long it took now; 0 if all of it was there already
    """

    experiment: str
    claim: int
    verdict: str
    why: str
    seconds: float


class Tracker:
    """Reports the progress of measurements, one after another."""

    def __init__(
        self,
        todo: Sequence[tuple[Experiment, int]],
        size: str,
        report: Callable[[Progress], None] | None,
    ) -> None:
        self._todo, self._report, self._start = todo, report, time.monotonic()
        self._expected = [one.seconds[size] for one, _ in todo]
        self._found = 0.0  # expected seconds of what was there already

    def at(self, done: int, part: float = 0.0, found: float = 0.0) -> None:
        """So many measurements are done, and part of the next; found of it was there already."""
        if self._report is None:
            return
        one, seed = self._todo[done] if done < len(self._todo) else (None, -1)
        now = self._expected[done] if one else 0.0
        behind, self._found = sum(self._expected[:done]) + part * now, self._found + found * now
        elapsed = time.monotonic() - self._start
        # The estimates come from another machine, so they are rescaled by the time it took here.
        worked = behind - self._found
        pace = elapsed / worked if worked > 1e-9 else 1.0
        left = pace * (sum(self._expected) - behind)
        name = one.name if one else ""
        self._report(Progress(name, seed, done + part, len(self._todo), elapsed, left))


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar with the experiment and the time left, for `run(progress=...)`.

    >>> from levelhead import lab
    >>> with lab.progress_bar() as progress:                              # doctest: +SKIP
    ...     lab.run(quick=True, out="lab", progress=progress)
    """
    with progress() as tell:

        def show(now: Progress) -> None:
            part, detail = (
                (now.experiment, f"seed {now.seed}") if now.experiment else ("Writing", "")
            )
            tell(part, detail, done=now.done, total=now.total, left=now.left)

        yield show
