"""Which axis is which: batch, heads, queries and keys, followed through reshapes and products.

A dimension of a tensor is a sequence of axes, outer to inner: `view(batch * heads, n, d)` makes one
dimension of two axes, and a later view may take it apart again. Axes that were split from one are
of one family. That shows the heads: features are split into heads and what a product sums over.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

BATCH = "batch"  # in both operands of the product
FIRST, SECOND = "first", "second"  # in one of them: queries and keys, or keys and queries
TABLE = "table"  # in one that is a single matrix for a whole batch: a layer's weights, no keys
KEYS, QUERIES = "keys", "queries"  # once a softmax has shown which is which

PROVED = "proved"  # heads: split from the features that the product sums over
PLACED = "placed"  # heads, if nothing is known: the last of the batch dimensions
FOLDED = "folded"  # the only batch dimension: batch, heads, or both
DENIED = "denied"  # no heads: the product sums over the features of one that was picked

REPEATED = object()  # the family of axes along which all is the same


class Axis(NamedTuple):
    """One axis of a tensor; a dimension of size 1 has none.

    family: one object for all axes that were split from one
    role:   in the scores
    heads:  why it may be that of the heads, or not
    known:  of one joined from several: the parts that come from products, if not all do
    part:   it was larger
    """

    size: int
    family: object
    role: str = BATCH
    heads: str = ""
    known: tuple[slice, ...] = ()
    part: bool = False


Dim = tuple[Axis, ...]
Axes = tuple[Dim, ...]


def new_axes(shape: Sequence[int]) -> Axes:
    """Of a tensor that nothing is known of."""
    return tuple(_new(size) for size in shape)


def _new(size: int) -> Dim:
    return () if size == 1 else (Axis(size, object()),)


# ---------------------------------------------------------------- other dimensions


def viewed(axes: Axes, shape: Sequence[int], strides: Sequence[int]) -> Axes | None:
    """The axes of a view of a contiguous tensor; None if they are lost.

    Where a view moves numbers from one row to the next (relative positions are shifted so), rows
    are still taken for rows, and columns for columns.
    """
    if 0 in shape:
        return aligned(axes, shape)
    flat = [axis for dim in axes for axis in dim]
    dims = []
    steps = _steps(tuple(axis.size for axis in flat), tuple(shape), tuple(strides))
    for at, (size, taken) in enumerate(zip(shape, steps, strict=True)):
        if taken is not None:
            repeats = size > 1 and not taken
            dim = (Axis(size, REPEATED),) if repeats else tuple(_cut(flat[i], n) for i, n in taken)
        elif len(shape) == len(axes):
            dim = _resized(axes[at], size)
        else:
            return None
        dims.append(dim)
    return tuple(dims)


@lru_cache(maxsize=1024)
def _steps(
    sizes: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> list[list[tuple[int, int]] | None]:
    """Per dimension of a view the axes that it steps through, and how much of each.

    sizes: of the axes of a contiguous tensor. None: through something that is no axis
    """
    places = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    found: list[list[tuple[int, int]] | None] = []
    for size, first in zip(shape, strides, strict=True):
        left, stride = size, first
        taken: list[tuple[int, int]] = []
        for at in reversed(range(len(sizes))):  # the innermost first
            if left == 1 or stride == 0 or places[at] * sizes[at] <= stride:
                continue
            step, rest = divmod(stride, places[at])
            reached = -(-sizes[at] // max(step, 1))
            if rest or (left > reached and (sizes[at] % step or left % reached)):
                break
            taken.insert(0, (at, min(left, reached)))
            left, stride = max(left // reached, 1), places[at] * sizes[at]
        found.append(taken if left == 1 or stride == 0 else None)
    return found


def restrided(
    axes: Axes, before: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> Axes | None:
    """The axes of a view given by its strides, of a tensor with other strides before."""
    places: list[tuple[int, Axis]] = []
    for dim, stride in zip(axes, before, strict=True):
        place = stride
        for axis in reversed(dim):
            places.append((place, axis))
            place *= axis.size
    places.sort(key=lambda entry: entry[0])
    found: list[Axis] = []  # the innermost first
    inner = 1
    for place, axis in places:
        if place != inner:
            return None  # there are gaps, or it overlaps
        inner *= axis.size
        if found and found[-1].family is axis.family:  # the view may step from one to the next
            found[-1] = axis._replace(size=axis.size * found[-1].size)
        else:
            found.append(axis)
    return viewed(tuple((axis,) for axis in reversed(found)), shape, strides)


def aligned(axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes of a tensor with the same dimensions, counted from the last, of other sizes."""
    more = len(shape) - len(axes)
    dims = ((),) * more + axes[max(-more, 0) :]
    return tuple(_resized(dim, size) for dim, size in zip(dims, shape, strict=True))


def _resized(dim: Dim, size: int) -> Dim:
    if math.prod(axis.size for axis in dim) == size:
        return dim
    if size == 1 or not dim:
        return _new(size)
    outer, rest = divmod(size, math.prod(axis.size for axis in dim[1:]))
    if rest or not outer:
        return (_cut(dim[-1], size),)
    return dim[1:] if outer == 1 else (_cut(dim[0], outer), *dim[1:])


