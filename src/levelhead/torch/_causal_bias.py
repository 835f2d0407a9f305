"""Masks that are more than their values: tensors of classes that say themselves what they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_offset(mask: Any, query: Tensor, key: Tensor) -> int | None:
    """The `query_offset` that a bias of torch.nn.attention.bias stands for; None for another mask.

    Of such a bias there are no values: it is a tensor that holds nothing.
    """
    kind = type(mask)  # known by its name: importing the class takes longer than all of this
    if kind.__name__ != "CausalBias" or kind.__module__ != "torch.nn.attention.bias":
        return None
    sizes = mask.seq_len_q, mask.seq_len_kv
    if mask.variant.name == "UPPER_LEFT" or sizes[0] == sizes[1]:
        return 0
    if sizes != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"mask: expected a lower right bias of {(query.shape[-2], key.shape[-2])} queries and "
            f"keys, got one of {sizes}"
        )
    return sizes[1] - sizes[0]


def causal_mask(offset: int, query: Tensor, key: Tensor) -> Tensor:
    """The same as a bool mask."""
    shape = query.shape[-2], key.shape[-2]
    return torch.ones(shape, dtype=torch.bool, device=query.device).tril(offset)


def speaks_for_itself(tensor: Any) -> bool:
    """Whether a tensor is of a class that wants to be asked what a function does with it."""
    kind = type(tensor)
    if tensor is None or kind is Tensor or not issubclass(kind, Tensor):
        return False
    asks = [getattr(x.__torch_function__, "__func__", None) for x in (kind, Tensor)]
    return asks[0] is not None and asks[0] is not asks[1]
