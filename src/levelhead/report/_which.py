"""From what a person types to the two things that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..store import Run, StoreError, read_run
from ._compare import Comparison, compare, side_of_checkup, side_of_run
from ._words import subtitle


def compare_runs(store: Path, before: str, after: str) -> Comparison:
    """Two runs of a store, or of others: each an id, a name, "other.db" or "other.db:2"."""
    runs = [find_run(store, before), find_run(store, after)]
    names = [run.name for run in runs]
    if names[0] == names[1]:
        names = [f"{run.name} ({_place(run)})" for run in runs]
    old, new = (side_of_run(run, name) for run, name in zip(runs, names, strict=True))
    return compare(old, new)


def find_run(store: Path, which: str) -> Run:
    """The run that is meant; the error of an unknown one lists what there is."""
    try:
        return _in_store(store, which)
    except StoreError:
        path, colon, run = which.rpartition(":")
        if Path(which).is_file():
            return read_run(Path(which))
        if colon and Path(path).is_file():
            return _in_store(Path(path), run)
        raise


def _in_store(store: Path, which: str) -> Run:
    if which.isdecimal():
        try:
            return read_run(store, int(which))
        except StoreError:
            pass  # a name may be a number
    try:
        return read_run(store, which)
    except StoreError as error:
        number = which.isdecimal() and "holds no run" in str(error)
        raise StoreError(str(error).replace(f"'{which}'", which)) if number else error from None


def _place(run: Run) -> str:
    return f"run {run.id} of {run.path.name}" if run.path else f"run {run.id}"


def compare_checkups(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Two models that were examined, on the same texts if the targets take any."""
    notes = []
    if before["inputs"] != after["inputs"]:
        notes.append("They were examined on different inputs, so differences may come from those.")
    if before["model"] == after["model"]:
        before = {**before, "model": f"{before['model']} (the other)"}
    return compare(
        side_of_checkup(before, subtitle(before)), side_of_checkup(after, subtitle(after)), notes
    )
