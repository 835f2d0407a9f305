"""What a call of PyTorch's attention means, in the engine's terms."""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._attention import CallOptions, normalise, sdpa_scale, sdpa_tensors
from .._causal_bias import causal_offset
from ._attribution import heads_of

_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


class Understood(NamedTuple):
    """A call of F.scaled_dot_product_attention.

    given:  without its dropout
    folded: three dimensions came, the first both batch and heads; four are given
    """

    given: CallOptions
    dropout: float
    folded: bool


def understand(
    frame: FrameType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Understood | None:
    """The call, or None if it is left to PyTorch; a wrong one may also raise what it likes.

    frame: of who made it
    """
    mask, offset = attn_mask, 0 if is_causal else None
    if mask is not None and is_causal:
        return None
    if not all(map(is_plain, (query, key, value))):
        return None
    if (of_bias := causal_offset(mask, query, key)) is not None:
        mask, offset = None, of_bias
    elif mask is not None and not (
        has_values(mask)
        and mask.dim() >= 2
        and mask.dtype in (torch.bool, torch.float32, query.dtype)
    ):
        return None
    count = query.shape[0]
    folded = query.dim() == 3 and count == key.shape[0] == value.shape[0]
    if folded:
        heads = heads_of(count, frame)
        query, key, value = (x.unflatten(0, (-1, heads)) for x in (query, key, value))
        if mask is not None and mask.dim() == 3 and mask.shape[0] == count:
            mask = mask.unflatten(0, (-1, heads))
    given = normalise(
        *sdpa_tensors(query, key, value, enable_gqa), mask, offset is not None,
        scale=sdpa_scale(query, scale), query_offset=offset,
    )  # fmt: skip
    return Understood(given, dropout_p, folded)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor can be queries, keys or values for the engine."""
    return has_values(tensor) and tensor.dtype in _DTYPES


def has_values(tensor: Any) -> bool:
    """Whether a tensor is its values and nothing else, and they are there to look at."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta)
    )
