"""Notes that go with tensors which may become a part of attention written out by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._axes import Axes, new_axes

if TYPE_CHECKING:
    from ._calls import Pending


@dataclass(frozen=True)
class Note:
    """Of queries, keys, and whatever else may lead to them.

    axes:   None if they are not known
    factor: the numbers that were multiplied to it
    """

    axes: Axes | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Scores(Note):
    """Of a product of what may be queries and keys, or of logits made of it.

    dk:     the inner dimension of the product
    scale:  `factor` together with those of the two operands
    scores: the scaled scores, once logits have been made of them
    hidden: pairs that were filled with a very negative number
    cap:    c, if they went through c·tanh(score/c); 0 without one
    """

    dk: int = 0
    scale: float = 1.0
    scores: Tensor | None = None
    hidden: Tensor | None = None
    cap: float = 0.0


@dataclass(frozen=True)
class Weights(Note):
    """Of what came out of a softmax, or was made of the weights of several.

    calls: those that are complete once these weights meet values
    """

    calls: tuple[Pending, ...] = ()


# By id: an attribute of the tensor would be saved and copied with it.
notes: dict[int, tuple[Note, weakref.ref[Tensor]]] = {}


def note_of(value: Any) -> Note | None:
    """The note that goes with a tensor."""
    entry = notes.get(id(value))
    return None if entry is None else entry[0]


def write_note(tensor: Tensor, note: Note | None) -> None:
    """Let a note go with a tensor; it goes when the tensor goes. None takes it away."""
    key = id(tensor)
    if note is None:
        notes.pop(key, None)
    else:
        notes[key] = note, weakref.ref(tensor, lambda _: notes.pop(key, None))


def noted(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that have notes, in lists and tuples too."""
    for value in values:
        if type(value) in (list, tuple):
            yield from (x for x in value if id(x) in notes)
        elif id(value) in notes:
            yield value


def axes_of(tensor: Tensor) -> Axes:
    """The axes of a tensor, as far as they are known."""
    note = note_of(tensor)
    return new_axes(tensor.shape) if note is None or note.axes is None else note.axes
