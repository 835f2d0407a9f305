"""Attention on tensors: the operator of `levelhead.attention`, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .._health import Health
from .._hints import refuse_options
from .._options import GIVEN, AttentionOptions, Window, flag, number
from .._result import AttentionResult
from . import _tiled_health
from ._call_options import CallOptions, Numbers, check_tensor, normalise, refuse
from ._causal_bias import causal_mask, causal_offset, speaks_for_itself
from ._ops import differentiable

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "CallOptions",
    "attention",
    "compute",
    "health_of",
    "normalise",
    "scaled_dot_product_attention",
    "sdpa_options",
    "sdpa_scale",
    "sdpa_tensors",
]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_health: Literal[False] = False,
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = False,
    return_health: bool = False,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> AttentionResult: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    query_offset: int | Numbers | None = None,
    key_lengths: Numbers | None = None,
    scale: float | Numbers | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    return_health: bool = False,
    return_weights: bool = False,
    threads: int | None = None,
    **unknown: NoReturn,
) -> Any:
    """`levelhead.attention` on tensors, with gradients.

    >>> import torch, levelhead.torch
    >>> q, k, v = torch.randn(3, 2, 8, 100, 64, requires_grad=True)
    >>> levelhead.torch.attention(q, k, v, causal=True).sum().backward()
    >>> levelhead.torch.attention(q, k, v, return_health=True).health.entropy.shape
    (2, 8)

    The arguments mean what they mean there. Gradients flow to query, key, value, a float mask and
    sinks, once; lse and weights carry none. Without a seed, dropout follows torch.manual_seed.
    threads: None = torch.get_num_threads(). Under torch.autocast the three are cast as PyTorch's
    own attention casts them. Tensors on another device than the CPU are left to PyTorch, dropout
    and its seed with them.
    """
    if unknown:
        refuse_options(attention, unknown)
    if (offset := causal_offset(mask, query, key)) is not None:
        if causal or window is not None or query_offset is not None:
            mask = causal_mask(offset, query, key)
        else:
            mask, causal, query_offset = None, True, offset
    options = (
        causal, window, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads,
    )  # fmt: skip
    if has_torch_function((query, key, value, mask, sinks)):
        named: dict[str, Any] = dict(zip(GIVEN, options, strict=True), mask=mask)
        return handle_torch_function(
            attention,  # type: ignore[arg-type]
            (query, key, value, mask, sinks), query, key, value, **named,
            return_lse=return_lse, return_health=return_health, return_weights=return_weights,
        )  # fmt: skip
    given = normalise(query, key, value, mask, *options)
    return_lse = flag("return_lse", return_lse)
    return_health = flag("return_health", return_health)
    return_weights = flag("return_weights", return_weights)
    output, lse, weights, sums = compute(given, return_health, return_weights, lse=return_lse)
    if not (return_lse or return_health or return_weights):
        return output
    return AttentionResult(
        output,
        lse if return_lse else None,
        weights if return_weights else None,
        health_of(sums) if return_health else None,
    )


def compute(
    given: CallOptions,
    health: bool = False,
    weights: bool = False,
    listener: int = 0,
    lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, weights and health sums; the last two are empty unless asked for.

    listener: a key of `_ops.listeners`, called with the gradient's sums when backward runs.
    lse: perhaps empty if not asked for; elsewhere than on the CPU it costs a pass of its own.
    """
    if given.query.is_cpu:
        results = differentiable(given, health, weights, listener, lse)
    else:
        results = _tiled_health.attention(given, health, weights, listener, lse)
    if given.matrix:
        output, rows, attended, sums = results
        return (
            output[0],
            rows[0] if rows.dim() > 1 else rows,
            attended[0] if weights else attended,
            sums,
        )
    return results


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
    the mask too. Queries and keys without a column have scores of 0, whatever the scale.
    """
    if attn_mask is not None and isinstance(query, Tensor):
        check_tensor("attn_mask", attn_mask, query)
    if not 0 <= (dropout_p := number("dropout_p", dropout_p)) <= 1:
        raise ValueError(f"dropout_p: expected a number in [0, 1], got {dropout_p}")
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if speaks_for_itself(attn_mask) and causal_offset(attn_mask, query, key) is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    nothing = dropout_p == 1  # PyTorch allows it: no weight is left
    try:
        tensors, scale = sdpa_tensors(query, key, value, enable_gqa), sdpa_scale(query, scale)
    except (AttributeError, RuntimeError):  # of what is no tensor, or a nested one
        refuse(query, key, value)
        raise
    output: Tensor = attention(
        *tensors, **sdpa_options(attn_mask, 0.0 if nothing else dropout_p, is_causal, scale)
    )
    return output * 0 if nothing else output


def sdpa_tensors(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The three with their batch dimensions broadcast, and without a column, as PyTorch allows."""
    if _has_no_column(query) and _has_no_column(key):  # the engine wants one: of zeros, then
        query, key = F.pad(query, (0, 1)), F.pad(key, (0, 1))
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


def sdpa_scale(query: Tensor, scale: float | None) -> float | None:
    """The scale; without a column there is nothing to multiply, even with inf or NaN."""
    return 0.0 if _has_no_column(query) else scale


def _has_no_column(tensor: Tensor) -> bool:
    return tensor.numel() == 0 and tensor.shape[-1:] == (0,)


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


def health_of(sums: Tensor) -> Health:
    """Health from its sums; on the meta device, where there is no data, that of no rows."""
    if sums.is_meta:
        return Health(np.zeros(sums.shape))
    try:
        return Health(sums.cpu().numpy())
    except RuntimeError:
        raise RuntimeError(
            "return_health: expected a call outside of torch.func.vmap and grad, where tensors "
            "have no values yet, got one inside"
        ) from None
