"""The forwards of a model: hooks on them, and what they are for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function, FunctionCtx

_APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


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


def after_backward(call: Callable[[], None]) -> None:
    """Call when the backward pass that runs now is over.

    A reentrant checkpoint runs another one inside: after that one there is no call.
    """

    def unless_inside() -> None:
        frame: Any = sys._getframe(1)
        passes = 0
        while frame is not None:
            passes += frame.f_code is _BACKWARD
            frame = frame.f_back
        if passes < 2:
            call()

    torch.autograd.Variable._execution_engine.queue_callback(unless_inside)


def without_gradients() -> bool:
    """Whether gradients are off here, and not only for the time of a checkpoint or the like."""
    return not (torch.is_grad_enabled() or in_backward() or _in_recorded_function())


def _in_recorded_function() -> bool:
    """Whether an autograd Function runs its forward, which is without gradients, for training."""
    context: Any = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] not in ((), ("self",)):
            context = frame.f_locals.get(code.co_varnames[0])
        elif code is _APPLY:
            if isinstance(context, FunctionCtx):
                recorded = bool(context.next_functions)  # type: ignore[attr-defined]
            else:  # one that gets its context only afterwards, in setup_context
                recorded = any(getattr(x, "requires_grad", False) for x in frame.f_locals["args"])
            if recorded:
                return True
            context = None
        frame = frame.f_back
    return False


def entry_modules(
    model: nn.Module, names: Mapping[int, str], layers: Iterable[str]
) -> list[nn.Module]:
    """Modules to hook so that no forward to the attention of these layers goes unnoticed.

    The layers themselves; but PyTorch's encoder layers leave their fast path for a hook anywhere
    inside, so of those the module around.
    """
    found, wanted = {}, set(layers)
    for path, module in model.named_modules():
        if names.get(id(module)) not in wanted:
            continue
        way, entry = model, model
        for part in path.split(".") if path else ():
            way = way.get_submodule(part)
            if isinstance(way, nn.TransformerEncoderLayer):
                break
            if getattr(way.forward, "__func__", None) is not nn.Module.forward:  # no mere list
                entry = way
        found[id(entry)] = entry
    found.pop(id(model), None)  # has hooks of its own
    return list(found.values())
