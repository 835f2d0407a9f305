"""Saying what goes on, on stderr: a moving line on a terminal, seldom lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Tell = Callable[[str], None]
PATIENCE = 2.0  # seconds until a log is told what takes so long


@contextmanager
def progress() -> Iterator[Tell]:
    """Gives a function that takes what is being done now.

    >>> from levelhead.report._progress import progress
    >>> with progress() as tell:
    ...     tell("loading the model")
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda what: status.update(f"{what} …")
        return
    last = time.monotonic()

    def tell(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PATIENCE:
            last = time.monotonic()
            console.print(f"{what} …", markup=False, highlight=False, soft_wrap=True)

    yield tell
