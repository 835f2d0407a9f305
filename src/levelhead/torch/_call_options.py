"""The options of a call, checked and brought to the form in which the operator takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _options as options
from .._hints import shown
from .._options import Options

_INTEGERS = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
Numbers = Sequence[float] | np.ndarray[Any, Any] | Tensor


class CallOptions(NamedTuple):
    """A call with its options normalised. The operators take them in this order.

    query, key and value have at least three dimensions here; a missing head dimension is one head.
    Tensors come first. What may be one number or several is two fields here, for an operator has
    types.
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
    matrix: bool = False  # one head without a head dimension; the operators do not see it

    def for_engine(self) -> Options:
        """The options in their ORDER."""
        return (
            self.left,
            self.right,
            self.offset if self.offsets is None else _numbers(self.offsets, torch.int64),
            None if self.lengths is None else _numbers(self.lengths, torch.int64),
            self.scale if self.scales is None else _numbers(self.scales, torch.float64),
            self.softcap,
            None if self.sinks is None else _numbers(self.sinks, torch.float64),
            self.dropout,
            0 if self.seed is None else int(self.seed) % 2**64,
            self.threads or torch.get_num_threads(),
        )


def _numbers(tensor: Tensor, dtype: torch.dtype) -> Any:
    return tensor.detach().to(dtype).contiguous().numpy()


def normalise(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *given: Any, **named: Any
) -> CallOptions:
    """Check the options and bring them to the operator's form; shapes are the engine's to check.

    given, named: options, in the order GIVEN and by name
    """
    if not (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.device == key.device == value.device
        and not (query.is_nested or key.is_nested or value.is_nested)
        and min(query.dim(), key.dim(), value.dim()) >= 2
    ):
        refuse(query, key, value)
    if mask is not None:
        check_tensor("mask", mask, query)
    query, key, value = _autocast(query, key, value)
    matrix = query.dim() == key.dim() == value.dim() == 2
    if matrix:
        query, key, value = query[None], key[None], value[None]
    left, right, first, lengths, factor, cap, sinks, dropout, seed, threads = options.normalise(
        *given, **named, draw=_draw, several=partial(_tensor_of, query)
    )
    if first is None:
        first = key.shape[-2] - query.shape[-2]
    if factor is None:
        factor = query.shape[-1] ** -0.5 if query.shape[-1] else 0.0
    offset, offsets = (0, first) if isinstance(first, Tensor) else (first, None)
    one_scale, scales = (0.0, factor) if isinstance(factor, Tensor) else (factor, None)
    seeded = None
    if dropout:
        seeded = seed if isinstance(seed, Tensor) else torch.tensor((seed + 2**63) % 2**64 - 2**63)
    return CallOptions(
        query, key, value, mask, sinks, offsets, lengths, scales, seeded,
        left, right, offset, one_scale, cap, dropout, threads, matrix,
    )  # fmt: skip


def check_tensor(name: str, tensor: Any, query: Tensor) -> None:
    """A dense tensor, on the device of the query."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got a nested one")
    if tensor.device != query.device:
        raise ValueError(
            f"{name}: expected a tensor on {query.device} like query, got {tensor.device}"
        )


def refuse(query: Any, key: Any, value: Any) -> None:
    """Say which of the three is wrong."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, list | tuple):
            raise TypeError(
                f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; "
                "pass torch.as_tensor(...)"
            )
        check_tensor(name, tensor, query)
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


def _draw() -> Tensor:
    return torch.randint(2**63 - 1, (), dtype=torch.int64)


def _tensor_of(query: Tensor, name: str, value: Any) -> Any:
    """An option that may be several numbers: an int or float, or a tensor of one per entry or head.

    A tensor stays one, even without dimensions: a graph is made before its numbers are known.
    """
    integers = name in options.INTEGERS
    if name == "sinks":
        check_tensor(name, value, query)
    elif name != "key_lengths" and not _is_several(value):
        return options.integer(name, value) if integers else options.number(name, value)
    elif name == "scale" and torch.is_grad_enabled() and _requires_grad(value):
        raise ValueError(
            "scale: expected a tensor without requires_grad, as no gradient flows to it, got one "
            "with it; multiply query by it instead, or pass its detach()"
        )
    numbers = value if isinstance(value, Tensor) else _as_tensor(name, value)
    _check_dtype(name, numbers, integers)
    if numbers.device != query.device:
        if numbers.is_meta:  # it has none
            check_tensor(name, numbers, query)
        numbers = numbers.to(query.device)
    if integers:  # one for all, or one per batch entry
        every = math.prod(query.shape[:-3])
        return numbers.reshape(-1) if numbers.dim() else numbers.expand(every)
    if numbers.dim() == 0 and name == "scale":
        return numbers.expand(query.shape[-3] if query.dim() > 2 else 1)
    if numbers.dim() != 1:
        shape = tuple(numbers.shape)
        if name == "scale":
            raise ValueError(f"scale: expected a number or one per query head, got shape {shape}")
        raise ValueError(f"sinks: expected shape (query heads,), got {shape}")
    return numbers


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(x, Tensor) and x.requires_grad for x in value)
    return isinstance(value, Tensor) and value.requires_grad


def _check_dtype(name: str, numbers: Tensor, integers: bool) -> None:
    if numbers.layout is not torch.strided or numbers.is_nested:
        got = "a nested one" if numbers.is_nested else f"one of layout {numbers.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {got}")
    if integers and numbers.dtype not in _INTEGERS and numbers.numel():  # [] is one of floats
        raise TypeError(f"{name}: expected integers, got dtype {numbers.dtype}")
    if not integers and (numbers.is_complex() or numbers.dtype is torch.bool):
        raise TypeError(f"{name}: expected numbers, got dtype {numbers.dtype}")


def _is_several(value: Any) -> bool:
    if type(value) in (int, float):  # asking for a Sequence takes long
        return False
    return isinstance(value, Tensor | Sequence | np.ndarray) and not isinstance(value, options.TEXT)


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and not torch.compiler.is_compiling():
        array = np.asarray(options.array_of(name, value))  # more dtypes than torch can read
        return torch.tensor(array.reshape(value.shape))
    try:
        if isinstance(value, options.TEXT):
            raise TypeError
        return torch.as_tensor(value)
    except Exception:
        raise TypeError(f"{name}: expected numbers, got {shown(value)}") from None
