"""Installing the interceptor on a thread while anybody listens, and removing it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from ._attribution import module_names
from ._calls import Call
from ._forwards import in_backward
from ._intercept import Interceptor, Listener


@contextmanager
def listen(
    on_call: Callable[[Call], None],
    model: nn.Module | None = None,
    on_not_understood: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Call a function with every attention call made inside, on this thread.

    >>> import torch, levelhead.torch
    >>> layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 10, 64)
    >>> with levelhead.torch.listen(lambda call: print(call.kind, call.shape), layer):
    ...     _ = layer(x, x, x)
    eager (2, 4, 10, 10)

    on_call: called with a `Call`: its health, and its scores and weights on request
    model: gives the dotted names of the modules that make the calls; without one, a call bears
        the name of its module's class
    on_not_understood: called with the module's name for attention that could not be measured
    Compiled parts of a model run eagerly inside.
    """
    interceptor = ThreadInterceptor.current()
    listener = Listener(on_call, module_names(model), on_not_understood)
    interceptor.add(listener)
    try:
        yield
    finally:
        interceptor.remove(listener)


class ThreadInterceptor:
    """The one interceptor of a thread, on its stack of function modes while anybody listens."""

    _local = threading.local()
    _eager: Any = None  # compiled code would not be seen: it runs eagerly meanwhile
    _on = 0

    @classmethod
    def current(cls) -> ThreadInterceptor:
        if not hasattr(cls._local, "interceptor"):
            cls._local.interceptor = cls()
        interceptor: ThreadInterceptor = cls._local.interceptor
        return interceptor

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._mode = Interceptor()
        self._installed = False

    def add(self, listener: Listener) -> None:
        if listener not in self._mode.listeners:
            self._mode.listeners.append(listener)
        self.update()

    def remove(self, listener: Listener) -> None:
        if listener in self._mode.listeners:
            self._mode.listeners.remove(listener)
        self.update()

    def is_current(self) -> bool:
        return threading.get_ident() == self._thread

    def update(self) -> None:
        """Install the mode while anybody listens: one that is not on the stack costs nothing.

        Another thread cannot do that, nor a backward pass, which puts the stack back as it was, nor
        can it end inside a compiled call that runs eagerly for it and must not break its graph.
        Without listeners the interceptor then lets all pass.
        """
        wanted = bool(self._mode.listeners)
        if wanted == self._installed or not self.is_current() or in_backward():
            return
        if not wanted and _in_full_graph():
            return
        self._installed = wanted
        _move(self._mode, wanted)
        ThreadInterceptor._on += 1 if wanted else -1
        if wanted and ThreadInterceptor._on == 1:
            ThreadInterceptor._eager = torch.compiler.set_stance("force_eager")
        elif not wanted and ThreadInterceptor._on == 0:
            ThreadInterceptor._eager.__exit__(None, None, None)


def _in_full_graph() -> bool:
    """Whether a function compiled with fullgraph=True runs; it fails if it finds itself eager."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            return bool(getattr(frame.f_locals.get("self"), "fullgraph", False))
        frame = frame.f_back
    return False


def _move(ours: Interceptor, on: bool) -> None:
    """Put a mode under all others, or take it out from there.

    A mode that ends takes the topmost away, so ours must never stand above one that may end
    before it. Only the default device insists on a place below.
    """
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    modes = [mode for mode in modes if mode is not ours]
    if on:
        modes.insert(bool(modes) and isinstance(modes[0], DeviceContext), ours)
    for mode in modes:
        _push_mode(mode)
