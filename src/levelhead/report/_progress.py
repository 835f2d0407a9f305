"""Saying what goes on, on stderr: a moving line on a terminal, seldom lines in a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

Tell = Callable[[str], None]
PATIENCE = 2.0  # seconds between looks at what a log should be told


@contextmanager
def progress() -> Iterator[Tell]:
    """Gives a function that takes what is being done now.

    >>> from levelhead.report import progress
    >>> with progress() as tell:
    ...     tell("loading the model")
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda what: status.update(Text(f"{what} …"))
        return
    now: list[str] = []
    over = threading.Event()
    thread = threading.Thread(target=_log, args=(console, now, over), daemon=True)
    thread.start()
    try:
        yield now.append
    finally:
        over.set()
        thread.join()


def _log(console: Console, now: list[str], over: threading.Event) -> None:
    """Every two seconds the latest, unless it was said already; short work says nothing."""
    said = None
    while not over.wait(PATIENCE):
        if now and now[-1] != said:
            said = now[-1]
            console.print(Text(f"{said} …"), soft_wrap=True)
