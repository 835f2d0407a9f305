"""The options of a call, checked and brought to the form in which the operator takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._attention import OPEN, Window, _flag, _integer, _number, _window

Numbers = Sequence[float] | np.ndarray[Any, Any] | Tensor


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


def normalise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    threads: int | None = None,
) -> Given:
    """Check the options and bring them to the operator's form; shapes are the engine's to check."""
    if not (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.device == key.device == value.device
        and min(query.dim(), key.dim(), value.dim()) >= 2
    ):
        _refuse(query, key, value)
    for name, option in (("mask", mask), ("sinks", sinks)):
        if option is not None:
            _check_tensor(name, option, query)
    if sinks is not None and sinks.dim() != 1:
        raise ValueError(f"sinks: expected shape (query heads,), got {tuple(sinks.shape)}")
    query, key, value = _autocast(query, key, value)
    matrix = query.dim() == key.dim() == value.dim() == 2
    if matrix:
        query, key, value = query[None], key[None], value[None]
    left = right = OPEN
    if window is not None:
        left, right = _window(window)
    if _flag("causal", causal):
        right = min(right, 0)

    offset, offsets = key.shape[-2] - query.shape[-2], None
    if _several(query_offset):
        offsets = _integers("query_offset", query_offset, query)
    elif query_offset is not None:
        offset = _integer("query_offset", query_offset)
    lengths = None
    if key_lengths is not None:
        lengths = _integers("key_lengths", key_lengths, query)
    one_scale, scales = 0.0, None
    if scale is None:
        one_scale = query.shape[-1] ** -0.5 if query.shape[-1] else 0.0
    elif _several(scale):
        scales = _scales(scale, query)
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


def _check_tensor(name: str, tensor: Any, query: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device != query.device:
        raise ValueError(
            f"{name}: expected a tensor on {query.device} like query, got {tensor.device}"
        )


def _refuse(query: Any, key: Any, value: Any) -> None:
    """Say which of the three is wrong."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, list | tuple):
            raise TypeError(
                f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; "
                "pass torch.as_tensor(...)"
            )
        _check_tensor(name, tensor, query)
        if tensor.dim() < 2:
            raise ValueError(
                f"{name}: expected at least 2 dimensions (..., heads, length, dim), got shape "
                f"{tuple(tensor.shape)}"
            )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
        for x in tensors
    )


def _several(option: Any) -> bool:
    if option is None or type(option) in (int, float):  # asking for a Sequence takes long
        return False
    return isinstance(option, Tensor | Sequence | np.ndarray) and not isinstance(option, str)


def _tensor(name: str, option: Any, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(option, device=device)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected numbers, got {option!r}") from None


def _integers(name: str, option: Any, query: Tensor) -> Tensor:
    """One number per batch entry; a tensor without dimensions is for all of them."""
    numbers = _tensor(name, option, query.device)
    if numbers.numel() == 0:
        numbers = numbers.long()  # an empty list is one of floats to torch
    if numbers.is_floating_point() or numbers.dtype is torch.bool:
        raise TypeError(f"{name}: expected integers, got dtype {numbers.dtype}")
    if numbers.dim() == 0:
        return numbers.expand(math.prod(query.shape[:-3]))
    return numbers.reshape(-1)


def _scales(option: Any, query: Tensor) -> Tensor:
    scales = _tensor("scale", option, query.device)
    if scales.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "scale: expected a tensor without requires_grad, as no gradient flows to it, got one "
            "with it; multiply query by it instead, or pass its detach()"
        )
    if scales.dim() == 0 and query.dim() > 2:
        return scales.expand(query.shape[-3])
    if scales.dim() != 1:
        raise ValueError(
            f"scale: expected a number or one per query head, got shape {tuple(scales.shape)}"
        )
    return scales
