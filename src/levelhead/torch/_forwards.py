"""The forwards of a model: hooks on them, and what they are for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A forward hook that stays behind when its module is copied or saved, and out of graphs."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._call()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "levelhead.hook")  # takes all, does nothing


def in_backward() -> bool:
    """Whether a backward pass runs on this thread; a checkpoint computes forward in it, again."""
    return torch._C._current_graph_task_id() != -1


def in_function() -> bool:
    """Whether a checkpoint or the like runs: without gradients for now, but for training."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            return True
        frame = frame.f_back
    return False
