"""Attention on tensors: the operator of `levelhead.attention`, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .._attention import OPEN, Window, _flag, _integer, _number, _window
from .._health import Health
from .._result import AttentionResult
from . import _elsewhere
from ._ops import attention_op


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    key_lengths: Sequence[int] | Tensor | None = None,
    scale: float | Sequence[float] | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    return_health: bool = False,
    return_weights: bool = False,
    threads: int | None = None,
) -> Any:
    """`levelhead.attention` on tensors, with gradients.

    >>> import torch, levelhead.torch
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64, requires_grad=True)
    >>> levelhead.torch.attention(q, k, v, causal=True).sum().backward()
    >>> levelhead.torch.attention(q, k, v, return_health=True).health.entropy.shape
    (2, 8)

    The arguments mean what they mean there. Gradients flow to query, key, value, a float mask and
    sinks; lse and weights carry none. Without a seed, dropout follows torch.manual_seed. threads:
    None = torch.get_num_threads(). Under torch.autocast the three are cast as PyTorch's own
    attention casts them. Tensors on another device than the CPU are left to PyTorch.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            attention, (query, key, value), query, key, value,
            mask=mask, causal=causal, window=window, query_offset=query_offset,
            key_lengths=key_lengths, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout,
            seed=seed, return_lse=return_lse, return_health=return_health,
            return_weights=return_weights, threads=threads,
        )  # fmt: skip
    given = normalise(
        query, key, value, mask, causal, window, query_offset, key_lengths, scale, softcap, sinks,
        dropout, seed, threads,
    )  # fmt: skip
    output, lse, weights, sums = compute(given, _flag("return_health", return_health),
                                         _flag("return_weights", return_weights))  # fmt: skip
    if not (_flag("return_lse", return_lse) or return_health or return_weights):
        return output
    return AttentionResult(
        output,
        lse if return_lse else None,
        weights if return_weights else None,
        Health(sums.numpy()) if return_health else None,
    )


class Given(NamedTuple):
    """A call with its options normalised, in the order in which the operator takes them.

    query, key and value have at least three dimensions here; a missing head dimension is one head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    offsets: Tensor | None
    lengths: Tensor | None
    scales: Tensor | None
    seed: Tensor | None
    left: int
    right: int
    offset: int
    scale: float
    softcap: float
    dropout: float
    threads: int
    matrix: bool  # the call was of one head without a head dimension


def compute(
    given: Given, health: bool = False, weights: bool = False, listener: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, weights and health sums; the last two are empty unless asked for.

    listener: a key of `_ops.listeners`, called with the gradient's sums when backward runs.
    """
    *options, matrix = given
    if given.query.device.type != "cpu":
        results = _elsewhere.attention(given, health, weights, listener)
    else:
        results = attention_op(*options, health, weights, listener)
    if matrix:
        output, lse, attended, sums = results
        return output[0], lse[0], attended[0] if weights else attended, sums
    return results


def normalise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    query_offset: int | Sequence[int] | Tensor | None = None,
    key_lengths: Sequence[int] | Tensor | None = None,
    scale: float | Sequence[float] | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    threads: int | None = None,
) -> Given:
    """Check the options and bring them to the operator's form; shapes are the engine's to check."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != query.device:
            raise ValueError(
                f"{name}: expected a tensor on {query.device} like query, got {tensor.device}"
            )
    for name, option in (("mask", mask), ("sinks", sinks)):
        if option is not None and not isinstance(option, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(option).__name__}")
    device = query.device
    query, key, value = _autocast(query, key, value)
    matrix = query.dim() == key.dim() == value.dim() == 2
    if matrix:
        query, key, value = query[None], key[None], value[None]
    left = right = OPEN
    if window is not None:
        left, right = _window(window)
    if _flag("causal", causal):
        right = min(right, 0)

    offset, offsets = key.shape[-2] - query.shape[-2] if key.dim() > 1 < query.dim() else 0, None
    if isinstance(query_offset, Tensor | Sequence):
        offsets = torch.as_tensor(query_offset, device=device).reshape(-1)
        _check_integers("query_offset", offsets)
    elif query_offset is not None:
        offset = _integer("query_offset", query_offset)
    lengths = None
    if key_lengths is not None:
        lengths = torch.as_tensor(key_lengths, device=device).reshape(-1)
        _check_integers("key_lengths", lengths)
    one_scale, scales = 0.0, None
    if scale is None:
        one_scale = query.shape[-1] ** -0.5 if query.shape[-1] else 0.0
    elif isinstance(scale, Tensor | Sequence):
        scales = torch.as_tensor(scale, device=device).detach()
        if scales.dim() == 0:
            scales = scales.expand(query.shape[-3])
    else:
        one_scale = _number("scale", scale)
    if softcap is not None and not 0 < (softcap := _number("softcap", softcap)) < float("inf"):
        raise ValueError(f"softcap: expected a number above 0, got {softcap}")
    dropout = _number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a number in [0, 1), got {dropout}")
    seeded = None
    if dropout and seed is None:
        seeded = torch.randint(2**63 - 1, (), dtype=torch.int64)
    elif dropout:
        seeded = torch.tensor((_integer("seed", seed) + 2**63) % 2**64 - 2**63)
    if threads is None:
        threads = 0
    elif (threads := min(_integer("threads", threads), 1024)) < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")
    return Given(
        query, key, value, mask, sinks, offsets, lengths, scales, seeded,
        left, right, offset, one_scale, softcap or 0.0, dropout, threads, matrix,
    )  # fmt: skip


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by Levelhead.

    >>> import torch, levelhead.torch
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64)
    >>> levelhead.torch.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([2, 8, 100, 64])

    The signature and the meaning are PyTorch's: is_causal aligns the first query with the first
    key, a bool mask is True where attention is allowed, a float mask is added, gradients flow to
    the mask too.
    """
    if dropout_p == 1:  # PyTorch allows it: nothing is left
        return value.sum() * 0 + query.new_zeros(*query.shape[:-1], value.shape[-1])
    output: Tensor = attention(
        *sdpa_tensors(query, key, value, enable_gqa),
        **sdpa_options(attn_mask, dropout_p, is_causal, scale),
    )
    return output


def sdpa_tensors(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The three with their batch dimensions broadcast, as PyTorch allows."""
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return query, key, value
    heads = 1 if enable_gqa else 0  # grouped heads are not broadcast
    split = [x.dim() - 2 - heads for x in (query, key, value)]
    if min(split) < 0:
        raise ValueError(
            f"enable_gqa: expected query, key and value of at least 3 dimensions, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    try:
        batch = torch.broadcast_shapes(
            *(x.shape[:n] for x, n in zip((query, key, value), split, strict=True))
        )
    except RuntimeError:
        raise ValueError(
            "query, key, value: expected dimensions before the last two that broadcast"
            f"{'' if enable_gqa else ' (grouped heads need enable_gqa=True)'}, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        ) from None
    query, key, value = (
        x.expand(*batch, *x.shape[n:]) for x, n in zip((query, key, value), split, strict=True)
    )
    return query, key, value


def sdpa_options(
    attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    """PyTorch's options as those of `attention`."""
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attn_mask: expected None together with is_causal=True, as in PyTorch, got a mask; "
            "levelhead.torch.attention takes both"
        )
    return {
        "mask": attn_mask,
        "causal": is_causal,
        "query_offset": 0 if is_causal else None,
        "scale": scale,
        "dropout": dropout_p,
    }


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype is torch.float32 else x for x in tensors)


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        raise TypeError(f"{name}: expected integers, got dtype {tensor.dtype}")
