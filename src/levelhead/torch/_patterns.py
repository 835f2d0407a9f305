"""What the rows of a sequence have in common, in plain torch, on any device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._health.sampling import sampled_rows
from .._options import OPEN

Whole = int | NDArray[np.int64] | Tensor


class Sample(NamedTuple):
    """The rows of a call, or of a part of it, that patterns are taken from."""

    rows: NDArray[np.int64]  # (R,), those of any batch entry
    chosen: NDArray[np.bool_]  # (..., 1, R), of which entry; all of them on other devices
    offset: Whole  # (..., 1), position of the call's first query among the keys

    def part(self, rows: slice) -> Sample:
        """Those among some rows, counted from the first of these."""
        among = (self.rows >= rows.start) & (self.rows < rows.stop)
        return Sample(self.rows[among] - rows.start, self.chosen[..., among], self.offset)

    def of(self, x: Tensor, dim: int) -> Tensor:
        """These rows of a tensor that has all of them in a dimension."""
        if x.is_cpu:
            return x.index_select(dim, torch.from_numpy(self.rows))
        # Sending indices to a device waits for it.
        rows = [x.select(dim, row) for row in self.rows.tolist()]
        return torch.stack(rows, dim) if rows else x.narrow(dim, 0, 0)


def sample(
    rows: int, keys: int, left: int = OPEN, right: int = OPEN,
    offset: int | NDArray[np.int64] = 0, length: int | NDArray[np.int64] | None = None,
) -> Sample:  # fmt: skip
    """Which rows of a call; offset and length may be one per batch entry, as (..., 1)."""
    positions = np.arange(rows) + np.expand_dims(offset, -1)
    exists = np.expand_dims(keys if length is None else length, -1)
    first, last = np.clip(positions - left, 0, exists), np.clip(positions + right + 1, 0, exists)
    reach = np.maximum(last - first, 0)
    chosen = np.zeros(reach.shape, np.bool_)
    for entry in np.ndindex(reach.shape[:-1]):
        chosen[entry][sampled_rows(reach[entry], keys)] = True
    some = np.flatnonzero(chosen.any(axis=tuple(range(chosen.ndim - 1))))
    return Sample(some, chosen[..., some], offset)


def pattern_columns(weights: Tensor, taken: Tensor, sample: Sample) -> dict[str, Tensor]:
    """The columns of the patterns, each (..., H).

    weights: (..., H, R, S), of the sampled rows; 0 in a row that is not taken
    taken:    (..., H, R)
    """
    lead, keys = weights.shape[:-2], weights.shape[-1]
    if len(sample.rows) == 0:
        none = weights.new_zeros(lead)
        names = ("self_weight", "previous_weight", "offset_weight", "shared_key")
        return {"pattern_sequences": none, **dict.fromkeys(names, none)}
    number = taken.sum(-1)
    rows = number.clamp(min=1)
    last = int(sample.rows[-1])
    ahead = weights.new_zeros(*lead, last + keys)  # summed by j - row, from -last on
    for at, row in enumerate(sample.rows.tolist()):
        ahead.narrow(-1, last - row, keys).add_(weights.select(-2, at))

    shared = weights.sum(-2).narrow(-1, 1, keys - 1).amax(-1) / rows

    def behind(distance: int) -> Tensor:
        place = sample.offset - distance + last
        if isinstance(place, int):
            exists = 0 <= place < last + keys
            return ahead.select(-1, place) / rows if exists else torch.zeros_like(shared)
        if not isinstance(place, Tensor):
            place = torch.from_numpy(place)
        place = place.unsqueeze(-1).expand(*lead, 1)
        at = place.clamp(0, last + keys - 1)
        return torch.where(at == place, ahead.gather(-1, at), 0).squeeze(-1) / rows

    return {
        "pattern_sequences": number > 0,
        "self_weight": behind(0),
        "previous_weight": behind(1),
        "offset_weight": ahead.amax(-1) / rows,
        "shared_key": shared,
    }
