"""The masks of modules as the one mask that `attention` takes."""

from __future__ import annotations

import torch
from torch import Tensor


def without_padding(mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """The mask, with what is padding hidden too.

    mask:    True may attend, a float is added to the scores
    padding: a key_padding_mask, broadcastable to the scores: True hides, a float is added
    """
    if padding is None:
        return mask
    if padding.dtype is torch.bool:
        return _where_seen(~padding, mask)
    if not padding.is_floating_point():
        raise TypeError(f"key_padding_mask: expected dtype bool or a float's, got {padding.dtype}")
    if mask is not None and mask.dtype is torch.bool:
        return _where_seen(mask, padding)
    return padding if mask is None else mask + padding


def _where_seen(seen: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return seen
    return mask & seen if mask.dtype is torch.bool else torch.where(seen, mask, float("-inf"))
