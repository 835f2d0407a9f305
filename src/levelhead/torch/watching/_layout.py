"""From the logits of a call as they are to matrices (batch, heads, queries, keys)."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from ._attribution import declared_heads, heads_of
from ._axes import (  # fmt: skip
    BATCH,
    DENIED,
    FIRST,
    FOLDED,
    KEYS,
    PLACED,
    PROVED,
    QUERIES,
    SECOND,
    TABLE,
    Axes,
    Axis,
    Dim,
)


class Layout(NamedTuple):
    """How logits, and what is laid out like them, become matrices; nothing is copied for it.

    sizes: of all axes, as they follow each other
    order: in which they are wanted: batch, heads, queries, keys
    heads: how many of the axes are those of heads
    known: the columns of the keys, if a learned sink or the like has columns beside them
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    heads: int
    known: tuple[slice, ...]

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes before queries and keys."""
        return tuple(self.sizes[at] for at in self.order[:-2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        lead, split = self.lead, len(self.order) - 2 - self.heads
        rows, keys = (self.sizes[at] for at in self.order[-2:])
        if self.known:
            keys = sum(part.stop - part.start for part in self.known)
        return math.prod(lead[:split]), math.prod(lead[split:]), rows, keys

    def keys(self, tensor: Tensor) -> Tensor:
        """The matrices, (*lead, queries, keys)."""
        matrices = self._matrices(tensor)
        return _columns(matrices, self.known) if self.known else matrices

    def others(self, tensor: Tensor) -> Tensor | None:
        """The columns beside the keys, (*lead, queries, columns)."""
        if not self.known:
            return None
        ends = [0, *(end for part in self.known for end in (part.start, part.stop)), None]
        between = zip(ends[::2], ends[1::2], strict=True)
        return _columns(self._matrices(tensor), tuple(slice(*pair) for pair in between))

    def _matrices(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.sizes).permute(self.order)


def _columns(matrices: Tensor, parts: tuple[slice, ...]) -> Tensor:
    found = [matrices[..., part] for part in parts]
    found = [part for part in found if part.shape[-1]] or found[:1]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def lay_out(axes: Axes, dim: int, frame: FrameType) -> tuple[Layout, Axes] | None:
    """The layout of logits whose softmax is over a dimension, and the axes of its weights.

    None if that dimension is not one of keys. frame: of who made the call
    """
    roles = {axis.role for axis in axes[dim]}
    elsewhere = {axis.role for at, some in enumerate(axes) if at != dim for axis in some}
    sides = roles & {FIRST, SECOND} if roles else {FIRST if SECOND in elsewhere else SECOND}
    joined = [axis for some in axes for axis in some if axis.known]
    if len(sides) != 1 or TABLE in roles or any((axis,) != axes[dim] for axis in joined):
        return None

    def is_query(axis: Axis) -> bool:
        return axis.role not in {BATCH, KEYS, *sides} and axis.heads != PROVED

    found: list[Axis] = []  # as they follow each other
    for at, some in enumerate(axes):
        whole = Axis(math.prod(axis.size for axis in some), None, KEYS)
        found += [whole] if at == dim else _whole_rows(some, is_query)
    _pick_heads_among_rows(found, is_query, frame)
    if rows := [at for at, axis in enumerate(found) if is_query(axis)]:
        found[rows[-1]] = found[rows[-1]]._replace(role=QUERIES)
    else:
        found.append(Axis(1, None, QUERIES))
    found, heads = _find_heads(found, frame)
    (row,) = (at for at, axis in enumerate(found) if axis.role == QUERIES)
    (key,) = (at for at, axis in enumerate(found) if axis.role == KEYS)
    batch = [at for at in range(len(found)) if at not in {row, key, *heads}]
    layout = Layout(
        tuple(axis.size for axis in found),
        (*batch, *heads, row, key),
        len(heads),
        joined[0].known if joined else (),
    )
    weights = tuple(
        tuple(
            Axis(
                axis.size, axis.family, KEYS if at == dim else QUERIES if is_query(axis) else BATCH
            )
            for axis in some
        )
        for at, some in enumerate(axes)
    )
    return layout, weights


def _whole_rows(dim: Dim, is_query: Callable[[Axis], bool]) -> list[Axis]:
    """The axes of a dimension, those of queries in rows and columns or in blocks as one."""
    found: list[Axis] = []
    for axis in reversed(dim):
        inner = found[-1] if found else None
        if inner and is_query(inner) and (is_query(axis) or axis.family is inner.family):
            found[-1] = inner._replace(size=inner.size * axis.size)
        else:
            found.append(axis)
    return found[::-1]


def _pick_heads_among_rows(
    found: list[Axis], is_query: Callable[[Axis], bool], frame: FrameType
) -> None:
    """Where all heads have the same keys, theirs is an axis of the queries: the module knows."""
    rows = [at for at, axis in enumerate(found) if is_query(axis)]
    if len(rows) < 2 or any(axis.heads in (PROVED, DENIED) for axis in found):
        return
    others = {axis.size for axis in found if axis.role == BATCH}
    for count in declared_heads(frame):
        for at in reversed(rows):
            if found[at].size == count and count not in others:
                found[at] = found[at]._replace(heads=PROVED)
                return


def _find_heads(found: list[Axis], frame: FrameType) -> tuple[list[Axis], list[int]]:
    """The axes, one perhaps split into batch and heads, and which are those of the heads."""
    lead = [at for at, axis in enumerate(found) if axis.role not in (QUERIES, KEYS)]
    by_reason = {
        reason: [at for at in lead if found[at].heads == reason]
        for reason in (PROVED, PLACED, FOLDED, DENIED, "")
    }
    if by_reason[PROVED] or by_reason[DENIED]:
        return found, by_reason[PROVED]
    if lead == by_reason[FOLDED] and len(lead) == 1:
        (at,) = lead
        heads = heads_of(found[at].size, frame)
        parts = [found[at]._replace(size=found[at].size // heads), found[at]._replace(size=heads)]
        return [*found[:at], *parts, *found[at + 1 :]], [at + 1]
    for count in declared_heads(frame):
        if count == 1:
            return found, []
        for length in range(1, len(lead) + 1):
            for start in reversed(range(len(lead) - length + 1)):
                some = lead[start : start + length]
                if math.prod(found[at].size for at in some) == count:
                    return found, some
    if by_reason[FOLDED]:
        return found, lead[-1:]  # it was taken apart
    return found, by_reason[PLACED]
