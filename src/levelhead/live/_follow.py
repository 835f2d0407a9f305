"""What a live page shows: the latest run of a store, read as it grows."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from .._health.describe import plural
from ..report import Points, plan, points_data
from ..store import Run, StoreError, read_run

QUIET = 60.0  # seconds without a step after which a run may have been cut off
MORE = 1.5  # times the points of a plan, after which the run is thinned anew


class Follower:
    """The latest run of a file that may not be there yet, may vanish, and may be written anew.

    Every step is read once, however many pages look; more than a page can hold are thinned anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._points = Points()
        self._taken = 0  # steps of the run that are in the points, or stand behind them
        self._planned = plan(_NOTHING)
        self._generation = 0  # grows when what pages have is of no use any more

    def look(self, generation: str = "", have: str = "", stamp: str = "") -> dict[str, Any]:
        """What there is to tell a page.

        generation, have, stamp: as this said at its last look, and how many points it has; "" is
            a page that has nothing

        Gives a note in words ("" if there is none); "data" with the points that the page lacks, or
        None if nothing has changed.
        """
        with self._lock:
            try:
                run = read_run(self.path)
                self._follow(run)
            except StoreError as error:
                return {"note": self._missing(error), "data": None, "stamp": stamp}
            now = (
                f"{self._generation} {len(run.steps)} {len(run.alerts)} {_logged(run)} {run.ended}"
            )
            answer = {"note": _pace(run), "generation": str(self._generation), "stamp": now}
            if stamp == now:
                return answer | {"data": None}
            known = have.isdecimal() and generation == str(self._generation)
            start = min(int(have), len(self._points.points)) if known else 0
            data = points_data(run, self._planned, self._points, start)
            following = "ended" if run.ended else "followed as it is written"
            about = {"run": f"{run.id} {run.started}", "title": run.name, "following": following}
            return answer | {"data": data | about}

    def _follow(self, run: Run) -> None:
        if not self._goes_on(run):
            self._begin_anew(run)
        elif self._taken < len(run.steps):
            new = [[place] for place in range(self._taken, len(run.steps))]
            if len(self._planned.groups) + len(new) > MORE * self._planned.most:
                self._begin_anew(run)
            else:
                layers = self._points.layout()
                self._points.read(run, new)
                self._planned = self._planned.with_more(new)
                self._generation += layers != self._points.layout()
        self._run, self._taken = run, len(run.steps)

    def _goes_on(self, run: Run) -> bool:
        """Whether it is the run that is known, with nothing of it taken back."""
        old = self._run
        return (
            old is not None
            and (old.id, old.started, old.phase) == (run.id, run.started, run.phase)
            and run.times[: self._taken] == old.times
            and run.steps[: self._taken] == old.steps
        )

    def _begin_anew(self, run: Run) -> None:
        planned, points = plan(run), Points()
        points.read(run, planned.groups)
        self._planned, self._points = planned, points
        self._generation += 1

    def _missing(self, error: StoreError) -> str:
        name = self.path.name
        if not self.path.exists():
            if self._run is None:
                return f"Waiting for {name}: it is not there yet."
            return f"{name} is gone: this is what was last seen of it. Waiting for it to be back."
        if self.path.stat().st_size == 0 or "no run yet" in str(error):
            return f"Waiting for the first run in {name}."
        return f"{name} cannot be read at the moment: {error}."


_NOTHING = Run.from_records([])


def _logged(run: Run) -> str:
    """Changes when something is logged, also for a step that had ended."""
    return ",".join(f"{len(steps)}:{values[-1]}" for steps, values in run.scalars.values())


def _pace(run: Run) -> str:
    """That nothing has come for long."""
    if run.ended or not run.times:
        return "" if run.ended else "The run has begun; no step is recorded yet."
    typical = (run.times[-1] - run.times[0]) / max(1, len(run.times) - 1)
    silent = time.time() - run.times[-1]
    if silent < max(QUIET, 10 * typical):
        return ""
    long = (
        plural(int(silent // 60), "minute")
        if silent < 7200
        else plural(int(silent // 3600), "hour")
    )
    return f"No new step for {long}: the run may have been cut off."
