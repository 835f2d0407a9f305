"""Statistics per head, kept as raw sums: cheap to make, exact to merge, fields on demand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from typing import Self

Floats = NDArray[np.float64]
Index = int | slice | tuple[int | slice, ...]


class PerHead:
    """Float64 sums of shape (..., Hq, columns) and what every kind of statistic does with them.

    The constructor only stores and trusts what it gets; `from_sums` checks sums from elsewhere. The
    engine does without either and leaves the array to the first who looks.
    """

    __slots__ = ("_sums", "_unmade")
    COLUMNS: ClassVar[tuple[str, ...]]
    FIELDS: ClassVar[tuple[str, ...]]

    def __init__(self, sums: Floats) -> None:
        self._sums = sums

    if not TYPE_CHECKING:  # to a type checker it would give every name an attribute

        def __getattr__(self, name: str) -> Floats:
            if name != "_sums":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            numbers = np.frombuffer(self._unmade)  # rank, sizes, sums
            shape, sums = np.split(numbers[1:], [int(numbers[0])])
            self._sums = sums.reshape(shape.astype(int)).copy()
            return self._sums

    @classmethod
    def from_sums(cls, sums: ArrayLike) -> Self:
        """Wrap raw sums of shape (..., Hq, len(COLUMNS)), in the order of COLUMNS."""
        given = np.asarray(sums, dtype=np.float64)
        if given.ndim < 2 or given.shape[-1] != len(cls.COLUMNS):
            raise ValueError(
                f"sums must have shape (..., heads, {len(cls.COLUMNS)}), got {given.shape}"
            )
        return cls(given)

    @property
    def sums(self) -> Floats:
        """The raw sums, for storing: `from_sums` takes them back."""
        return self._sums

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., Hq), the shape of every field."""
        return self._sums.shape[:-1]

    def merge(self, *others: Self) -> Self:
        """Statistics of all the parts together: `a.merge(b)` or `Health.merge(a, b, c)`.

        Entries at the same place are merged, so all shapes must be equal. Parts whose batches
        differ in size first go through `over_batch()`, which leaves one entry per head.
        """
        for other in others:
            if type(other) is not type(self):
                raise TypeError(
                    f"merge takes {type(self).__name__} objects, got {type(other).__name__}"
                )
            if other.shape != self.shape:
                raise ValueError(
                    f"merge needs equal shapes, got {self.shape} and {other.shape}; "
                    "over_batch() brings each to one entry per head"
                )
        return type(self)(self._combine(np.stack([self._sums, *(o._sums for o in others)])))

    def over_batch(self) -> Self:
        """All batch entries merged: shape (Hq,)."""
        if self._sums.ndim == 2:
            return self
        # Not -1 for the batch: a size of 0 elsewhere would leave it undetermined.
        batch = math.prod(self._sums.shape[:-2])
        return type(self)(self._combine(self._sums.reshape(batch, *self._sums.shape[-2:])))

    @staticmethod
    def _combine(parts: Floats) -> Floats:
        """Merge along the first axis, which may be empty."""
        raise NotImplementedError

    def __getitem__(self, index: Index) -> Self:
        """Select batch entries; the heads always stay together."""
        entries = index if isinstance(index, tuple) else (index,)
        batch_axes = self._sums.ndim - 2
        if len(entries) > batch_axes:
            raise IndexError(
                f"{len(entries)} indices for {batch_axes} batch axes of shape {self.shape}: "
                "indexing selects batch entries; for one head index a field, as in .entropy[0]"
            )
        return type(self)(self._sums[entries])

    def to_dict(self) -> dict[str, Any]:
        """Every field as nested lists of plain numbers, None where there is no finite number."""
        return {name: _plain(getattr(self, name).tolist()) for name in self.FIELDS}

    def _heads(self) -> list[dict[str, float]]:
        """The fields of each head of shape (Hq,), as numbers."""
        columns = [getattr(self, name).tolist() for name in self.FIELDS]
        return [
            dict(zip(self.FIELDS, values, strict=True)) for values in zip(*columns, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerHead) or type(other) is not type(self):
            return NotImplemented
        return np.array_equal(self._sums, other._sums, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape})"


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise quotient, NaN where the denominator is 0: nothing to average."""
    nothing = denominator == 0
    return np.where(nothing, np.nan, numerator / np.where(nothing, 1.0, denominator))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None
