"""What several ranks have seen in a step, laid out in the same way on each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..._health import GradHealth, Health
from ..._health.describe import plural
from ..._health.statistics import Floats
from ..._records import StepRecord
from ...scaling import ScaleInUse, in_use
from ._accumulator import Statistics
from ._reduction import Kind, Reduce, nothing, reduce_sums

_KINDS: dict[str, Kind] = {"health": Health, "gradients": GradHealth}
_SCALARS = ("scalars", "means")


class Entry(NamedTuple):
    """Something that a rank has statistics of.

    part:  the field of `StepRecord`
    name:  of a layer or of a scalar
    heads: how many of the layer this rank holds; 0 for a scalar
    """

    part: str
    name: str
    heads: int


def entries(record: StepRecord) -> list[Entry]:
    """What a rank has statistics of in a step."""
    layers = [
        Entry(part, name, each.shape[-1])
        for part in _KINDS
        for name, each in getattr(record, part).items()
    ]
    return layers + [Entry(part, name, 0) for part in _SCALARS for name in getattr(record, part)]


class _Placed(NamedTuple):
    sums: Floats  # (heads of all ranks, columns)
    seen: Floats  # 1 for each layer that this rank has, 0 for others


class Layout:
    """Where the entries of this rank stand among those of all ranks.

    Ranks of one shard hold the same heads of a layer and saw other data; the heads of the shards
    stand one after the other. If two ranks of a shard have another number of heads in a layer,
    these are two layers: `attn` and `attn (2 heads)`.
    """

    def __init__(
        self, shard: int, shards: int, ranks: Sequence[tuple[int, Sequence[Entry]]]
    ) -> None:
        """ranks: the shard and the entries of each rank."""
        self._shard, self._shards = shard, shards
        self._heads: dict[str, dict[str, list[int]]] = {part: {} for part in _KINDS}
        self._scalars: dict[tuple[str, str], int] = {}  # with their place
        self._first: dict[tuple[int, str], int] = {}  # heads of a shard in a layer
        for there, found in ranks:
            for entry in found:
                if entry.part in _SCALARS:
                    self._scalars.setdefault((entry.part, entry.name), len(self._scalars))
                    continue
                name = self._name(there, entry.name, entry.heads)
                self._heads[entry.part].setdefault(name, [0] * shards)[there] = entry.heads

    def _name(self, shard: int, layer: str, heads: int) -> str:
        first = self._first.setdefault((shard, layer), heads)
        return layer if heads == first else f"{layer} ({plural(heads, 'head')})".strip()

    def reduce(self, record: StepRecord, total: Reduce, largest: Reduce) -> StepRecord:
        """The record of all ranks, from that of this one.

        Scalars become their mean over the ranks that have them.
        """
        health, gradients = (self._place(part, getattr(record, part)) for part in _KINDS)
        scalars, scales = self._own_scalars(record), self._own_scales(record)
        added = np.concatenate([scalars.ravel(), health.seen, gradients.seen])
        sums: list[tuple[Kind, Floats]] = [(Health, health.sums), (GradHealth, gradients.sums)]
        found = reduce_sums(sums, added, scales.ravel(), total, largest)
        ends = np.cumsum([scalars.size, health.seen.size])
        numbers, *seen = np.split(found.added, ends)
        values, many = numbers.reshape(scalars.shape)
        known = {at: float(values[at] / many[at]) for at in np.flatnonzero(many).tolist()}

        def mean(part: str) -> dict[str, float]:
            places = self._scalars.items()
            return {name: known[at] for (its, name), at in places if its == part and at in known}

        return replace(
            record,
            health=self._layers(Health, "health", found.sums[0], seen[0]),
            gradients=self._layers(GradHealth, "gradients", found.sums[1], seen[1]),
            scalars=mean("scalars"),
            means=mean("means"),
            scales=self._scales(found.highest.reshape(scales.shape)),
        )

    # ------------------------------------------------------------ heads

    def _place(self, part: str, layers: Mapping[str, Health | GradHealth]) -> _Placed:
        """The sums of this rank among those of all heads, with nothing where it has none."""
        heads = self._heads[part]
        sums = nothing(_KINDS[part], sum(map(sum, heads.values())))
        own = {self._name(self._shard, name, x.shape[-1]): x.sums for name, x in layers.items()}
        at = 0
        for name, many in heads.items():
            if name in own:
                first = at + sum(many[: self._shard])
                sums[first : first + many[self._shard]] = own[name]
            at += sum(many)
        return _Placed(sums, np.array([float(name in own) for name in heads]))

    def _layers(
        self, kind: type[Statistics], part: str, sums: Floats, seen: Floats
    ) -> dict[str, Statistics]:
        """Those that some rank has seen."""
        found, at = {}, 0
        for (name, many), ranks in zip(self._heads[part].items(), seen, strict=True):
            if ranks:
                found[name] = kind(sums[at : at + sum(many)])
            at += sum(many)
        return found

    # ------------------------------------------------------------ numbers beside them

    def _own_scalars(self, record: StepRecord) -> Floats:
        """Values and how many there are, (2, scalars)."""
        found = np.zeros((2, len(self._scalars)))
        for (part, name), at in self._scalars.items():
            values = getattr(record, part)
            if name in values:
                found[:, at] = values[name], 1.0
        return found

    def _own_scales(self, record: StepRecord) -> Floats:
        """Scale, d_k and width of each layer, (layers, 3), -inf where one is not known.

        A width that is that of the heads here says nothing of the model if others have more.
        """
        found = np.full((len(self._heads["health"]), 3), -math.inf)
        at = {name: place for place, name in enumerate(self._heads["health"])}
        for name, scale in record.scales.items():
            heads = record.health[name].shape[-1]
            width = scale.d_model if scale.d_model != heads * scale.d_k else None
            numbers = (scale.scale, scale.d_k, width)
            place = at[self._name(self._shard, name, heads)]
            found[place] = [-math.inf if x is None else x for x in numbers]
        return found

    def _scales(self, numbers: Floats) -> dict[str, ScaleInUse]:
        found = {}
        for (name, many), row in zip(self._heads["health"].items(), numbers, strict=True):
            scale, d_k, width = (None if x == -math.inf else float(x) for x in row)
            if d_k is not None:
                d_model = sum(many) * int(d_k) if width is None else int(width)
                found[name] = in_use(scale, int(d_k), d_model)
        return found
