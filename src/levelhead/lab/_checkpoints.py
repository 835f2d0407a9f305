"""The models that a long measurement trains, kept one by one, so that it can be resumed.

They are plain JSON, which runs no code when it is read and gives back every number as it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .._files import write_whole
from ._experiment import Experiment


class _Loaded:
    """A `_train.Trained` from an earlier run, but for the records behind its rows."""

    def __init__(self, heads: list[dict[str, Any]], **fields: Any) -> None:
        self._heads = heads
        for name, value in fields.items():
            setattr(self, name, np.array(value) if isinstance(value, list) else value)

    def heads(self) -> Iterator[dict[str, Any]]:
        yield from self._heads


@contextmanager
def checkpoints(
    experiment: Experiment, folder: Path, finished: Callable[[bool], None]
) -> Iterator[None]:
    """Meanwhile the experiment's `train` takes models from the folder if they are there.

    finished: called after each model; True if it was there already
    """
    module: Any = experiment.module
    train = module.train
    folder.mkdir(parents=True, exist_ok=True)

    def train_or_load(*given: Any, **options: Any) -> Any:
        asked = repr((experiment.traces or experiment.version, given, sorted(options.items())))
        path = folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            trained: Any = _Loaded(**kept) if "heads" in kept else kept
        except (OSError, ValueError, TypeError):  # not there, or damaged
            trained = train(*given, **options)
            write_whole(path, json.dumps(_fields(trained)))
            finished(False)
        else:
            finished(True)
        return trained

    module.train = train_or_load
    try:
        yield
    finally:
        module.train = train


def _fields(trained: Any) -> dict[str, Any]:
    """What is kept of a model: a dict as it is, of a `Trained` all that JSON can hold."""
    if isinstance(trained, dict):
        return trained
    names = {field.name for field in dataclasses.fields(trained)} - {"records"}
    fields = {name: getattr(trained, name) for name in names} | {"heads": list(trained.heads())}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }
