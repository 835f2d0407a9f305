"""The runner: every experiment, every seed, one file each, so that it can stop at any time."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._experiment import SIZES, Experiment, LabError, experiments, find, fingerprint
from ._figures import Figures, plain
from ._needs import missing
from ._pace import Pace, Progress
from ._pieces import kept_pieces
from ._results import Outcome, write_json, write_results, write_text


@dataclass(frozen=True)
class LabRun:
    """What a run gave.

    results: what results.json holds, one dict an experiment, those that could not run included
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
) -> LabRun:
    """Measure claims and write results.json, timings.json, index.html and data/*.csv into out.

    >>> import tempfile
    >>> from levelhead import lab
    >>> with tempfile.TemporaryDirectory() as out:
    ...     done = lab.run(["variance"], out=out, size="tiny")
    >>> done.results[0]["claim"]
    2

    names:    experiments or claim numbers; None is all of them
    out:      the folder; made if it is not there. What is finished in it is not measured again
    quick:    the short version, minutes instead of most of an hour
    size:     "tiny", "quick" or "full", instead of quick
    seed:     the first seed
    seeds:    how many; None leaves it to each experiment
    again:    measure again what is finished
    progress: called before each measurement, within long ones, and at the end

    An interrupted run goes on where it stopped. Experiments that need what is not installed are
    in the results as "not run". Others that out has finished in this size are in them too.
    """
    chosen = find(names)
    size = size or ("quick" if quick else "full")
    if size not in SIZES:
        raise LabError(f"size: expected one of {', '.join(SIZES)}, got {size!r}")
    if seeds is not None and seeds < 1:
        raise LabError(f"seeds: expected at least 1, got {seeds}")
    folder = _writable(out)

    bench = _Bench(folder, size, seed, seeds)
    not_run = {one.name: why for one in chosen if (why := missing(one)) is not None}
    bench.measure([one for one in chosen if one.name not in not_run], again, progress)

    outcomes = []
    for one in experiments().values():
        if one.name in not_run:
            outcomes.append(Outcome(one, size, missing=not_run[one.name]))
        elif (runs := bench.finished(one)) is not None:
            outcomes.append(Outcome(one, size, bench.seeds(one), runs))
    results = write_results(folder, outcomes)
    return LabRun(results, not_run, folder, _write_page(folder, outcomes))


def _write_page(folder: Path, outcomes: Sequence[Outcome]) -> Path:
    from ._page import lab_page  # noqa: PLC0415 - imports Plotly

    page = folder / "index.html"
    write_text(page, lab_page(outcomes))
    return page


def _writable(out: str | Path) -> Path:
    """The folder, made and tried, before an hour's work is done for it."""
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


class _Bench:
    """The measurements of one size in one folder."""

    def __init__(self, folder: Path, size: str, seed: int, seeds: int | None) -> None:
        self.folder, self.size, self._seed, self._count = folder / "runs" / size, size, seed, seeds
        self._code = {one.name: fingerprint(one) for one in experiments().values()}

    def seeds(self, one: Experiment) -> list[int]:
        count = self._count or one.seeds[self.size]
        return list(range(self._seed, self._seed + count))

    def finished(self, one: Experiment) -> list[Figures] | None:
        """The figures of all seeds, if they are all there."""
        runs = [self._load(one, seed) for seed in self.seeds(one)]
        return [run for run in runs if run is not None] if None not in runs else None

    def measure(
        self,
        chosen: list[Experiment],
        again: bool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        """Measure what is missing."""
        todo = [
            (one, seed)
            for one in chosen
            for seed in self.seeds(one)
            if again or self._load(one, seed) is None
        ]
        pace = Pace(todo, self.size, progress)
        for done, (one, seed) in enumerate(todo):
            pace.at(done)
            if again:
                self._drop_pieces(one, seed)
            figures = plain(self._measured(one, seed, lambda *part, at=done: pace.at(at, *part)))
            write_json(self._path(one, seed), {"code": self._code[one.name], "figures": figures})
            self._drop_pieces(one, seed)
        pace.at(len(todo))

    def _measured(
        self, one: Experiment, seed: int, tell: Callable[[float, float], None]
    ) -> Figures:
        """Figures; a long measurement keeps its pieces meanwhile, and tells of each."""
        count, finished = one.pieces.get(self.size, 0), list[bool]()
        if not count:
            return one.measure(self.size, seed)

        def note(had: bool) -> None:
            finished.append(had)
            tell(len(finished) / count, had / count)

        with kept_pieces(one, self._path(one, seed).with_suffix(""), self._code[one.name], note):
            return one.measure(self.size, seed)

    def _drop_pieces(self, one: Experiment, seed: int) -> None:
        shutil.rmtree(self._path(one, seed).with_suffix(""), ignore_errors=True)

    def _path(self, one: Experiment, seed: int) -> Path:
        return self.folder / f"{one.name}-{seed}.json"

    def _load(self, one: Experiment, seed: int) -> Figures | None:
        """What is kept, unless it is not there, damaged, or measured by other code."""
        try:
            kept = json.loads(self._path(one, seed).read_text(encoding="utf-8"))
            figures: Figures = kept["figures"]
            return figures if kept["code"] == self._code[one.name] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
