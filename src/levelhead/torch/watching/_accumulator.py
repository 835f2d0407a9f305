"""Statistics by layer, gathered quickly and merged when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np

from ..._health import GradHealth, Health

Statistics = TypeVar("Statistics", Health, GradHealth)
_MANY = 32  # parts are merged from here on, so that they do not fill the memory


class Accumulator(Generic[Statistics]):
    """Per layer the statistics that came, of shape (batch, heads) or (heads,)."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Statistics]] = {}

    def add(self, layer: str, part: Statistics) -> None:
        parts = self._parts.setdefault(layer, [])
        parts.append(part if part.sums.size < 1e5 else part.over_batch())
        if len(parts) >= _MANY:
            parts[:] = [merge(parts)]

    def add_all(self, layers: Mapping[str, Statistics]) -> None:
        for layer, part in layers.items():
            self.add(layer, part)

    def merged(self) -> dict[str, Statistics]:
        """Per layer all of it together, of shape (heads,)."""
        parts = [part for parts in self._parts.values() for part in parts]
        alike = len({part.shape for part in parts}) == 1 and len(parts) == len(self._parts)
        if not alike:
            return {layer: merge(parts) for layer, parts in self._parts.items()}
        # One part a layer, the usual case: all layers side by side, as if heads of one.
        heads, kind = parts[0].shape[-1], type(parts[0])
        sums = kind(np.concatenate([part.sums for part in parts], axis=-2)).over_batch().sums
        return {
            layer: kind(sums[heads * place : heads * (place + 1)])
            for place, layer in enumerate(self._parts)
        }

    def clear(self) -> None:
        self._parts.clear()

    def __bool__(self) -> bool:
        return bool(self._parts)


def merge(parts: list[Statistics]) -> Statistics:
    """Batches of the same heads as one, of shape (heads,)."""
    if len(parts) == 1:
        return parts[0].over_batch()
    entries = [part.sums if part.sums.ndim == 3 else part.sums[None] for part in parts]
    return type(parts[0])(np.concatenate(entries)).over_batch()
