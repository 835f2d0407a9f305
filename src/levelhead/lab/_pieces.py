"""The models that a long measurement trains, kept one by one: interrupted, it goes on where it was.

Plain JSON, which runs no code when it is read, and which gives back every number as it was.
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

from ._experiment import Experiment
from ._results import write_text


class _Kept:
    """As a `_language.Trained` that was trained earlier, but for the records behind its rows."""

    def __init__(self, heads: list[dict[str, Any]], **fields: Any) -> None:
        self._heads = heads
        for name, value in fields.items():
            setattr(self, name, np.array(value) if isinstance(value, list) else value)

    def heads(self) -> Iterator[dict[str, Any]]:
        yield from self._heads


@contextmanager
def kept_pieces(
    experiment: Experiment, folder: Path, code: str, finished: Callable[[bool], None]
) -> Iterator[None]:
    """While this lasts, what the experiment trains is taken from the folder if it is there.

    code:     of the experiment; pieces of other code are not taken for its own
    finished: called after each piece; True if it was there already
    """
    module: Any = experiment.module
    train = module.train

    def piece(*given: Any, **options: Any) -> Any:
        asked = hashlib.sha256(repr((code, given, sorted(options.items()))).encode()).hexdigest()
        path = folder / f"{asked[:16]}.json"
        try:
            kept: Any = _Kept(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # not there, or damaged
            kept = train(*given, **options)
            write_text(path, json.dumps(_fields(kept)))
            finished(False)
        else:
            finished(True)
        return kept

    module.train = piece
    try:
        yield
    finally:
        module.train = train


def _fields(trained: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(trained)} - {"records"}
    fields = {name: getattr(trained, name) for name in names} | {"heads": list(trained.heads())}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }
