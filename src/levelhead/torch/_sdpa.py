"""What a call of PyTorch's attention means, in the engine's terms."""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._attention import Given, normalise, sdpa_scale, sdpa_tensors
from ._makers import heads_of

_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


class Understood(NamedTuple):
    """A call of F.scaled_dot_product_attention.

    given:  without its dropout
    folded: three dimensions came, the first both batch and heads; four are given
    """

    given: Given
    dropout: float
    causal: bool
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
    mask = attn_mask
    if mask is not None and (
        is_causal or mask.dim() < 2 or mask.dtype not in (torch.bool, torch.float32, query.dtype)
    ):
        return None
    if not all(map(is_plain, (query, key, value))):
        return None
    count = query.shape[0]
    folded = query.dim() == 3 and count == key.shape[0] == value.shape[0]
    if folded:
        heads = heads_of(count, frame)
        query, key, value = (x.unflatten(0, (-1, heads)) for x in (query, key, value))
        if mask is not None and mask.dim() == 3 and mask.shape[0] == count:
            mask = mask.unflatten(0, (-1, heads))
    given = normalise(
        *sdpa_tensors(query, key, value, enable_gqa), mask, is_causal,
        scale=sdpa_scale(query, scale), query_offset=0 if is_causal else None,
    )  # fmt: skip
    return Understood(given, dropout_p, is_causal, folded)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor has values to look at, in a form that the engine reads."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta)
    )
