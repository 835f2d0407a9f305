"""Attention written out as products and a softmax: which matrix was made from which.

Tensors carry a note of their origin. A product of two batches of matrices may be scores; numbers
multiplied to it belong to the scale; whatever else is done to it (softcap, bias, mask, a sink
appended) makes logits of it; a softmax over the last dimension of such logits is attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HIDES = -1e3  # filling with less than this hides a pair

_PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum", "baddbmm"}
_TIMES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_OVER = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_FILLS = {"masked_fill", "masked_fill_"}
_VIEWS = {"view", "reshape", "transpose", "permute", "movedim", "contiguous", "unsqueeze",
          "squeeze", "expand", "flatten", "unflatten", "clone", "float", "half", "bfloat16",
          "double", "to", "type", "type_as", "dropout", "__getitem__"}  # fmt: skip
_ELEMENTWISE = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__",
                "__isub__", "tanh", "tanh_", "where", "clamp", "clamp_", "maximum", "minimum",
                "cat", "concat", "nan_to_num", "masked_fill", "masked_fill_"}  # fmt: skip
_KEEP = _TIMES | _OVER | _VIEWS | _ELEMENTWISE
NOTED = _PRODUCTS | _KEEP


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    scale:   the numbers that were multiplied to it so far
    dk:      the inner dimension of the product; 0 for what is none, a scaled query perhaps
    scores:  the scaled scores, once logits have been made of them
    hidden:  pairs that were filled with a very negative number
    capped:  the scores went through tanh, and a softcap's factor is still to come
    weights: it came out of a softmax, so a product with it is no score
    """

    scale: float = 1.0
    dk: int = 0
    scores: Tensor | None = None
    hidden: Tensor | None = None
    capped: bool = False
    weights: bool = False


def origin(value: Any) -> Origin | None:
    """The note that a tensor carries."""
    return getattr(value, "_levelhead_origin", None) if isinstance(value, Tensor) else None


def write_note(tensor: Tensor, note: Origin) -> None:
    """Let a tensor carry a note; it goes when the tensor goes."""
    tensor._levelhead_origin = note  # type: ignore[attr-defined]


def take_note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Note on the result of a function in NOTED where it comes from, if that may matter."""
    if not isinstance(result, Tensor) or result.dim() < 3:
        return
    if name in _PRODUCTS:
        note = _product(name, args)
    else:
        note = next((n for x in _flat(args) if (n := origin(x)) is not None), None)
        factor = _factor(name, args)
        if note is None:
            note = None if factor is None else Origin(factor)
        elif factor is not None and note.scores is None:
            note = replace(note, scale=note.scale * factor)
        elif factor is not None and note.capped and note.scores is not None:  # c·tanh(score/c)
            scores = note.scores * factor
            note = replace(note, scale=note.scale * factor, scores=scores, capped=False)
        elif note.dk and name not in _VIEWS:
            note = _logits(note, name, args, kwargs, result)
    if note is not None:
        write_note(result, note)


def _product(name: str, args: tuple[Any, ...]) -> Origin | None:
    operands = [x for x in _flat(args) if isinstance(x, Tensor)]
    bias = operands.pop(0) if name == "baddbmm" else None
    if len(operands) != 2 or min(x.dim() for x in operands) < 3:
        return None
    notes = [origin(x) or Origin() for x in operands]
    if any(note.weights or note.dk for note in notes):
        return None
    scale = notes[0].scale * notes[1].scale
    raw = None if bias is None else torch.bmm(operands[0].detach(), operands[1].detach())
    return Origin(scale, operands[0].shape[-1], raw)


def _logits(
    note: Origin, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> Origin:
    if note.scores is None:
        scores = next(x for x in _flat(args) if origin(x) is note)
        if scores is result:  # changed in place: take back what was added
            added = next((x for x in args[1:] if isinstance(x, Tensor)), None)
            plus = name in ("add_", "__iadd__") and added is not None
            scores = result.detach() - added if plus else result.detach().clone()
        note = replace(note, scores=scores.detach(), capped=name in ("tanh", "tanh_"))
    if name in _FILLS:
        mask, value = (*args[1:], *kwargs.values())[:2]
        if float(value) < HIDES:
            note = replace(note, hidden=mask if note.hidden is None else note.hidden | mask)
    return note


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for value in args:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _factor(name: str, args: tuple[Any, ...]) -> float | None:
    """The number that a tensor was multiplied with, if that is what happened."""
    if name not in _TIMES and name not in _OVER:
        return None
    number = args[1] if isinstance(args[0], Tensor) and args[0].dim() else args[0]
    if name in _OVER and number is args[0]:
        return None
    if isinstance(number, Tensor):
        if number.dim() or number.is_meta:
            return None
        number = number.item()
    if not isinstance(number, int | float) or (name in _OVER and number == 0):
        return None
    return float(number) if name in _TIMES else 1.0 / number
