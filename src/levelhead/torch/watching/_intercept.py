"""Seeing every attention call, whoever makes it: the function is intercepted, not the module.

Three roads lead to attention: `F.scaled_dot_product_attention`, `levelhead.torch.attention`, and
two products with a softmax between them (_eager_trace.py). nn.MultiheadAttention and
nn.TransformerEncoder leave their fast path by themselves while a function mode is on, and then take
one of the three.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._health import Health
from ..._result import AttentionResult
from .. import _ops
from .._attention import CallOptions, attention, compute, normalise
from .._row_statistics import hidden_bias, widened
from .._tiled_health import tiled_gradients, tiled_health
from . import _padding
from ._attribution import ModuleNames, calling_module, common_frame, running_modules
from ._axes import KEYS, Axes, new_axes
from ._calls import Call, EagerCall, FusedCall, GradientCallbacks, Pending
from ._eager_trace import BEGIN, PROPERTIES, follow, operand_of
from ._layout import Layout, lay_out
from ._math_path import is_written_out, write_out
from ._notes import Factor, Scores, Weights, note_of, write_note
from ._products import PRODUCTS, follow_product, follow_sum
from ._sdpa import has_values, is_plain, understand


def _body(func: Any) -> Any:
    """The function without its question whether a mode is on, so that what it calls is seen."""
    asks = dict.fromkeys(
        (name for name in func.__globals__ if name.startswith("has_torch_function")),
        lambda *_: False,
    )
    body = FunctionType(func.__code__, {**func.__globals__, **asks}, argdefs=func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


# Python functions around attention calls: its projections, and the backward that a checkpoint
# computes anew in.
_AROUND = {
    func: _body(func)
    for func in (
        F.multi_head_attention_forward,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}
_AROUND_NAMES = {func.__name__ for func in _AROUND}
_SDPA = F.scaled_dot_product_attention  # context_parallel puts another one in its place
_SOFTMAX = {"softmax", "special_softmax", "_safe_softmax"}
_OPERATIONS = {"scaled_dot_product_attention", "attention"} | _SOFTMAX


class Listener(NamedTuple):
    """Who wants to know of calls.

    names: of its model's modules, if it has one
    on_not_understood: called with the name of a module whose attention was not understood
    matrices: also wants those of calls, not only their statistics
    """

    on_call: Callable[[Call], None]
    names: ModuleNames | None
    on_not_understood: Callable[[str], None] | None = None
    matrices: bool = True


class Interceptor(TorchFunctionMode):
    """Hands every attention call to its listeners."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if not self.listeners:
            return func(*args, **kwargs)
        if name == "__get__":  # a property
            name = func.__self__.__name__
            if name == _padding.QUESTION:
                _padding.keep_zeros()
            if name not in PROPERTIES:
                return func(*args, **kwargs)
        if name in _AROUND_NAMES and func in _AROUND:
            with self:
                return _AROUND[func](*args, **kwargs)
        if name in _OPERATIONS and not _is_traced():
            return self._operation(name, func, args, kwargs)
        operand = None if name in PRODUCTS else operand_of(name, args, kwargs)
        if (operand is None and name not in BEGIN) or _is_traced():
            return func(*args, **kwargs)
        if name in PRODUCTS or name == "sum":
            return self._product(name, func, args, kwargs)
        return follow(name, func, args, kwargs, operand)

    def _operation(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        frame = sys._getframe(2)  # who called the function that was intercepted
        if func is F.scaled_dot_product_attention or func is _SDPA:
            return self._scaled_dot_product(frame, func, args, kwargs)
        if func is attention:
            return self._attention(frame, func, *args, **kwargs)
        if name in _SOFTMAX:
            return self._softmax(frame, func, args, kwargs)
        return func(*args, **kwargs)

    def _report(self, frame: FrameType, call: Call, callbacks: GradientCallbacks) -> None:
        for listener in tuple(self.listeners):
            reported = copy.copy(call) if len(self.listeners) > 1 else call
            module = calling_module(listener.names, frame)
            reported.module, reported.other = module or "", module is None
            listener.on_call(reported)
            callbacks += reported.gradient_callbacks

    def _report_not_understood(self, frame: FrameType) -> None:
        """Report attention that was not understood."""
        for listener in tuple(self.listeners):
            module = calling_module(listener.names, frame)
            if listener.on_not_understood is not None and module is not None:
                listener.on_not_understood(module)

    # ------------------------------------------------------------ one function computes it

    def _scaled_dot_product(
        self, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        callbacks, written, call = GradientCallbacks(), None, None
        try:
            call = understand(frame, *args, **kwargs)
            if call is not None:
                given, dropout, folded = call
                if away := is_elsewhere(given.query):
                    output, sums = func(*args, **kwargs), tiled_health(given)
                elif is_written_out(dropout):
                    with torch.no_grad():
                        *_, sums = self._run(given, callbacks)
                    output, *written = write_out(given, dropout)
                else:
                    output, *_, sums = self._run(given, callbacks)
        except (TypeError, ValueError):
            call = None  # a wrong call: PyTorch says so in its own words
        if call is None:
            output = func(*args, **kwargs)
            self._report_not_understood(frame)
            return output
        tensors = dict(zip(("query", "key"), args, strict=False)) | kwargs
        scale = _scale_of(tensors["query"]) * _scale_of(tensors["key"])
        self._report(frame, FusedCall(given, sums, scale), callbacks)
        if callbacks and away and output.requires_grad:
            shape = *given.query.shape[:-1], given.value.shape[-1]
            output.register_hook(lambda g: callbacks(tiled_gradients(given, g.reshape(shape))))
        elif callbacks and written is not None:
            weights, logits = written
            callbacks.counted = ~hidden_bias(logits.detach())
            _measure_gradients(callbacks, None, logits, weights)
        return output.flatten(0, 1) if folded and not away else output

    def _attention(
        self, frame: FrameType, func: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Any:
        others = [options.get(name) for name in ("mask", "sinks")]
        if not (
            all(map(is_plain, (query, key, value)))
            and all(x is None or has_values(x) for x in others)
        ):
            result = func(query, key, value, **options)
            self._report_not_understood(frame)
            return result
        lse, health, weights = (
            options.pop(f"return_{name}", False) for name in ("lse", "health", "weights")
        )
        given, callbacks = normalise(query, key, value, **options), GradientCallbacks()
        output, rows, matrix, sums = self._run(given, callbacks, weights, lse)
        call = FusedCall(given, sums, _scale_of(query) * _scale_of(key))
        self._report(frame, call, callbacks)
        if not (lse or health or weights):
            return output
        shape = *(query.shape[:-2] or (1,)), sums.shape[-1]
        return AttentionResult(
            output,
            rows if lse else None,
            matrix if weights else None,
            Health(call.health.sums.reshape(shape)) if health else None,
        )

    def _run(
        self,
        given: CallOptions,
        callbacks: GradientCallbacks,
        weights: bool = False,
        lse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        number = next(_ops.numbers)
        _ops.listeners[number] = callbacks
        try:
            return compute(given, True, weights, number, lse)
        finally:
            del _ops.listeners[number]  # from here on the graph holds it

    # ------------------------------------------------------------ products and a softmax

    def _softmax(
        self, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        logits: Tensor = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if type(dim) is not int or logits.dim() < 2 or not _is_there(logits):
            return result
        dim %= logits.dim()
        pending = Pending(set(map(id, running_modules(frame))))
        # Measured now: nobody knows what becomes of the logits before their weights are used.
        understood = _eager_call(logits, dim, frame)
        if understood is not None:
            pending.call, axes = understood
            _measure_gradients(pending.callbacks, pending.call.layout, logits, result)
            if not any(listener.matrices for listener in self.listeners):
                pending.call.drop_matrices()
        elif logits.dim() > 2:
            axes = new_axes(logits.shape)
            keys = tuple(axis._replace(role=KEYS) for axis in axes[dim])
            axes = *axes[:dim], keys, *axes[dim + 1 :]
        else:
            return result
        write_note(result, Weights(axes, (pending,)))
        return result

    def _product(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if name == "sum":
            complete = follow_sum(args, kwargs)
        else:
            complete = follow_product(name, args, kwargs, result)
        for pending, understood in complete:
            frame = common_frame(sys._getframe(2), pending.modules)
            if understood and (call := pending.call) is not None:
                pending.call, pending.is_reported = None, True
                self._report(frame, call, pending.callbacks)
                if pending.callbacks:
                    pending.callbacks.counted = call.counted
            elif not pending.is_reported:
                pending.is_reported = True
                self._report_not_understood(frame)
        return result


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether PyTorch must compute, and health comes from tiles of scores beside it."""
    return not tensor.is_cpu


def _is_there(tensor: Tensor) -> bool:
    """Whether a tensor has values to look at."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)


def _eager_call(logits: Tensor, dim: int, frame: FrameType) -> tuple[EagerCall, Axes] | None:
    """What a softmax over a dimension of logits is, and the axes of its weights; None if unknown.

    frame: of who made the call
    """
    note = note_of(logits)
    found = lay_out(note.axes, dim, frame) if isinstance(note, Scores) else None
    if found is None:
        return None
    assert isinstance(note, Scores)
    layout, axes = found
    logits = logits.detach()
    scores = logits if note.scores is None else note.scores
    try:
        call = EagerCall(layout, scores, logits, note.hidden, note.dk, note.scale, note.cap)
    except RuntimeError:  # matrices that do not fit together: a form that we do not know
        return None
    return call, axes


def _is_traced() -> bool:
    """Whether tensors are stand-ins now, which have no values to look at."""
    return _ops._transformed() or torch._C._get_tracing_state() is not None


def _scale_of(tensor: Tensor) -> Factor:
    """What queries or keys were multiplied with before the call."""
    note = note_of(tensor)
    return 1.0 if note is None else note.factor


def _measure_gradients(
    callbacks: GradientCallbacks, layout: Layout | None, logits: Tensor, weights: Tensor
) -> None:
    """Take the norms of the gradients by the weights and by the logits when they arrive.

    layout: of the logits; None if they are matrices as `callbacks.counted` is
    """
    if not (weights.requires_grad and logits.requires_grad):
        return
    squares: dict[str, Tensor] = {}

    def keep(name: str, grad: Tensor) -> None:
        if not callbacks or callbacks.counted is None:
            return
        matrices = grad if layout is None else layout.keys(grad)
        seen = torch.where(callbacks.counted, widened(matrices), 0).square().sum((-2, -1))
        squares[name] = seen if layout is None else seen.reshape(layout.shape[:2])
        if len(squares) == 2:
            callbacks(torch.stack([squares["weights"], squares["logits"]], -1))
            squares.clear()

    weights.register_hook(lambda grad: keep("weights", grad))
    logits.register_hook(lambda grad: keep("logits", grad))
