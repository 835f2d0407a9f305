"""What is going on, on stderr: a bar on a terminal, one line per part in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[..., None]
PATIENCE = 2.0  # seconds; in a log, shorter parts are not worth a line


@contextmanager
def progress() -> Iterator[Tell]:
    """Gives a function, tell(part, detail="", done=0, total=None, left=None).

    >>> from levelhead._progress import progress
    >>> with progress() as tell:
    ...     tell("Reading the inputs", done=1, total=7)

    part:        what is being done now; in a log, one line if it takes long
    detail:      follows the part on a terminal
    done, total: how far it is; without a total the bar only shows that something happens
    left:        about how many seconds are still to come
    """
    from rich.console import Console  # noqa: PLC0415 - `import levelhead.lab` needs no terminal

    console = Console(stderr=True)
    with _bar(console) if console.is_terminal else _log(console) as tell:
        yield tell


@contextmanager
def _bar(console: Console) -> Iterator[Tell]:
    """A line that moves, and that is gone at the end."""
    from rich import progress as rich  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class HowFar(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Text:
            parts = [] if task.total is None else [f"{int(task.completed)} of {int(task.total)}"]
            if task.fields["end"] is not None:
                left = max(0, round(task.fields["end"] - time.monotonic()))
                parts.append(f"about {left // 60}:{left % 60:02d} left")
            return Text(", ".join(parts))

    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), HowFar())
    with rich.Progress(*columns, console=console, transient=True) as bar:

        def tell(
            part: str,
            detail: str = "",
            done: float = 0,
            total: float | None = None,
            left: float | None = None,
        ) -> None:
            for shown in bar.task_ids:
                bar.remove_task(shown)
            end = None if left is None else time.monotonic() + left
            label = f"{part}, {detail}" if detail else part
            # Typed as an int, but a fraction works.
            bar.add_task(label, total=total, completed=done, end=end)  # type: ignore[arg-type]

        yield tell


@contextmanager
def _log(console: Console) -> Iterator[Tell]:
    """Names each part that takes long, once."""
    from rich.text import Text  # noqa: PLC0415

    now, timer = "", threading.Timer(0, lambda: None)

    def stop() -> None:
        timer.cancel()
        if timer.is_alive():
            timer.join()

    def tell(part: str, *_: object, **__: object) -> None:
        nonlocal now, timer
        if part == now:
            return
        stop()
        line = Text(f"{part} …")
        now, timer = part, threading.Timer(PATIENCE, console.print, [line], {"soft_wrap": True})
        timer.start()

    try:
        yield tell
    finally:
        stop()
