"""PyTorch on one thread, and trainings side by side on the cores that this leaves."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from .. import cpu_info

_processes: Executor | None = None


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: with matrices this small, more threads are slower."""
    import torch  # noqa: PLC0415

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def side_by_side(cores: int | None = None) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` whose calls overlap, and meanwhile a process for each core, for `in_a_process`.

    cores: None for all that there are; on one, all is as without it
    """
    global _processes  # noqa: PLW0603 - whoever trains need not know who else does
    cores = cores or cpu_info()["threads"]
    if cores == 1:
        yield map
        return
    # A forked process would inherit threads in the middle of their work.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context) as _processes, ThreadPoolExecutor(cores) as threads:
        try:
            yield threads.map
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            _processes.shutdown(wait=False, cancel_futures=True)
            _processes = None


def in_a_process(work: Callable[..., Any], *given: Any) -> Any:
    """What a function gives, from a process of its own if there are any, otherwise from this one.

    work: found by its name in its module, as pickle wants it
    """
    return work(*given) if _processes is None else _processes.submit(work, *given).result()
