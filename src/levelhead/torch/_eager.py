"""Attention written out as products and a softmax: which matrix was made from which.

A note goes with each tensor that may matter. A product may be scores (_products.py); what
multiplies all of it belongs to the scale; whatever else is done to it (softcap, bias, mask, a sink
put beside it) makes logits of it; a softmax over the keys of such logits makes weights; and when
weights meet values in another product, that was attention. Of queries and keys the axes are
followed (_axes.py): they tell which are the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._axes import FIRST, KEYS, SECOND, Axes, aligned, joined, new_axes, viewed
from ._note import Note, Scores, Weights, axes_of, note_of, noted, write_note
from ._note import notes as _notes
from ._products import PRODUCTS

HIDES = -1e3  # filling with less than this hides a pair

_TIMES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_OVER = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_SPLITS = {"view", "reshape", "unflatten"}
_VIEWS = _SPLITS | {
    "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "H",
    "mH", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as", "flatten", "ravel",
    "select", "narrow", "unfold", "as_strided", "diagonal", "chunk", "split", "tensor_split",
    "unbind",
}  # fmt: skip
_PICKS = {"__getitem__", "index_select", "gather", "take_along_dim", "repeat", "repeat_interleave",
          "tile", "roll", "flip", "pad"}  # fmt: skip
_JOINS = {"cat", "concat", "concatenate"}
_STACKS = {"stack", "view_as_complex", "view_as_real"}
_COPIES = {"contiguous", "clone", "float", "half", "bfloat16", "double", "to", "type", "type_as",
           "dropout"}  # fmt: skip
_FILLS = {"masked_fill", "masked_fill_", "where", "__setitem__"}
_CHANGES = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__",
            "tanh", "tanh_", "clamp", "clamp_", "clamp_min", "clamp_max", "clip", "maximum",
            "minimum", "max", "min", "nan_to_num"}  # fmt: skip
_IN_PLACE = {"add_", "__iadd__", "sub_", "__isub__", "tanh_", "clamp_"}
_MIXES = {"linear", "conv1d", "conv2d", "conv3d"}  # other numbers, though the shape may be the same
_OF_ONE = _VIEWS | _PICKS | _COPIES  # a second tensor only says how
_BEGIN = PRODUCTS | _TIMES | _OVER | _SPLITS
PROPERTIES = {"T", "mT", "H", "mH"}

Args = tuple[Any, ...]
Options = dict[str, Any]


def may_matter(name: str, args: Sequence[Any]) -> bool:
    """Whether a function makes something that a note should go with."""
    return name in _BEGIN or (bool(_notes) and next(noted(args), None) is not None)


def follow(name: str, func: Any, args: Args, kwargs: Options) -> Any:
    """Call a function that is no product, and note on its result where that comes from."""
    operand = _operand(name, args)
    note = note_of(operand)
    before = operand
    if name in _IN_PLACE and isinstance(note, Scores) and note.scores is None:
        before = operand.detach().clone()  # type: ignore[union-attr]
    result = func(*args, **kwargs)
    targets = [args[0]] if name == "__setitem__" else result
    targets = targets if isinstance(targets, list | tuple) else [targets]
    if not all(isinstance(target, Tensor) and target.dim() >= 2 for target in targets):
        return result
    found: Sequence[Note | None]
    try:
        if operand is None:
            found = [_begin(name, args, targets[0])]
        else:
            axes = _moved(name, func, args, kwargs, operand, targets)
            found = [
                _note(name, func, args, kwargs, operand, before, target, axes[at], at)
                for at, target in enumerate(targets)
            ]
    except Exception:  # a form that we do not know is none that we can follow
        found = [None] * len(targets)
    for target, new in zip(targets, found, strict=True):
        write_note(target, new)
    return result


def _operand(name: str, args: Args) -> Tensor | None:
    """The argument whose note matters most."""
    rank = {Weights: 0, Scores: 1, Note: 2}
    some = noted(args[:1] if name in _OF_ONE else args)
    return min(some, key=lambda x: rank[type(note_of(x))], default=None)


def _begin(name: str, args: Args, target: Tensor) -> Note | None:
    """Of a tensor without a note: features split into heads, or a scaled query perhaps."""
    if name not in _SPLITS:
        factor = _factor(name, args, None)
        return None if factor is None else Note(factor=factor[0])
    operand: Tensor = args[0]
    grows = target.dim() > operand.dim() or target.shape[-1] < operand.shape[-1]
    if operand.dim() < 2 or not grows:
        return None
    return Note(viewed(new_axes(operand.shape), target.shape, _contiguous(target.shape)))


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]


def _moved(
    name: str, func: Any, args: Args, kwargs: Options, operand: Tensor, targets: Sequence[Tensor]
) -> Sequence[Axes | None]:
    """Where the axes of an operand are in what was made of it."""
    axes, target = axes_of(operand), targets[0]
    if name in _VIEWS or (name == "__getitem__" and _is_basic(args[1])):
        views = targets
        if not operand.is_contiguous():
            shape = operand.shape
            probe = torch.empty_strided(shape, _contiguous(shape), device="meta")
            found = func(probe, *args[1:], **kwargs)
            views = found if isinstance(found, list | tuple) else [found]
        return [viewed(axes, view.shape, view.stride()) for view in views]
    if name == "pad" and isinstance(note_of(operand), Scores):
        left, right, *others = args[1] if len(args) > 1 else kwargs["pad"]
        if min(left, right) >= 0 and not any(others):
            known = axes[-1][0].known if axes[-1] else ()
            parts = [(left, None), (operand.shape[-1], known), (right, None)]
            return [joined(axes, len(axes) - 1, [part for part in parts if part[0]])]
    if name in _PICKS:
        kept = target.dim() == operand.dim() or name in ("repeat", "tile")
        return [aligned(axes, target.shape) if kept else None]
    if name in _JOINS:
        return [_joined(args, kwargs, axes)]
    if name in _STACKS:
        if name == "view_as_complex":
            return [axes[:-1]]
        at = _dim(args, kwargs) if name == "stack" else -1
        at %= target.dim()
        return [(*axes[:at], *new_axes(target.shape[at : at + 1]), *axes[at:])]
    if name == "linear":
        return [(*axes[:-1], *new_axes(target.shape[-1:]))]
    same = target.dim() == operand.dim() if name == "__setitem__" else name in _BROADCASTS
    return [aligned(axes, target.shape) if same or target.shape == operand.shape else None]


_BROADCASTS = _TIMES | _OVER | _CHANGES | _FILLS


def _note(
    name: str, func: Any, args: Args, kwargs: Options, operand: Tensor, before: Any,
    target: Tensor, axes: Axes | None, at: int,
) -> Note | None:  # fmt: skip
    note = note_of(operand)
    if isinstance(note, Weights):
        return _weights(name, args, note, target, axes)
    if axes is None or name in _MIXES:
        return None
    factor = _factor(name, args, operand)
    if not isinstance(note, Scores):
        assert note is not None
        return Note(axes, note.factor * (factor[0] if factor else 1))
    note = replace(note, axes=axes)
    if factor is not None:
        mean, number = factor
        scores = None if note.scores is None else note.scores * number
        return replace(note, factor=note.factor * mean, scale=note.scale * mean, scores=scores,
                       cap=note.cap * mean)  # fmt: skip
    if name in _COPIES:
        return note
    if name in _VIEWS | _PICKS:

        def turn(x: Tensor | None) -> Any:
            if x is None:
                return None
            turned = func(x.contiguous(), *args[1:], **kwargs)
            return turned[at] if isinstance(turned, list | tuple) else turned

        return replace(note, scores=turn(note.scores), hidden=turn(note.hidden))
    if name in _JOINS:
        return _join(args, kwargs, note)
    if name == "__setitem__" and operand is not target:  # written into a tensor
        return note if note.scores is note.hidden is None else None
    if name in _BROADCASTS:
        filled = _filled(name, args, kwargs, operand) if name in _FILLS else None
        hidden, scores, cap = note.hidden, note.scores, note.cap
        if filled is not None:
            hidden = filled if hidden is None else hidden | filled
        elif scores is None and name != "__setitem__":
            scores, cap = before.detach(), float(name in ("tanh", "tanh_"))
        shape = target.shape
        return replace(note, scores=None if scores is None else scores.expand(shape),
                       hidden=None if hidden is None else hidden.expand(shape), cap=cap)  # fmt: skip
    return Note(axes)  # queries or keys perhaps, but scores no longer


def _weights(
    name: str, args: Args, note: Weights, target: Tensor, axes: Axes | None
) -> Weights | None:
    """Of what was made of weights: they stay weights while each row is still over keys."""
    moved = name in _VIEWS | _PICKS | _STACKS
    over_keys = name == "linear" and any(x.role == KEYS for x in (note.axes or ((),))[-1])
    if over_keys or not (moved or axes is not None) or not target.is_floating_point():
        return None
    others = [note_of(x) for x in noted(args)]
    calls = dict.fromkeys(x for other in others if isinstance(other, Weights) for x in other.calls)
    return Weights(axes, calls=tuple(calls))


# ---------------------------------------------------------------- single functions


def _factor(name: str, args: Args, operand: Tensor | None) -> tuple[float, float | Tensor] | None:
    """The number that a tensor was multiplied with: its mean over heads, and as it is."""
    if name not in _TIMES and name not in _OVER:
        return None
    if operand is None:
        operand = args[0] if isinstance(args[0], Tensor) and args[0].dim() else args[1]
    number = args[1] if args[0] is operand else args[0]
    if name in _OVER and number is args[0]:
        return None
    if isinstance(number, Tensor):
        if number.is_meta or (number.numel() != 1 and not _is_per_head(number, operand)):
            return None
        number = number.detach() if name in _TIMES else 1 / number.detach()
        return number.float().mean().item(), number
    if not isinstance(number, int | float):
        return None
    number = float(number) if name in _TIMES else 1.0 / number
    return number, number


def _is_per_head(number: Tensor, operand: Any) -> bool:
    """Whether scores of one head are all multiplied with the same."""
    note = note_of(operand)
    if not isinstance(note, Scores) or not 0 < number.dim() <= len(note.axes or ()):
        return False
    dims = (note.axes or ())[-number.dim() :]
    sides = [any(axis.role in (FIRST, SECOND) for axis in dim) for dim in dims]
    return all(size == 1 or not side for size, side in zip(number.shape, sides, strict=True))


def _filled(name: str, args: Args, kwargs: Options, operand: Tensor) -> Tensor | None:
    """Where scores were filled with a very negative number; None if it was another."""
    value: Any
    if name == "__setitem__":
        places, value = None, args[2]
    elif name == "where":
        first, second, third = args
        condition, chosen, other = (
            (first, second, third) if first.dtype is torch.bool else (second, first, third)
        )
        places, value = (~condition, other) if chosen is operand else (condition, chosen)
    else:
        given = dict(zip(("self", "mask", "value"), args, strict=False)) | kwargs
        places, value = given["mask"], given["value"]
    if (isinstance(value, Tensor) and value.dim()) or not float(value) < HIDES:
        return None
    return operand == value if places is None else places


def _dim(args: Args, kwargs: Options) -> int:
    dim: int = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    return dim


def _joined(args: Args, kwargs: Options, axes: Axes) -> Axes:
    at = _dim(args, kwargs) % len(axes)
    found: list[tuple[int, tuple[slice, ...] | None]] = []
    for part in args[0]:
        note = note_of(part)
        known = None
        if isinstance(note, Scores) and note.axes is not None:
            known = note.axes[at][0].known if note.axes[at] else ()
        found.append((part.shape[at], known))
    return joined(axes, at, found)


def _join(args: Args, kwargs: Options, note: Scores) -> Scores:
    """Of scores side by side, or beside columns that are none."""
    parts, dim = args[0], _dim(args, kwargs)
    notes = [note_of(part) for part in parts]

    def together(some: list[Tensor | None], others: list[Tensor]) -> Tensor | None:
        if all(x is None for x in some):
            return None
        pairs = zip(some, others, strict=True)
        return torch.cat([other if x is None else x for x, other in pairs], dim)

    return replace(
        note,
        scores=together(
            [n.scores if isinstance(n, Scores) else None for n in notes],
            [part.detach() for part in parts],
        ),
        hidden=together(
            [n.hidden if isinstance(n, Scores) else None for n in notes],
            [part.new_zeros((), dtype=torch.bool).expand(part.shape) for part in parts],
        ),
    )


def _is_basic(index: Any) -> bool:
    index = index if isinstance(index, tuple) else (index,)
    return all(x is None or x is Ellipsis or type(x) in (int, slice) for x in index)
