"""The engine as two operators of torch.library: what compile, autograd, vmap and opcheck see.

Queries have at least three dimensions here. What may change from call to call (seed, lengths,
offsets) comes in tensors, so that a compiled graph need not be traced again. `differentiable` is
the same call for everybody: for torch.func, which an operator's own gradient does not reach, and
for plain eager code, where PyTorch's dispatcher would take longer than a small call.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .. import _engine
from .._health import GRAD_SUMS, HEALTH_SUMS
from .._options import Options
from ._vmap import mapped


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    offsets: Tensor | None,
    lengths: Tensor | None,
    scales: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    offset: int,
    scale: float,
    softcap: float,
    dropout: float,
    threads: int,
    health: bool,
    weights: bool,
    listener: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, weights and health sums; the last two are empty unless asked for."""
    options = _options(
        sinks, offsets, lengths, scales, seed, left, right, offset, scale, softcap, dropout, threads
    )
    output, lse, matrix, sums = _attend(query, key, value, mask, *options, True, health, weights)
    return (
        output,
        lse,
        query.new_empty(0) if matrix is None else matrix,
        torch.empty(0, dtype=torch.float64) if sums is None else sums,
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any) -> Any:
    """Output, lse, weights and health sums; None for what was not asked for."""
    q, k, v, m = _array(query), _array(key), _array(value), _array(mask)
    found = _engine.forward(q, k, v, m, *options)
    if isinstance(found, np.ndarray):  # nothing but the output was
        return _tensor(found, query), None, None, None
    output, lse, matrix, health = found
    return (
        _tensor(output, query),
        None if lse is None else torch.from_numpy(lse),
        None if matrix is None else _tensor(matrix, query),
        None if health is None else torch.from_numpy(health.sums),
    )


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    offsets: Tensor | None,
    lengths: Tensor | None,
    scales: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    offset: int,
    scale: float,
    softcap: float,
    dropout: float,
    threads: int,
    health: bool,
    scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, health sums and dS; the last two are empty unless asked for."""
    options = _options(
        sinks, offsets, lengths, scales, seed, left, right, offset, scale, softcap, dropout, threads
    )
    q, k, v, m = _array(query), _array(key), _array(value), _array(mask)
    g, o, rows = _array(grad), _array(output), _array(lse.contiguous())
    dq, dk, dv, sums, ds = _engine.backward(g, q, k, v, o, rows, m, *options, health, scores)
    return (
        _tensor(dq, query),
        _tensor(dk, query),
        _tensor(dv, query),
        torch.empty(0, dtype=torch.float64) if sums is None else torch.from_numpy(sums),
        lse.new_empty(0) if ds is None else torch.from_numpy(ds),
    )


attention_op = torch.library.custom_op(
    "levelhead::attention", forward, mutates_args=(), device_types="cpu"
)
backward_op = torch.library.custom_op(
    "levelhead::attention_backward", backward, mutates_args=(), device_types="cpu"
)


def _options(
    sinks: Tensor | None,
    offsets: Tensor | None,
    lengths: Tensor | None,
    scales: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    offset: int,
    scale: float,
    softcap: float,
    dropout: float,
    threads: int,
) -> Options:
    """Options in the engine's order."""
    return (
        left,
        right,
        offset if offsets is None else _numbers(offsets, torch.int64),
        None if lengths is None else _numbers(lengths, torch.int64),
        scale if scales is None else _numbers(scales, torch.float64),
        softcap,
        None if sinks is None else _numbers(sinks, torch.float64),
        dropout,
        0 if seed is None else int(seed) % 2**64,
        threads or torch.get_num_threads(),
    )


def _numbers(tensor: Tensor, dtype: torch.dtype) -> Any:
    return tensor.detach().to(dtype).contiguous().numpy()


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
    tensors, plain = inputs[:9], inputs[9:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, output[0], output[1])
    ctx.plain, ctx.listener = plain[:-3], listeners.get(plain[-1])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, value, mask, sinks, *rest, output, lse = ctx.saved_tensors
    mask_wanted, sinks_wanted = ctx.needs_input_grad[3:5]
    dq, dk, dv, sums, ds = _once(
        grad, query, key, value, output, lse, mask, sinks, *rest, *ctx.plain,
        bool(ctx.listener), mask_wanted,
    )  # fmt: skip
    if ctx.listener:
        ctx.listener(sums)
    dmask = ds.sum_to_size(mask.shape).to(mask.dtype) if mask_wanted else None
    dsinks = _sink_gradient(grad, output, lse, sinks) if sinks_wanted else None
    return dq, dk, dv, dmask, dsinks, *(None,) * 14


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

    One function without a signature: to bind arguments takes PyTorch longer than a small call.
    """

    backward = staticmethod(_backward)

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        results = forward(*inputs)
        _remember(ctx, inputs, results)
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


def differentiable(*inputs: Any, lse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_op`, also under torch.func.grad, jacrev and their combinations with vmap.

    lse: without it and without gradients lse may be empty too.
    """
    results: Any
    if _transformed():
        results = _Differentiable.apply(*inputs)
    elif not _is_plain(inputs[:9]):
        results = attention_op(*inputs)
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:5]):
        results = _Direct.apply(*inputs)
    else:
        found = _attend(*inputs[:4], *_options(*inputs[4:16]), lse, *inputs[16:18])
        results = tuple(NOTHING if x is None else x for x in found)
    return results  # type: ignore[no-any-return]


def _once(*inputs: Any) -> Any:
    if _transformed():
        return _Once.apply(*inputs)
    # With gradients on, someone wants a gradient of the gradient, which only the operator refuses.
    plain = not torch.is_grad_enabled() and _is_plain(inputs[:12])
    return backward(*inputs) if plain else backward_op(*inputs)


attention_op.register_vmap(mapped(attention_op, arrays=4))
backward_op.register_vmap(mapped(backward_op, arrays=7))
