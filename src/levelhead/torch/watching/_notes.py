"""Notes that go with tensors which may become a part of attention written out by hand."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._axes import Axes, aligned, new_axes, viewed

if TYPE_CHECKING:
    from ._calls import Pending

Factor = float | Tensor  # a tensor on another device: to read it would wait for that
_LONG = 32  # views of views


class Operand:
    """Of queries, keys, and whatever else may lead to them.

    path:   how it came to its axes; None if nothing is known of them
    factor: the numbers that were multiplied to it
    """

    __slots__ = ("factor", "path")

    def __init__(self, path: Path | None = None, factor: Factor = 1.0) -> None:
        self.path, self.factor = path, factor

    @property
    def axes(self) -> Axes | None:
        return None if self.path is None else self.path.axes


@dataclass(frozen=True)
class Scores:
    """Of a product of what may be queries and keys, or of logits made of it.

    dk:     the inner dimension of the product
    scale:  the numbers that were multiplied to it and to its operands
    factor: those that were multiplied to it
    scores: the scaled scores, once logits have been made of them
    hidden: pairs that were filled with a very negative number
    cap:    c, if they went through c·tanh(score/c); 0 without one
    """

    axes: Axes
    dk: int
    scale: Factor
    factor: Factor = 1.0
    scores: Tensor | None = None
    hidden: Tensor | None = None
    cap: Factor = 0.0


@dataclass(frozen=True)
class Weights:
    """Of what came out of a softmax, or was made of the weights of several.

    axes:   None if they were lost
    calls:  those that are complete once these weights are multiplied with values
    spread: if they were multiplied with values, each with several: whether several rows were with
        the same
    """

    axes: Axes | None
    calls: tuple[Pending, ...]
    spread: bool | None = None
    factor: Factor = 1.0


Note = Operand | Scores | Weights
View = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Path:
    """How a tensor came to its axes. Most are never asked for, so they are worked out only then.

    before: the axes of the tensor that it was made of, or its path; None if nothing is known of it
    shape:  that of the tensor that it was made of
    view:   the function and the further arguments that made a view, and which of its results it is;
        None: the dimensions are the same, `shape` is that of the result
    """

    __slots__ = ("_axes", "_depth", "_how")
    _depth: int

    def __init__(
        self,
        before: Axes | Path | None,
        shape: Sequence[int],
        view: View | None = None,
        at: int = 0,
    ) -> None:
        self._axes: Axes | None = None
        self._how: Any = before, shape, view, at
        self._depth = before._depth + 1 if type(before) is Path else 0
        if self._depth > _LONG:
            self.axes  # noqa: B018

    @property
    def axes(self) -> Axes | None:
        if self._how is not None:
            before, shape, view, at = self._how
            self._how, self._depth = None, 0
            axes = before.axes if type(before) is Path else before
            if view is None:
                self._axes = None if axes is None else aligned(axes, shape)
            else:
                made = views_of(shape, view)[at]
                self._axes = viewed(new_axes(shape) if axes is None else axes, *made)
        return self._axes


def views_of(shape: Sequence[int], view: View) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Shapes and strides of the views that a function makes of a contiguous tensor.

    Its strides say where each dimension of a view comes from.
    """
    func, args, kwargs = view
    try:
        return _cached_views(tuple(shape), func, args, tuple(kwargs.items()))
    except TypeError:  # lists and slices cannot be looked up
        return _cached_views.__wrapped__(shape, func, args, kwargs)


@lru_cache(maxsize=1024)
def _cached_views(
    shape: Sequence[int], func: Any, args: tuple[Any, ...], kwargs: Any
) -> list[tuple[Sequence[int], Sequence[int]]]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    made = func(torch.empty_strided(shape, strides, device="meta"), *args, **dict(kwargs))
    return [(x.shape, x.stride()) for x in (made if isinstance(made, list | tuple) else [made])]


# By id: an attribute of the tensor would be saved and copied with it.
notes: dict[int, tuple[Note, weakref.ref[Tensor]]] = {}


def note_of(value: Any) -> Note | None:
    """The note that goes with a tensor."""
    entry = notes.get(id(value))
    return None if entry is None else entry[0]


class _Ref(weakref.ref[Tensor]):
    __slots__ = ("key",)
    key: int


def _forget(ref: weakref.ref[Tensor]) -> None:
    notes.pop(ref.key, None)  # type: ignore[attr-defined]


def write_note(tensor: Tensor, note: Note | None) -> None:
    """Let a note go with a tensor; it goes when the tensor goes. None takes it away."""
    key = id(tensor)
    if note is None:
        notes.pop(key, None)
    else:
        ref = _Ref(tensor, _forget)
        ref.key = key
        notes[key] = note, ref


def noted(values: Sequence[Any]) -> Tensor | None:
    """The tensor whose note matters most, in lists and tuples too: weights, then scores."""
    found: Any = None
    for value in values:
        some = value
        if type(value) is list or type(value) is tuple:
            some = noted(value)
        note = note_of(some)
        if isinstance(note, Weights):
            return some  # type: ignore[no-any-return]
        if note is not None and (found is None or isinstance(note, Scores)):
            found = found if isinstance(note_of(found), Scores) else some
    return found  # type: ignore[no-any-return]


def axes_of(tensor: Tensor) -> Axes:
    """The axes of a tensor, as far as they are known."""
    note = note_of(tensor)
    axes = None if note is None else note.axes
    return new_axes(tensor.shape) if axes is None else axes
