"""Attention written out as products and a softmax: which matrix was made from which.

A note goes with each tensor that may matter. A product may be scores (_products.py); what
multiplies all of it belongs to the scale; whatever else is done to it (softcap, bias, mask, a sink
put beside it) makes logits of it; a softmax over the keys of such logits makes weights; and when
another product multiplies weights with values, that was attention. Of queries and keys the axes are
followed (_axes.py): they say which are the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._axes import FIRST, KEYS, SECOND, Axes, aligned, joined, new_axes, restrided, viewed
from ._notes import (
    Factor,
    Note,
    Operand,
    Path,
    Scores,
    View,
    Weights,
    axes_of,
    note_of,
    noted,
    views_of,
    write_note,
)
from ._notes import notes as _notes
from ._products import PRODUCTS

HIDES = -1e3  # filling with less than this hides a pair

_TIMES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_OVER = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_NEGATES = {"neg", "neg_", "negative", "__neg__"}
_FACTORS = _TIMES | _OVER | _NEGATES
_SPLITS = {"view", "reshape", "unflatten"}
_VIEWS = _SPLITS | {
    "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "H",
    "mH", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as", "flatten",
    "ravel", "select", "narrow", "unfold", "diagonal", "chunk", "split", "tensor_split", "unbind",
}  # fmt: skip
_PICKS = {"__getitem__", "index_select", "gather", "take_along_dim", "repeat", "repeat_interleave",
          "tile", "roll", "flip", "pad", "as_strided"}  # fmt: skip
_JOINS = {"cat", "concat", "concatenate"}
_STACKS = {"stack", "view_as_complex", "view_as_real"}
_COPIES = {"contiguous", "clone", "float", "half", "bfloat16", "double", "to", "type", "type_as",
           "dropout"}  # fmt: skip
_FILLS = {"masked_fill", "masked_fill_", "where", "__setitem__"}
_SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__"}
_CHANGES = _SUMS | {"tanh", "tanh_", "clamp", "clamp_", "clamp_min", "clamp_max", "clip", "maximum",
                    "minimum", "max", "min", "nan_to_num"}  # fmt: skip
_IN_PLACE = {"add_", "__iadd__", "sub_", "__isub__", "tanh_", "clamp_"}
_BROADCASTS = _TIMES | _OVER | _CHANGES | _FILLS
_MIXES = {"linear", "conv1d", "conv2d", "conv3d"}  # other numbers, though the shape may be the same
_OF_ONE = _VIEWS | _PICKS | _COPIES  # a second tensor only says how
_LINEAR = _SUMS | _COPIES | _NEGATES
_CAREFUL = _TIMES | _OVER | _VIEWS | _PICKS | _JOINS | _STACKS | _MIXES | {"__setitem__"}
BEGIN = PRODUCTS | _TIMES | _OVER | _SPLITS
PROPERTIES = {"T", "mT", "H", "mH"}

Args = tuple[Any, ...]
Options = dict[str, Any]


def operand_of(name: str, args: Args, kwargs: Options) -> Tensor | None:
    """The argument of a function whose note matters most, if any has one."""
    if not _notes or name.endswith("_like"):
        return None
    values = args if args or not kwargs else tuple(kwargs.values())
    return noted(values[:1] if name in _OF_ONE else values)


def follow(name: str, func: Any, args: Args, kwargs: Options, operand: Tensor | None) -> Any:
    """Call a function that is no product, and note on its result where that comes from."""
    if operand is None and name not in _SPLITS and _are_several(args):
        return func(*args, **kwargs)
    note, before = note_of(operand), operand
    if type(note) is Operand and name not in _CAREFUL:  # most of all calls
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.shape == operand.shape:  # type: ignore[union-attr]
            if name not in _LINEAR and (isinstance(note.factor, Tensor) or note.factor != 1):
                note = Operand(note.path)  # a norm, say: what was multiplied before is gone
            write_note(result, note)
        return result
    if name in _IN_PLACE and isinstance(note, Scores) and note.scores is None:
        before = operand.detach().clone()  # type: ignore[union-attr]
    result = func(*args, **kwargs)
    if kwargs:
        args, kwargs = _by_position(args, kwargs)
    targets = [args[0]] if name == "__setitem__" else result
    targets = targets if isinstance(targets, list | tuple) else [targets]
    if not all(isinstance(target, Tensor) and target.dim() >= 2 for target in targets):
        return result
    found: Sequence[Note | None]
    try:
        if operand is None:
            found = [_begin(name, func, args, kwargs, targets[0])]
        elif isinstance(note, Operand):
            found = _operands(name, func, args, kwargs, operand, note, targets)
        else:
            axes = _moved(name, func, args, kwargs, operand, targets)
            found = [
                _weights(name, args, operand, target, some)
                if isinstance(note, Weights)
                else _scores(name, func, args, kwargs, operand, before, target, some, at)
                for at, (target, some) in enumerate(zip(targets, axes, strict=True))
            ]
    except Exception:  # a form that we do not know is none that we can follow
        found = [None] * len(targets)
    for target, new in zip(targets, found, strict=True):
        write_note(target, new)
    return result


def _by_position(args: Args, kwargs: Options) -> tuple[Args, Options]:
    """The arguments with those first that functions have first."""
    first = [name for name in ("input", "tensors", "other") if name in kwargs]
    rest = {name: value for name, value in kwargs.items() if name not in first}
    return (*args, *(kwargs[name] for name in first)), rest


def _begin(name: str, func: Any, args: Args, kwargs: Options, target: Tensor) -> Note | None:
    """Of a tensor without a note: features split into heads, or a scaled query perhaps."""
    if name not in _SPLITS:
        factor = _factor(name, args, None)
        return None if factor is None else Operand(factor=factor[0])
    if not args[0].is_floating_point():
        return None
    shape = args[0].shape
    grows = target.dim() > len(shape) or target.shape[-1] < shape[-1]
    if len(shape) < 2 or not grows:
        return None
    return Operand(Path(None, shape, _view(func, args, kwargs)))


def _operands(
    name: str, func: Any, args: Args, kwargs: Options, operand: Tensor, note: Operand,
    targets: Sequence[Tensor],
) -> Sequence[Note | None]:  # fmt: skip
    """Of what was made of queries or keys, and of what leads to them."""
    if name in _VIEWS or (name == "__getitem__" and _is_basic(args[1])):
        view = _view(func, args, kwargs)
        paths = (Path(note.path, operand.shape, view, at) for at in range(len(targets)))
        return [Operand(path, note.factor) for path in paths]
    if name in _TIMES | _OVER and (factor := _factor(name, args, operand)) is not None:
        return [Operand(note.path, note.factor * factor[0])]
    (target,) = targets
    if name in _MIXES or note.path is None:
        return [None if name in _MIXES or name == "__setitem__" else note]
    if name in _STACKS or name in ("__setitem__", "as_strided"):
        axes = _moved(name, func, args, kwargs, operand, targets)[0]
        return [None if axes is None else Operand(Path(axes, target.shape), note.factor)]
    if target.dim() < operand.dim():
        return [None]
    return [Operand(Path(note.path, target.shape), note.factor)]


def _view(func: Any, args: Args, kwargs: Options) -> View:
    """What makes a view of its first argument, as it can be kept."""

    def keep(value: Any) -> Any:
        if type(value) is list:
            return tuple(map(keep, value))
        if not isinstance(value, Tensor):
            return value
        return torch.empty(value.shape, device="meta") if value.dim() else value.item()

    return func, tuple(map(keep, args[1:])), {name: keep(value) for name, value in kwargs.items()}


def _moved(
    name: str, func: Any, args: Args, kwargs: Options, operand: Tensor, targets: Sequence[Tensor]
) -> Sequence[Axes | None]:
    """Where the axes of an operand are in what was made of it."""
    axes, target = axes_of(operand), targets[0]
    if name in _VIEWS or (name == "__getitem__" and _is_basic(args[1])):
        views = views_of(operand.shape, _view(func, args, kwargs))
        return [viewed(axes, *view) for view in views]
    if name == "pad" and isinstance(note_of(operand), Scores):
        left, right, *others = args[1] if len(args) > 1 else kwargs["pad"]
        if min(left, right) >= 0 and not any(others):
            known = axes[-1][0].known if axes[-1] else ()
            parts = [(left, None), (operand.shape[-1], known), (right, None)]
            return [joined(axes, len(axes) - 1, [part for part in parts if part[0]])]
    if name == "as_strided":
        return [restrided(axes, operand.stride(), target.shape, target.stride())]
    if name in _PICKS:
        kept = target.dim() == operand.dim() or name in ("repeat", "tile")
        return [aligned(axes, target.shape) if kept else None]
    if name in _JOINS:
        return [_joined(args, kwargs, axes)]
    if name in _STACKS:
        if name == "view_as_complex":
            return [axes[:-1]]
        at = (_dim(args, kwargs) if name == "stack" else -1) % target.dim()
        return [(*axes[:at], *new_axes(target.shape[at : at + 1]), *axes[at:])]
    if name == "linear":
        return [(*axes[:-1], *new_axes(target.shape[-1:]))]
    same = target.dim() == operand.dim() if name == "__setitem__" else name in _BROADCASTS
    return [aligned(axes, target.shape) if same or target.shape == operand.shape else None]


def _scores(
    name: str, func: Any, args: Args, kwargs: Options, operand: Tensor, before: Any,
    target: Tensor, axes: Axes | None, at: int,
) -> Note | None:  # fmt: skip
    """Of what was made of scores."""
    note = note_of(operand)
    assert isinstance(note, Scores)
    if axes is None or name in _MIXES:
        return None
    note = replace(note, axes=axes)
    if name in _FACTORS and (factor := _factor(name, args, operand)) is not None:
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
    if name == "__setitem__" and operand is not target:  # written into another tensor
        return note if note.scores is note.hidden is None else None
    if name in _BROADCASTS:
        filled = _filled(name, args, kwargs, operand) if name in _FILLS else None
        hidden, scores, cap = note.hidden, note.scores, note.cap
        if filled is not None:
            hidden = filled if hidden is None else hidden | filled
        elif scores is None and name != "__setitem__":
            scores, cap = before.detach(), float(name in ("tanh", "tanh_"))
        scores, hidden = (None if x is None else x.expand(target.shape) for x in (scores, hidden))
        return replace(note, scores=scores, hidden=hidden, cap=cap)
    return Operand(Path(axes, target.shape))  # queries or keys perhaps, but scores no longer


def _weights(
    name: str, args: Args, operand: Tensor, target: Tensor, axes: Axes | None
) -> Weights | None:
    """Of what was made of weights: they stay weights while each row is over keys."""
    note = note_of(operand)
    assert isinstance(note, Weights)
    over_keys = name == "linear" and any(x.role == KEYS for x in (note.axes or ((),))[-1])
    moved = axes is not None or name in _VIEWS | _PICKS | _STACKS
    if over_keys or not moved or not target.is_floating_point():
        return None
    some = args[0] if name in _JOINS or name == "stack" else args
    others = [other for x in some if isinstance(other := note_of(x), Weights)]
    calls = dict.fromkeys(call for other in others for call in other.calls)
    spread = note.spread
    if name in _TIMES and target.shape != operand.shape:
        values = args[1] if args[0] is operand else args[0]
        pairs = zip(operand.shape[::-1], values.shape[::-1], strict=False)
        spread = values.dim() > 2 and any(mine > 1 == theirs for mine, theirs in pairs)
    return Weights(axes, tuple(calls), spread)


# ---------------------------------------------------------------- single functions


def _factor(name: str, args: Args, operand: Tensor | None) -> tuple[Factor, float | Tensor] | None:
    """The number that a tensor was multiplied with: its mean over heads, and as it is."""
    if name in _NEGATES:
        return -1.0, -1.0
    if operand is None:
        operand = args[0] if isinstance(args[0], Tensor) and args[0].dim() else args[1]
    number = args[1] if args[0] is operand else args[0]
    if name in _OVER and number is args[0]:
        return None
    if isinstance(number, Tensor):
        if number.is_meta or not (number.numel() == 1 or _is_per_head(number, operand)):
            return None
        number = number.detach() if name in _TIMES else 1 / number.detach()
        mean = number.float().mean()
        # On another device it stays a tensor: to read it would wait for all that is yet to do.
        return (mean.item() if number.is_cpu else mean), number
    if not isinstance(number, int | float):
        return None
    number = float(number) if name in _TIMES else 1.0 / number
    return number, number


def _is_per_head(number: Tensor, operand: Any) -> bool:
    """Whether all queries or scores of a head are multiplied with the same."""
    note = note_of(operand)
    if not isinstance(note, Scores):
        return _is_of_heads(number)
    if not 0 < number.dim() <= len(note.axes):
        return False
    sides = [any(x.role in (FIRST, SECOND) for x in dim) for dim in note.axes[-number.dim() :]]
    return all(size == 1 or not side for size, side in zip(number.shape, sides, strict=True))


def _is_of_heads(number: Tensor) -> bool:
    """Whether it can be one number per head: (heads, 1, 1), of queries (..., heads, L, d_k)."""
    return number.dim() > 2 and number.shape[-2:] == (1, 1)


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
    found: Tensor = operand == value if places is None else places
    return found


def _dim(args: Args, kwargs: Options) -> int:
    dim: Any = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    return int(dim)


def _joined(args: Args, kwargs: Options, axes: Axes) -> Axes:
    at = _dim(args, kwargs) % len(axes)
    found: list[tuple[int, tuple[slice, ...] | None]] = []
    for part in args[0]:
        note = note_of(part)
        known = None
        if isinstance(note, Scores):
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


def _are_several(args: Args) -> bool:
    """Whether no argument is a single number, or one per head."""
    return all(isinstance(x, Tensor) and x.numel() != 1 and not _is_of_heads(x) for x in args)


def _is_basic(index: Any) -> bool:
    index = index if isinstance(index, tuple) else (index,)
    return all(x is None or x is Ellipsis or type(x) in (int, slice) for x in index)
