"""The engine as two operators of torch.library: what compile, autograd, vmap and opcheck see.

Queries have at least three dimensions here. What may change from call to call (seed, lengths,
offsets) comes in tensors, so that a compiled graph need not be traced again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _engine
from .._attention import Options
from .._health import GRAD_SUMS, HEALTH_SUMS


@torch.library.custom_op("levelhead::attention", mutates_args=(), device_types="cpu")
def attention_op(
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
    q, k, v, m = _array(query), _array(key), _array(value), _array(mask)
    output, lse, matrix, sums = _engine.forward(q, k, v, m, *options, True, health, weights)
    return (
        _tensor(output, query),
        torch.from_numpy(lse),
        query.new_empty(0) if matrix is None else _tensor(matrix, query),
        torch.empty(0, dtype=torch.float64) if sums is None else torch.from_numpy(sums),
    )


@torch.library.custom_op("levelhead::attention_backward", mutates_args=(), device_types="cpu")
def backward_op(
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


def _array(tensor: Tensor | None) -> Any:
    """What the engine reads without a copy; NumPy is the quickest way, but knows no bfloat16."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _tensor(array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if like.dtype is torch.bfloat16 else tensor


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

# Who wants to hear of a call's backward: the op carries only a number, as a graph can.
listeners: dict[int, Any] = {}


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, plain = inputs[:9], inputs[9:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, output[0], output[1])
    ctx.plain, ctx.listener = plain[:-3], plain[-1]


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, value, mask, sinks, *rest, output, lse = ctx.saved_tensors
    mask_wanted, sinks_wanted = ctx.needs_input_grad[3:5]
    listener = listeners.get(ctx.listener)
    dq, dk, dv, sums, ds = backward_op(
        grad, query, key, value, output, lse, mask, sinks, *rest, *ctx.plain,
        listener is not None, mask_wanted,
    )  # fmt: skip
    if listener is not None:
        listener(sums)
    dmask = ds.sum_to_size(mask.shape).to(mask.dtype) if mask_wanted else None
    dsinks = _sink_gradient(grad, output, lse, sinks) if sinks_wanted else None
    return dq, dk, dv, dmask, dsinks, *(None,) * 14


def _sink_gradient(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """-Σ p·δ over the rows, with p = exp(sink - lse) the sink's weight and δ = Σ dO·O."""
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    delta = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
    return -(weight * delta).sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)


attention_op.register_autograd(_backward, setup_context=_remember)


# ---------------------------------------------------------------- vmap


def _mapped(op: Any, arrays: int) -> Any:
    """A rule for vmap: the mapped dimension becomes one more batch dimension in front.

    The first `arrays` arguments have the query's dimensions; the last of them, the mask, perhaps
    fewer.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        numbers, per_entry = in_dims[arrays:], args[arrays + 1 : arrays + 3]
        if any(dim is not None for dim in numbers) or any(x is not None for x in per_entry):
            raise NotImplementedError(
                "attention under vmap: expected query, key, value and mask alone to be mapped, and "
                "no query_offset or key_lengths per batch entry; make the mapped dimension a batch "
                "dimension instead"
            )
        rank = args[1].dim() - (in_dims[1] is not None)
        front: list[Tensor | None] = []
        for x, dim in zip(args[:arrays], in_dims[:arrays], strict=True):
            if x is not None:
                moved = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
                if len(front) < arrays - 1:
                    moved = moved.expand(info.batch_size, *moved.shape[1:])
                else:  # a mask broadcasts, but its missing dimensions stand behind the new one
                    missing = (1,) * (rank + 1 - moved.dim())
                    moved = moved.reshape(moved.shape[0], *missing, *moved.shape[1:])
            front.append(None if x is None else moved)
        outputs = op(*front, *args[arrays:])
        return outputs, tuple(0 if out.dim() > 1 else None for out in outputs)

    return rule


attention_op.register_vmap(_mapped(attention_op, arrays=4))
backward_op.register_vmap(_mapped(backward_op, arrays=7))
