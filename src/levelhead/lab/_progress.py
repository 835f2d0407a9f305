"""A progress bar for the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ._pace import Progress


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar with the experiment and the time left; what it gives goes to `run(progress=...)`.

    >>> from levelhead import lab
    >>> with lab.progress_bar() as progress:                              # doctest: +SKIP
    ...     lab.run(quick=True, out="lab", progress=progress)
    """
    from rich import progress as rich  # noqa: PLC0415 - the lab itself needs no terminal
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    seen: list[tuple[Progress, float]] = []

    class TimeLeft(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Text:
            if not seen:
                return Text("")
            last, when = seen[-1]
            left = max(0, round(last.left - (time.monotonic() - when)))
            return Text(f"about {left // 60}:{left % 60:02d} left")

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        TimeLeft(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("lab", total=None)

        def tell(progress: Progress) -> None:
            seen.append((progress, time.monotonic()))
            label = (
                f"{progress.experiment}, seed {progress.seed}" if progress.experiment else "done"
            )
            bar.update(task, description=label, completed=progress.done, total=progress.total)

        yield tell
