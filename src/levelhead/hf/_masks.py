"""The mask function that transformers calls: masks that know what they hide.

transformers passes a mask from the model to its attention layers as a 4-D tensor, and some models
cut or add to it on the way. So a mask here is a tensor for everyone who looks, with the values of
the eager mask, and carries what the engine wants to know: a band, lengths, padding. The L×S
values are made only if someone asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

from ._bands import Band, band
from ._reach import check_reach


@dataclass(frozen=True)
class Visibility:
    """Who sees whom, in a few numbers: what hides from one of these is hidden."""

    rows: int
    keys: int
    band: Band = (None, None)
    offset: int = 0  # position of the first query among the keys
    lengths: Tensor | None = None  # (batch,): keys at or past it are hidden
    visible: Tensor | None = None  # bool, broadcasts to (batch, 1, rows, keys)

    @cached_property
    def dense(self) -> Tensor:
        """All of it as one bool tensor that broadcasts to (batch, 1, rows, keys)."""
        device = None if self.visible is None else self.visible.device
        left, right = self.band
        key = torch.arange(self.keys, device=device)
        query = torch.arange(self.rows, device=device)[:, None] + self.offset
        seen = torch.ones(1, 1, self.rows, self.keys, dtype=torch.bool, device=device)
        if left is not None:
            seen = seen & (key >= query - left)
        if right is not None:
            seen = seen & (key <= query + right)
        if self.lengths is not None:
            seen = seen & (key < self.lengths[:, None, None, None])
        if self.visible is not None:
            seen = seen & self.visible
        return seen


class Mask(Tensor):
    """A mask for transformers: a tensor to everyone, with a Visibility for our attention.

    Asking for its shape, dtype or device costs nothing; any other operation sees the values of the
    eager mask, 0 where attention is allowed and the dtype's lowest number elsewhere. The storage
    behind it is a single NaN, so that a way around this would not pass unseen.
    """

    _visibility: Visibility
    _dense: Tensor | None

    @staticmethod
    def of(visibility: Visibility, batch: int, dtype: torch.dtype, device: Any) -> Mask:
        """The mask of a batch, of shape (batch, 1, rows, keys)."""
        poison = torch.full((), torch.nan, dtype=dtype, device=device)
        mask = poison.expand(batch, 1, visibility.rows, visibility.keys).as_subclass(Mask)
        mask._visibility, mask._dense = visibility, None
        return mask

    @property
    def content(self) -> Visibility | Tensor:
        """What it shows; the dense values once anyone has had them and may have changed them."""
        return self._visibility if self._dense is None else self._dense

    def dense(self) -> Tensor:
        """The eager mask, one and the same tensor each time: writing to it writes to this mask."""
        if self._dense is None:
            seen = self._visibility.dense.to(self.device)
            values = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self._dense = values.masked_fill_(~seen, torch.finfo(self.dtype).min)
        return self._dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Metadata as it is, everything else on the values."""
        if func not in _METADATA:
            args, kwargs = tree_map_only(Mask, Mask.dense, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad")
    ),
    Tensor.dim,
    Tensor.size,
    Tensor.stride,
    Tensor.__len__,
    Tensor.is_floating_point,
}


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    config: Any = None,
    **others: Any,
) -> Tensor:
    """The mask of one forward pass, from what transformers knows about it.

    Query i stands at position q_offset + i, key j at kv_offset + j. mask_function says which pairs
    of positions see each other; attention_mask (batch, positions) is False at padding.
    """
    geometry: dict[str, Any] = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "device": device,
        "use_vmap": others.get("use_vmap", False),
    }  # fmt: skip
    if _traced(q_offset, attention_mask) or torch.device(device).type != "cpu":
        # a graph takes values, not what they mean, and so does PyTorch on other devices
        dense: Tensor = eager_mask(**geometry, dtype=dtype)
        return dense
    if config is not None:
        check_reach(config.__class__)
    pattern = band(mask_function)
    if pattern is None:
        seen = sdpa_mask(**geometry, allow_is_causal_skip=False)
        visibility = Visibility(q_length, kv_length, visible=seen)
    else:
        offset = int(q_offset) - kv_offset
        lengths, padding = _padding(attention_mask, kv_length, kv_offset)
        visibility = Visibility(q_length, kv_length, pattern, offset, lengths, padding)
    return Mask.of(visibility, batch_size, dtype, device)


def _traced(*values: Any) -> bool:
    return bool(is_tracing()) or any(isinstance(x, Tensor) and is_tracing(x) for x in values)


def _padding(
    attention_mask: Tensor | None, keys: int, first: int
) -> tuple[Tensor | None, Tensor | None]:
    """Padding on the right as lengths (batch,); any other as visible keys (batch, 1, 1, keys)."""
    padded = prepare_padding_mask(attention_mask, keys, first)
    if padded is None:
        return None, None
    shown = padded[:, first : first + keys].to(torch.bool)
    lengths = shown.sum(-1)
    if torch.equal(shown, torch.arange(keys, device=shown.device) < lengths[:, None]):
        return (None if bool((lengths == keys).all()) else lengths), None
    return None, shown[:, None, None, :]
