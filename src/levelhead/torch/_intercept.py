"""Seeing every attention call, whoever makes it: the function is intercepted, not the module.

Three roads lead to attention: `F.scaled_dot_product_attention`, `levelhead.torch.attention`, and
products with a softmax (_eager.py). nn.MultiheadAttention and nn.TransformerEncoder leave their
fast path by themselves while a function mode is on, and then take one of the three.
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

from .._result import AttentionResult
from . import _ops, _padding
from ._attention import Given, attention, compute, normalise
from ._calls import Call, EagerCall, FusedCall, Heard
from ._eager import NOTED, Origin, follow, origin, write_note
from ._elsewhere import tiled_gradients, tiled_health
from ._makers import ModuleNames, heads_of, maker
from ._rows import hidden_bias
from ._sdpa import is_plain, understand
from ._written_out import is_written_out, write_out


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
_OPERATIONS = {"scaled_dot_product_attention", "attention", "softmax"}
_NAMES = NOTED | _OPERATIONS | {"__get__"} | {func.__name__ for func in _AROUND}


class Listener(NamedTuple):
    """Who wants to hear of calls; names: of its model's modules, if it has one."""

    on_call: Callable[[Call], None]
    names: ModuleNames | None


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
        if name not in _NAMES or not self.listeners:
            return func(*args, **kwargs)
        if name == "__get__":  # a property
            name = func.__self__.__name__
            if name == _padding.QUESTION:
                _padding.keep_zeros()
        if name in NOTED:
            return func(*args, **kwargs) if _is_traced() else follow(name, func, args, kwargs)
        if name in _OPERATIONS and not _is_traced():
            return self._operation(name, func, args, kwargs)
        if name in _NAMES and func in _AROUND:
            with self:
                return _AROUND[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _operation(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._scaled_dot_product(func, args, kwargs)
        if func is attention:
            return self._attention(func, *args, **kwargs)
        return self._softmax(func, args, kwargs) if name == "softmax" else func(*args, **kwargs)

    def _tell(self, call: Call, heard: Heard) -> None:
        frame = sys._getframe(4)  # who called the function that was intercepted
        for listener in tuple(self.listeners):
            told = copy.copy(call) if len(self.listeners) > 1 else call
            module = maker(listener.names, frame)
            told.module, told.other = module or "", module is None
            listener.on_call(told)
            if told.on_gradients is not None:
                heard.hearers.append(told.on_gradients)

    # ------------------------------------------------------------ one function computes it

    def _scaled_dot_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        heard, written = Heard(), None
        try:
            call = understand(sys._getframe(3), *args, **kwargs)
            if call is None:
                return func(*args, **kwargs)
            given, dropout, causal, folded = call
            if away := is_elsewhere(given.query):
                output, sums = func(*args, **kwargs), tiled_health(given)
            elif is_written_out(dropout):
                with torch.no_grad():
                    *_, sums = self._run(given, heard)
                output, *written = write_out(given, dropout, causal)
            else:
                output, *_, sums = self._run(given, heard)
        except (TypeError, ValueError):
            return func(*args, **kwargs)  # a wrong call: PyTorch says so in its own words
        self._tell(FusedCall(given, sums, _scale_of(given.query)), heard)
        if heard and away and output.requires_grad:
            shape = *given.query.shape[:-1], given.value.shape[-1]
            output.register_hook(lambda g: heard(tiled_gradients(given, g.reshape(shape))))
        elif heard and written is not None:
            weights, logits = written
            _hear_gradients(heard, ~hidden_bias(logits.detach()), logits, weights)
        return output.flatten(0, 1) if folded and not away else output

    def _attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Any:
        if not all(map(is_plain, (query, key, value))):
            return func(query, key, value, **options)
        lse, health, weights = (
            options.pop(f"return_{name}", False) for name in ("lse", "health", "weights")
        )
        given, heard = normalise(query, key, value, **options), Heard()
        output, rows, matrix, sums = self._run(given, heard, weights, lse)
        call = FusedCall(given, sums, _scale_of(given.query))
        self._tell(call, heard)
        if not (lse or health or weights):
            return output
        shape = *(query.shape[:-2] or (1,)), sums.shape[-1]
        return AttentionResult(
            output,
            rows if lse else None,
            matrix if weights else None,
            type(call.health)(call.health.sums.reshape(shape)) if health else None,
        )

    def _run(
        self, given: Given, heard: Heard, weights: bool = False, lse: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        number = next(_ops.numbers)
        _ops.listeners[number] = heard
        try:
            return compute(given, True, weights, number, lse)
        finally:
            del _ops.listeners[number]  # from here on the graph holds it

    # ------------------------------------------------------------ products and a softmax

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        logits: Tensor = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        note = origin(logits)
        if note is None or not note.dk or dim not in (-1, result.dim() - 1):
            return result
        write_note(result, Origin(weights=True))
        try:
            call = _eager_call(note, logits.detach(), sys._getframe(3))
        except RuntimeError:  # matrices that do not fit together: a form that we do not know
            return result
        heard = Heard()
        self._tell(call, heard)
        if heard:
            _hear_gradients(heard, call.counted, logits, result)
        return result


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether PyTorch must compute, and health comes from tiles of scores beside it."""
    return not tensor.is_cpu


def _is_traced() -> bool:
    """Whether tensors are stand-ins now, which have no values to look at."""
    return _ops._transformed() or torch._C._get_tracing_state() is not None


def _scale_of(query: Tensor) -> float:
    """What a query was multiplied with before the call."""
    note = origin(query)
    return 1.0 if note is None else note.scale


def _eager_call(note: Origin, logits: Tensor, frame: FrameType) -> EagerCall:
    """The call that a softmax completes, its matrices as (batch, heads, queries, keys)."""
    scores, null, hidden = note.scores, None, note.hidden
    if scores is None:
        scores = logits
    elif logits.shape[-1] == scores.shape[-1] + 1:
        logits, null = logits[..., :-1], logits[..., -1:]
    heads = heads_of(logits.shape[0], frame) if logits.dim() == 3 else 0

    def four(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, heads)) if x.dim() == 3 else x.flatten(0, -4)

    return EagerCall(
        four(scores.expand(logits.shape)),
        four(logits),
        None if hidden is None else four(hidden.expand(logits.shape)),
        None if null is None else four(null),
        note.dk,
        note.scale,
        note.cap,
    )


def _hear_gradients(heard: Heard, counted: Tensor, logits: Tensor, weights: Tensor) -> None:
    """Take the norms of the gradients by the weights and by the logits when they arrive."""
    if not (weights.requires_grad and logits.requires_grad):
        return
    squares: dict[str, Tensor] = {}

    def keep(name: str, grad: Tensor) -> None:
        if grad.shape[-1] == counted.shape[-1] + 1:  # without the sink's column
            grad = grad[..., :-1]
        seen = torch.where(counted, grad.reshape(counted.shape).double(), 0)
        squares[name] = seen.square().sum((-2, -1))
        if len(squares) == 2:
            heard(torch.stack([squares["weights"], squares["logits"]], -1))
            squares.clear()

    weights.register_hook(lambda grad: keep("weights", grad))
    logits.register_hook(lambda grad: keep("logits", grad))