def _cut(axis: Axis, size: int) -> Axis:
    if size == axis.size:
        return axis
    if axis.known:
        raise ValueError("which of its parts are left is not known")
    return axis._replace(size=size, part=axis.part or size < axis.size)


def joined(axes: Axes, at: int, parts: Sequence[tuple[int, tuple[slice, ...] | None]]) -> Axes:
    """The axes of tensors put side by side in dimension `at`, `axes` being those of one of them.

    parts: the size of each, and of what is known there: None for nothing, () for all
    """
    known, end = [], 0
    for size, inner in parts:
        if inner is not None:
            known += [slice(end + x.start, end + x.stop) for x in inner or (slice(0, size),)]
        end += size
    roles = {axis.role for dim in axes for axis in dim}
    alone = Axis(end, object(), FIRST if SECOND in roles else SECOND)  # a dimension of size 1
    whole = (axes[at][-1] if axes[at] else alone)._replace(
        size=end, known=() if all(inner == () for _, inner in parts) else tuple(known)
    )
    return *axes[:at], (whole,), *axes[at + 1 :]


# ---------------------------------------------------------------- products


class Terms(NamedTuple):
    """The dimensions of a product of two tensors by name, as in an einsum."""

    first: tuple[Hashable, ...]
    second: tuple[Hashable, ...]
    result: tuple[Hashable, ...]

    @property
    def summed(self) -> list[Hashable]:
        return [name for name in self.first if name in self.second and name not in self.result]


@lru_cache(maxsize=256)
def matmul_terms(first: int, second: int) -> Terms | None:
    """Of a matmul of tensors with so many dimensions."""
    if min(first, second) < 2:
        return None
    batch = tuple(range(max(first, second) - 2))
    return Terms(
        (*batch[len(batch) + 2 - first :], "i", "d"),
        (*batch[len(batch) + 2 - second :], "d", "j"),
        (*batch, "i", "j"),
    )


@lru_cache(maxsize=256)
def einsum_terms(equation: str, first: int, second: int) -> Terms | None:
    """Of an einsum of two tensors with so many dimensions; None if it is no product of them."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if len(operands) != 2:
        return None
    dots = [n - len(x.replace("...", "")) for n, x in zip((first, second), operands, strict=True)]
    batch = tuple(range(max(dots)))
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." + "".join(x for x in sorted(set(letters)) if letters.count(x) == 1)

    def names(term: str, count: int) -> tuple[Hashable, ...]:
        before, dotted, after = term.partition("...")
        return (*before, *(batch[len(batch) - count :] if dotted else ()), *after)

    found = Terms(
        names(operands[0], dots[0]), names(operands[1], dots[1]), names(right, len(batch))
    )
    distinct = all(len(set(term)) == len(term) for term in found)
    alone = set(found.first) ^ set(found.second)
    return found if distinct and alone <= set(found.result) and found.summed else None


def of_product(terms: Terms, first: Axes, second: Axes) -> Axes:
    """The axes of a product's result, with their roles and why they may be those of the heads."""
    sides = dict(zip(terms.first, first, strict=True)), dict(zip(terms.second, second, strict=True))
    summed = [axis for side in sides for name in terms.summed for axis in side[name]]
    features = {axis.family for axis in summed} - {REPEATED}

    def is_split(dim: Dim) -> bool:
        return any(axis.family in features for axis in dim)

    def heads_in(dim: Dim) -> int:
        proved = (axis.size for axis in dim if axis.family in {*features, REPEATED})
        return math.prod(proved) if is_split(dim) else 0

    shared = [x for x in terms.result if x in sides[0] and x in sides[1]]
    free = [[x for x in terms.result if x in side and x not in shared] for side in sides]
    rows = [names[-1] for names in free if names]
    found = {x: max((side[x] for side in sides), key=heads_in) for x in shared}
    found = {x: dim or sides[0][x] or sides[1][x] for x, dim in found.items()}
    found |= {x: side[x] for side, names in zip(sides, free, strict=True) for x in names}
    proved = [x for x in terms.result if is_split(found[x])]
    # Rows may be of the family too: if all of a tensor was one dimension, or heads attend to heads.
    whole = [x for x in rows if found[x] and all(axis.family in features for axis in found[x])]
    if len(whole) == 2 or any(x in shared for x in proved):
        proved = [x for x in proved if x not in whole]
    lead = [x for x in terms.result if x not in rows]
    placed = None if len(lead) < 2 else shared[-1] if len(shared) > 1 else lead[-1]

    def dimension(name: Hashable) -> Dim:
        role = BATCH
        if name not in shared:
            side, other = sides if name in sides[0] else sides[::-1]
            role = FIRST if side is sides[0] else SECOND
            if len(side) == 2 < len(other):
                role = TABLE
        heads = PLACED if name == placed else FOLDED if lead == [name] else ""
        if not proved and any(axis.part for axis in summed):
            heads = DENIED
        return tuple(
            Axis(axis.size, axis.family, role, PROVED if proves(name, axis) else heads)
            for axis in found[name]
        )

    def proves(name: Hashable, axis: Axis) -> bool:
        return name in proved and (axis.family in features or axis.family is REPEATED)

    return tuple(dimension(name) for name in terms.result)
