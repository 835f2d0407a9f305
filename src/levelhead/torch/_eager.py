"""Attention written out as products and a softmax: which matrix was made from which.

A note goes with each tensor that may matter. A product of two batches of matrices may be scores;
what multiplies all of it belongs to the scale; whatever else is done to it (softcap, bias, mask, a
sink appended) makes logits of it; a softmax over the last dimension of such logits is attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HIDES = -1e3  # filling with less than this hides a pair

_PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum", "baddbmm"}
_TIMES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_OVER = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_SHAPES = {"view", "reshape", "transpose", "permute", "movedim", "swapaxes", "unsqueeze", "squeeze",
           "expand", "flatten", "unflatten", "__getitem__", "mT", "T"}  # fmt: skip
_COPIES = {"contiguous", "clone", "float", "half", "bfloat16", "double", "to", "type", "type_as",
           "dropout"}  # fmt: skip
_FILLS = {"masked_fill", "masked_fill_", "where", "__setitem__"}
_CHANGES = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__",
            "tanh", "tanh_", "clamp", "clamp_", "maximum", "minimum", "cat", "concat",
            "nan_to_num"}  # fmt: skip
_IN_PLACE = {"add_", "__iadd__", "sub_", "__isub__", "tanh_", "clamp_"}
_BEGIN = _PRODUCTS | _TIMES | _OVER
NOTED = _PRODUCTS | _TIMES | _OVER | _SHAPES | _COPIES | _FILLS | _CHANGES


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    scale:   the numbers that were multiplied to it so far
    dk:      the inner dimension of the product; 0 for what is none, a scaled query perhaps
    scores:  the scaled scores, once logits have been made of them
    hidden:  pairs that were filled with a very negative number
    cap:     c, if they went through c·tanh(score/c); 0 without one
    weights: it came out of a softmax, so a product with it is no score
    """

    scale: float = 1.0
    dk: int = 0
    scores: Tensor | None = None
    hidden: Tensor | None = None
    cap: float = 0.0
    weights: bool = False


# By id: an attribute of the tensor would be saved and copied with it.
_notes: dict[int, tuple[Origin, weakref.ref[Tensor]]] = {}


def origin(value: Any) -> Origin | None:
    """The note that goes with a tensor."""
    entry = _notes.get(id(value))
    return None if entry is None else entry[0]


def write_note(tensor: Tensor, note: Origin) -> None:
    """Let a note go with a tensor; it goes when the tensor goes."""
    key = id(tensor)
    _notes[key] = note, weakref.ref(tensor, lambda _: _notes.pop(key, None))


def follow(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of NOTED, and note on its result where that comes from, if it may matter."""
    operand = next((x for x in _flat(args) if id(x) in _notes), None) if _notes else None
    if operand is None and name not in _BEGIN:
        return func(*args, **kwargs)
    before = operand
    if operand is not None and name in _IN_PLACE:
        before = operand.detach().clone()
    result = func(*args, **kwargs)
    target = args[0] if name == "__setitem__" else result
    if isinstance(target, Tensor) and target.dim() >= 3:
        try:
            note = _note(name, func, args, kwargs, operand, before, target)
        except Exception:  # a form that we do not know is none that we can follow
            note = None
        if note is not None:
            write_note(target, note)
        elif operand is target:
            del _notes[id(target)]
    return result


def _note(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    operand: Tensor | None, before: Tensor | None, target: Tensor,
) -> Origin | None:  # fmt: skip
    if name in _PRODUCTS:
        return _product(name, args, kwargs)
    note = origin(operand)
    factor = _factor(name, args, note is not None and note.dk > 0, operand)
    if note is None:
        return None if factor is None else Origin(factor)
    if factor is not None:
        scores = None if note.scores is None else note.scores * factor
        return replace(note, scale=note.scale * factor, scores=scores, cap=note.cap * factor)
    if not note.dk or name in _COPIES:
        return note if name in _COPIES | _SHAPES else None
    if name in _SHAPES:

        def turn(x: Tensor | None) -> Tensor | None:
            return None if x is None else func(x.contiguous(), *args[1:], **kwargs)

        return replace(note, scores=turn(note.scores), hidden=turn(note.hidden))
    if name in _FILLS and (filled := _filled(name, args, kwargs, operand)) is not None:
        hidden = filled.expand(target.shape)
        return replace(note, hidden=hidden if note.hidden is None else note.hidden | hidden)
    if note.scores is not None:
        return note
    assert before is not None
    return replace(note, scores=before.detach(), cap=float(name in ("tanh", "tanh_")))


def _product(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Origin | None:
    operands = [x for x in (*_flat(args), *kwargs.values()) if isinstance(x, Tensor)]
    bias = operands.pop(0) if name == "baddbmm" else None
    if len(operands) != 2 or min(x.dim() for x in operands) < 3:
        return None
    notes = [origin(x) or Origin() for x in operands]
    if any(note.weights or note.dk for note in notes):
        return None
    scale, raw = notes[0].scale * notes[1].scale, None
    if bias is not None:
        factor = kwargs.get("alpha", 1)
        scale *= factor
        raw = torch.bmm(operands[0].detach(), operands[1].detach()) * factor
    return Origin(scale, operands[0].shape[-1], raw)


def _factor(name: str, args: tuple[Any, ...], scores: bool, operand: Any) -> float | None:
    """The number that a tensor was multiplied with; of one per head of scores, the mean."""
    if name not in _TIMES and name not in _OVER:
        return None
    if operand is None:
        operand = args[0] if isinstance(args[0], Tensor) and args[0].dim() else args[1]
    number = args[1] if args[0] is operand else args[0]
    if name in _OVER and number is args[0]:
        return None
    if isinstance(number, Tensor):
        if number.is_meta or (number.dim() and not (scores and number.shape[-2:] == (1, 1))):
            return None
        number = number.detach().float().mean().item()
    if not isinstance(number, int | float):
        return None
    return float(number) if name in _TIMES else 1.0 / number


def _filled(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operand: Tensor | None
) -> Tensor | None:
    """Where scores were filled with a very negative number; None if it was another."""
    places: Tensor
    if name == "__setitem__":
        value = args[2]
        places = args[0] == value
    elif name == "where":
        first, second, third = args
        condition, chosen, other = (
            (first, second, third) if first.dtype is torch.bool else (second, first, third)
        )
        places, value = (~condition, other) if chosen is operand else (condition, chosen)
    else:
        given = dict(zip(("self", "mask", "value"), args, strict=False)) | kwargs
        places, value = given["mask"], given["value"]
    if isinstance(value, Tensor) and value.dim():
        return None
    return places if float(value) < HIDES else None


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for value in args:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
