"""The engine as two operators of torch.library: what compile, autograd, vmap and opcheck see.

Queries have at least three dimensions here. What may change from call to call (seed, lengths,
offsets) comes in tensors, so that a compiled graph need not be traced again. `differentiable` is
the same call for everybody: for torch.func, which an operator's own gradient does not reach, and
for plain eager code, where PyTorch's dispatcher would take longer than a small call.
"""

from __future__ import annotations

import itertools
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .. import _engine
from .._health import GRAD_SUMS, HEALTH_SUMS
from ._call_options import CallOptions
from ._vmap import mapped

# The operators take the fields of CallOptions in their order, then what is wanted. The gradient's
# own tensors stay among them where they are: PyTorch keeps compiled backward passes on disk, and
# would not notice another order.
FIELDS = {name: kind for name, kind in get_type_hints(CallOptions).items() if name != "matrix"}
FORWARD = {**FIELDS, "health": bool, "weights": bool, "listener": int}
BACKWARD: dict[str, Any] = dict.fromkeys(("grad", "query", "key", "value", "output", "lse"), Tensor)
BACKWARD |= {**FIELDS, "health": bool, "scores": bool}
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", float: "float", bool: "bool"}
MASK, SINKS = (list(FIELDS).index(name) for name in ("mask", "sinks"))
TENSORS = sum(_TYPES[kind].startswith("Tensor") for kind in FIELDS.values())


def _schema(arguments: dict[str, Any], results: int) -> str:
    inputs = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in arguments.items())
    return f"({inputs}) -> ({', '.join(['Tensor'] * results)})"


def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, weights and health sums; the last two are empty unless asked for."""
    return _forward(CallOptions(*inputs[:-3]), *inputs[-3:])


def _forward(
    given: CallOptions, health: bool, weights: bool, listener: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, lse, matrix, sums = _attend(given, True, health, weights)
    return (
        output,
        lse,
        given.query.new_empty(0) if matrix is None else matrix,
        torch.empty(0, dtype=torch.float64) if sums is None else sums,
    )


def _attend(given: CallOptions, lse: bool, health: bool, weights: bool) -> Any:
    """Output, lse, weights and health sums; None for what was not asked for."""
    query = given.query
    q, k, v, m = _array(query), _array(given.key), _array(given.value), _array(given.mask)
    found = _engine.forward(q, k, v, m, *given.for_engine(), lse, health, weights)
    if isinstance(found, np.ndarray):  # nothing but the output was
        return _tensor(found, query), None, None, None
    output, rows, matrix, summed = found
    return (
        _tensor(output, query),
        None if rows is None else torch.from_numpy(rows),
        None if matrix is None else _tensor(matrix, query),
        None if summed is None else torch.from_numpy(summed.sums),
    )


def backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, health sums and dS; the last two are empty unless asked for."""
    grad, query, key, value, output, lse, *others, health, scores = inputs
    given = CallOptions(query, key, value, *others)
    return _differentiate(grad, output, lse, given, health, scores)


