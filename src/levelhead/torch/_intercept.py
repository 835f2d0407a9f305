"""Seeing every attention call, whoever makes it: the function is intercepted, not the module.

Three roads lead to attention: `F.scaled_dot_product_attention`, `levelhead.torch.attention`, and
products with a softmax (_eager.py). nn.MultiheadAttention and nn.TransformerEncoder leave their
fast path by themselves while a function mode is on, and then take one of the three.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._result import AttentionResult
from . import _ops
from ._attention import (
    Given,
    attention,
    compute,
    normalise,
    sdpa_options,
    sdpa_tensors,
)
from ._calls import Call, EagerCall, FusedCall, Heard
from ._eager import NOTED, Origin, origin, take_note, write_note

_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_SDPA = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in {
            "query": inspect.Parameter.empty,
            "key": inspect.Parameter.empty,
            "value": inspect.Parameter.empty,
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        }.items()
    ]
)


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


@contextmanager
def listen(on_call: Callable[[Call], None], model: nn.Module | None = None) -> Iterator[None]:
    """Hear of every attention call made inside, on this thread.

    >>> import torch, levelhead.torch
    >>> layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 10, 64)
    >>> with levelhead.torch.listen(lambda call: print(call.kind, call.shape), layer):
    ...     _ = layer(x, x, x)
    eager (2, 4, 10, 10)

    on_call: called with a `Call`: its health, and its scores and weights on request
    model: gives the dotted names of the modules that make the calls; without one, a call bears
        the name of its module's class
    Compiled parts of a model run eagerly inside.
    """
    stance = torch.compiler.set_stance("force_eager")
    try:
        with Interceptor(on_call, module_names(model)):
            yield
    finally:
        stance.__exit__(None, None, None)


def module_names(model: nn.Module | None) -> dict[int, str] | None:
    """Dotted name by id, without what torch.compile puts in between."""
    if model is None:
        return None
    return {
        id(module): ".".join(part for part in name.split(".") if part != "_orig_mod")
        for name, module in model.named_modules()
    }


class Interceptor(TorchFunctionMode):
    """Hands every attention call to `on_call`."""

    def __init__(self, on_call: Callable[[Call], None], names: dict[int, str] | None) -> None:
        super().__init__()
        self.on_call, self.names = on_call, names
        self._numbers = itertools.count(1)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in NOTED:
            result = func(*args, **kwargs)
            take_note(name, args, kwargs, result)
            return result
        if name == "softmax":
            return self._softmax(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._scaled_dot_product(func, args, kwargs)
        if func is attention:
            return self._attention(*args, **kwargs)
        if func in _AROUND:
            with self:
                return _AROUND[func](*args, **kwargs)
        return func(*args, **kwargs)

    # ------------------------------------------------------------ one function computes it

    def _scaled_dot_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            call = _SDPA.bind(*args, **kwargs)
            call.apply_defaults()
            query, key, value, mask, dropout, causal, scale, grouped = call.args
            if dropout == 1 or not all(map(_is_plain, (query, key, value))):
                return func(*args, **kwargs)
            tensors = sdpa_tensors(query, key, value, grouped)
            given = normalise(*tensors, **sdpa_options(mask, dropout, causal, scale))
            return self._compute(given)[0]
        except (TypeError, ValueError):
            return func(*args, **kwargs)  # a wrong call: PyTorch says so in its own words

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        lse, health, weights = (
            options.pop(f"return_{name}", False) for name in ("lse", "health", "weights")
        )
        given = normalise(query, key, value, **options)
        output, rows, matrix, call = self._compute(given, weights)
        if not (lse or health or weights):
            return output
        seen = call.health
        if health and query.dim() != 4:
            seen = type(seen)(seen.sums.reshape(*(query.shape[:-2] or (1,)), -1))
        return AttentionResult(
            output, rows if lse else None, matrix if weights else None, seen if health else None
        )

    def _compute(self, given: Given, weights: bool = False) -> tuple[Tensor, Tensor, Tensor, Call]:
        number, heard = next(self._numbers), Heard()
        _ops.listeners[number] = heard
        try:
            output, lse, matrix, sums = compute(given, True, weights, number)
        finally:
            del _ops.listeners[number]  # from here on the graph holds it
        query = origin(given.query)  # scaled beforehand, perhaps
        call = FusedCall(self._maker()[0], given, sums, 1.0 if query is None else query.scale)
        self.on_call(call)
        heard.on_gradients = call.on_gradients
        return output, lse, matrix, call

    # ------------------------------------------------------------ products and a softmax

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        logits: Tensor = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        note = origin(logits)
        if note is None or not note.dk or dim not in (-1, result.dim() - 1):
            return result
        write_note(result, Origin(weights=True))
        module, heads = self._maker()
        call = _eager_call(module, heads, note, logits.detach())
        if call is not None:
            self.on_call(call)
            if call.on_gradients is not None and result.requires_grad and logits.requires_grad:
                _hear_gradients(Heard(call.on_gradients), call.counted, logits, result)
        return result

    # ------------------------------------------------------------ who made the call

    def _maker(self) -> tuple[str, int | None]:
        """Name and number of heads of the innermost module that is running."""
        frame = sys._getframe(2)
        while frame is not None:
            variables = frame.f_code.co_varnames
            if variables and variables[0] == "self":
                module = frame.f_locals.get("self")
                if isinstance(module, nn.Module) and (
                    self.names is None or id(module) in self.names
                ):
                    name = type(module).__name__ if self.names is None else self.names[id(module)]
                    heads = next(
                        (h for a in _HEADS if type(h := getattr(module, a, None)) is int), None
                    )
                    return name, heads
            frame = frame.f_back  # type: ignore[assignment]
        return "", None


def _is_plain(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _eager_call(module: str, heads: int | None, note: Origin, logits: Tensor) -> EagerCall | None:
    """The call that a softmax completes, its matrices as (batch, heads, queries, keys)."""
    scores, null, hidden = note.scores, None, note.hidden
    if scores is None:
        scores = logits
    if scores.numel() != logits.numel():
        if logits.shape[-1] != scores.shape[-1] + 1:
            return None  # not the matrix that we know
        logits, null = logits[..., :-1], logits[..., -1:]
    scores = scores.reshape(logits.shape)

    def four(x: Tensor) -> Tensor:
        if x.dim() == 3:  # (batch·heads, queries, keys), or heads without a batch
            known = heads if heads and x.shape[0] % heads == 0 else x.shape[0]
            return x.view(-1, known, *x.shape[1:]) if x.numel() else x[None]
        return x.flatten(0, -4) if x.dim() > 4 else x

    if hidden is not None:
        hidden = four(hidden.expand(logits.shape))
    return EagerCall(
        module, four(scores.detach()), four(logits), hidden,
        None if null is None else four(null), note.dk, note.scale,
    )  # fmt: skip


def _hear_gradients(heard: Heard, counted: Tensor, logits: Tensor, weights: Tensor) -> None:
    """Take the norms of the gradients by the weights and by the logits when they arrive."""
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
