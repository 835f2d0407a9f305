"""The runner: one file per experiment and seed, so that it can stop at any time."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import write_whole
from ._checkpoints import checkpoints
from ._experiment import SIZES, Experiment, LabError, experiments, find
from ._figures import Figures, plain
from ._progress import Finished, Progress, Tracker
from ._results import Outcome, write_json, write_results


@dataclass(frozen=True)
class LabRun:
    """What a run gave.

    results: what results.json holds, one dict per experiment, those that could not run included
    not_run: experiment → why it could not run and what to install
    page:    the page to open
    """

    results: list[dict[str, Any]]
    not_run: dict[str, str]
    out: Path
    page: Path


def run(
    names: Iterable[str] | None = None,
    *,
    out: str | Path = "lab",
    quick: bool = False,
    size: str | None = None,
    seed: int = 0,
    seeds: int | None = None,
    again: bool = False,
    progress: Callable[[Progress], None] | None = None,
    finished: Callable[[Finished], None] | None = None,
) -> LabRun:
    """Measure claims and write results.json, timings.json, index.html and data/*.csv into out.

    >>> import tempfile
    >>> from levelhead import lab
    >>> with tempfile.TemporaryDirectory() as out:
    ...     done = lab.run(["variance"], out=out, size="tiny")
    >>> done.results[0]["claim"]
    2

    names:    experiments or claim numbers; None is all of them
    out:      the folder; it is made if there is none. What it has is not measured again
    quick:    the short version, minutes instead of hours
    size:     "tiny", "quick" or "full", instead of quick
    seed:     the first seed
    seeds:    how many; None leaves it to each experiment
    again:    measure everything again
    progress: called before each measurement, within long ones, and at the end
    finished: called after each experiment, with its verdict

    An interrupted run goes on where it stopped. Experiments that need something that is not
    installed are in the results as "not run". What the folder has from earlier runs of this size
    is in the results, too.
    """
    chosen = find(names)
    size = size or ("quick" if quick else "full")
    if size not in SIZES:
        raise LabError(f"size: expected one of {', '.join(SIZES)}, got {size!r}")
    if seeds is not None and seeds < 1:
        raise LabError(f"seeds: expected at least 1, got {seeds}")
    folder = _writable(out)

    measurements = _Measurements(folder, size, seed, seeds)
    not_run = {one.name: why for one in chosen if (why := one.missing()) is not None}
    for one, seconds in measurements.measure(
        [one for one in chosen if one.name not in not_run], again, progress
    ):
        if finished is not None and (outcome := measurements.outcome(one)) is not None:
            finished(Finished(one.name, one.claim, *outcome.verdict(), seconds))

    outcomes = []
    for one in experiments().values():
        if one.name in not_run:
            outcomes.append(Outcome(one, size, missing=not_run[one.name]))
        elif (outcome := measurements.outcome(one)) is not None:
            outcomes.append(outcome)
    results = write_results(folder, outcomes)
    return LabRun(results, not_run, folder, _write_page(folder, outcomes))


def _write_page(folder: Path, outcomes: Sequence[Outcome]) -> Path:
    from ._page import lab_page  # noqa: PLC0415 - imports Jinja and Plotly

    page = folder / "index.html"
    write_whole(page, lab_page(outcomes))
    return page


def _writable(out: str | Path) -> Path:
    """The folder, made and tested before an hour's work is done for it."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise LabError(f"out: expected a folder, but {folder} is (or lies in) a file") from None
    except OSError as error:
        raise LabError(
            f"out: {folder} cannot be written ({error.strerror}); choose another folder"
        ) from None
    return folder


class _Measurements:
    """The measurements of one size in one folder."""

    def __init__(self, folder: Path, size: str, seed: int, seeds: int | None) -> None:
        self.folder, self.size, self._seed, self._count = folder / "runs" / size, size, seed, seeds

    def seeds(self, one: Experiment) -> list[int]:
        count = self._count or one.seeds[self.size]
        return list(range(self._seed, self._seed + count))

    def outcome(self, one: Experiment) -> Outcome | None:
        """What came out, if the figures of all seeds are there."""
        runs = [run for seed in self.seeds(one) if (run := self._load(one, seed)) is not None]
        complete = len(runs) == len(self.seeds(one))
        return Outcome(one, self.size, self.seeds(one), runs) if complete else None

    def measure(
        self,
        chosen: list[Experiment],
        again: bool,
        progress: Callable[[Progress], None] | None,
    ) -> Iterator[tuple[Experiment, float]]:
        """Measure what is missing; gives each experiment when it is done, and its seconds."""
        todo = [
            (one, seed)
            for one in chosen
            for seed in self.seeds(one)
            if again or self._load(one, seed) is None
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        tracker, done = Tracker(todo, self.size, progress), 0
        for one in chosen:
            began, seeds = time.monotonic(), [seed for each, seed in todo if each is one]
            for seed in seeds:
                tracker.at(done)
                if again:
                    self._drop_models(one, seed)
                self._keep(one, seed, lambda *part, at=done: tracker.at(at, *part))
                done += 1
            yield one, time.monotonic() - began if seeds else 0.0
        tracker.at(len(todo))

    def _keep(self, one: Experiment, seed: int, report: Callable[[float, float], None]) -> None:
        """Measure one seed and write it down; most models are not needed any more."""
        figures = plain(self._measured(one, seed, report))
        write_json(self._path(one, seed), {"version": one.version, "figures": figures})
        if not one.traces:
            self._drop_models(one, seed)

    def _measured(
        self, one: Experiment, seed: int, report: Callable[[float, float], None]
    ) -> Figures:
        """Figures; a long measurement keeps and reports each model that it has trained."""
        count, finished = one.pieces.get(self.size, 0), list[bool]()
        if not count:
            return one.measure(self.size, seed)

        def note(was_there: bool) -> None:
            finished.append(was_there)
            report(len(finished) / count, was_there / count)

        with checkpoints(one, self._models(one, seed), note):
            return one.measure(self.size, seed)

    def _models(self, one: Experiment, seed: int) -> Path:
        return self._path(one, seed).with_suffix("")

    def _drop_models(self, one: Experiment, seed: int) -> None:
        shutil.rmtree(self._models(one, seed), ignore_errors=True)

    def _path(self, one: Experiment, seed: int) -> Path:
        return self.folder / f"{one.name}-{seed}.json"

    def _load(self, one: Experiment, seed: int) -> Figures | None:
        """The figures on disk; None if there are none, or damaged ones, or another version's."""
        try:
            kept = json.loads(self._path(one, seed).read_text(encoding="utf-8"))
            figures: Figures = kept["figures"]
            return figures if kept["version"] == one.version else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