def _differentiate(
    grad: Tensor, output: Tensor, lse: Tensor, given: CallOptions, health: bool, scores: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query = given.query
    q, k, v, m = _array(query), _array(given.key), _array(given.value), _array(given.mask)
    g, o, rows = _array(grad), _array(output), _array(lse.contiguous())
    dq, dk, dv, sums, ds = _engine.backward(
        g, q, k, v, o, rows, m, *given.for_engine(), health, scores
    )
    return (
        _tensor(dq, query),
        _tensor(dk, query),
        _tensor(dv, query),
        torch.empty(0, dtype=torch.float64) if sums is None else torch.from_numpy(sums),
        lse.new_empty(0) if ds is None else torch.from_numpy(ds),
    )


attention_op = torch.library.custom_op(
    "levelhead::attention", forward, mutates_args=(), device_types="cpu", schema=_schema(FORWARD, 4)
)
backward_op = torch.library.custom_op(
    "levelhead::attention_backward", backward, mutates_args=(), device_types="cpu",
    schema=_schema(BACKWARD, 5),
)  # fmt: skip


def _array(tensor: Tensor | None) -> Tensor | None:
    """What the engine may read."""
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _tensor(array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if like.dtype is torch.bfloat16 else tensor


NOTHING = torch.empty(0)  # in place of a result that nobody asked for


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


@attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
    health, weights, _ = options[-3:]
    rows = query.shape[:-1]
    sums = (*query.shape[:-2], len(HEALTH_SUMS)) if health else 0
    return (
        query.new_empty(*rows, value.shape[-1]),
        query.new_empty(rows, dtype=_lse_dtype(query)),
        query.new_empty((*rows, key.shape[-2]) if weights else 0),
        query.new_empty(sums, dtype=torch.float64),
    )


@backward_op.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    health, scores = others[-2:]
    sums = (*query.shape[:-2], len(GRAD_SUMS)) if health else 0
    return (
        query.new_empty(query.shape),
        query.new_empty(key.shape),
        query.new_empty(value.shape),
        query.new_empty(sums, dtype=torch.float64),
        query.new_empty(
            (*query.shape[:-1], key.shape[-2]) if scores else 0, dtype=_lse_dtype(query)
        ),
    )


# ---------------------------------------------------------------- gradients

# Who wants the statistics of a call's backward. The operator carries only a number, as a graph
# can; the listener is here while the operator is called, and held by the graph afterwards.
listeners: dict[int, Any] = {}
numbers = itertools.count(1)  # of all watches alike: threads may have one each


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[0], output[1], *inputs[:TENSORS])
    ctx.numbers, ctx.listener = inputs[TENSORS:-3], listeners.get(inputs[-1])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    output, lse, *tensors = ctx.saved_tensors
    given: Any = CallOptions(*tensors, *ctx.numbers)
    wanted, listener = ctx.needs_input_grad, ctx.listener
    dq, dk, dv, sums, ds = _once(grad, output, lse, given, bool(listener), wanted[MASK])
    if listener:
        listener(sums)
    gradients = [dq, dk, dv, *[None] * (len(wanted) - 3)]
    if wanted[MASK]:
        gradients[MASK] = ds.sum_to_size(given.mask.shape).to(given.mask.dtype)
    if wanted[SINKS]:
        gradients[SINKS] = _sink_gradient(grad, output, lse, given.sinks)
    return tuple(gradients)


def _sink_gradient(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """-Σ p·δ over the rows, with p = exp(sink - lse) the sink's weight and δ = Σ dO·O."""
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    weight = torch.where(lse == float("-inf"), 0, weight)  # an empty row, and no sink either
    delta = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
    return -(weight * delta).sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)


attention_op.register_autograd(_backward, setup_context=_remember)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "attention: expected to be differentiated once, got a gradient of its gradient; "
        "torch.nn.functional.scaled_dot_product_attention has one"
    )


backward_op.register_autograd(_refuse)


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient as torch.func wants it; forward mode raises, having no jvp."""

    generate_vmap_rule = True
    forward = staticmethod(attention_op)
    setup_context = staticmethod(_remember)
    backward = staticmethod(_backward)


class _Once(torch.autograd.Function):
    """The operator's gradient, as torch.func wants it."""

    generate_vmap_rule = True
    forward = staticmethod(backward_op)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_refuse)


class _Direct(torch.autograd.Function):
    """The engine with its gradient, for plain eager code.

    One function without a signature: to bind arguments takes PyTorch longer than a small call. It
    gets the call as a whole, after its tensors, for autograd to see them where the operator has
    them.
    """

    backward = staticmethod(_backward)

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        given, *wanted = inputs[TENSORS:]
        results = _forward(given, *wanted)
        _remember(ctx, (*given[:-1], *wanted), results)
        return results


def _transformed() -> bool:
    """Whether torch.func is at work, or forward mode, where an operator would lose the tangent."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


PLAIN = {Tensor, Parameter, type(None)}


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether the tensors are what they seem, and nobody wants to see the operators."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and PLAIN.issuperset(map(type, tensors))
    )


def differentiable(
    given: CallOptions, health: bool, weights: bool, listener: int, lse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_op`, also under torch.func.grad, jacrev and their combinations with vmap.

    lse: without it and without gradients lse may be empty too.
    """
    results: Any
    tensors: tuple[Any, ...] = given[:TENSORS]
    wanted = health, weights, listener
    if _transformed():
        results = _Differentiable.apply(*given[:-1], *wanted)
    elif not _is_plain(tensors):
        results = attention_op(*given[:-1], *wanted)
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        results = _Direct.apply(*tensors, given, *wanted)
    else:
        found = _attend(given, lse, health, weights)
        results = tuple(NOTHING if x is None else x for x in found)
    return results  # type: ignore[no-any-return]


def _once(
    grad: Tensor, output: Tensor, lse: Tensor, given: CallOptions, health: bool, scores: bool
) -> Any:
    plain = not _transformed() and _is_plain((grad, output, lse, *given[:TENSORS]))
    # With gradients on, someone wants a gradient of the gradient, which only the operator refuses.
    if plain and not torch.is_grad_enabled():
        return _differentiate(grad, output, lse, given, health, scores)
    operator = _Once.apply if _transformed() else backward_op
    return operator(grad, *given[:3], output, lse, *given[3:-1], health, scores)


attention_op.register_vmap(mapped(attention_op, FORWARD))
backward_op.register_vmap(mapped(backward_op, BACKWARD))
