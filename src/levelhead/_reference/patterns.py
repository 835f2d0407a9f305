"""What the rows of a sequence have in common, by definition, from the dense weights in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .._health.sampling import PATTERN_KEYS, sampled_rows
from .._health.statistics import Floats

Counts = NDArray[np.int64]


def pattern_sums(p: Floats, visible: Counts, reach: Counts, positions: Counts) -> dict[str, Floats]:
    """The columns of the patterns, each (B, Hq).

    p:         (B, Hq, L, S), the weights
    visible:   (B, Hq, L), how many keys a row sees; 0 for one that is not finite
    reach:     (B, L), how many it may see, a dense mask aside
    positions: (B, L), of the queries among the keys
    """
    batch, heads, _, size = p.shape
    names = ("pattern_sequences", "self_weight", "previous_weight", "offset_weight", "shared_key")
    sums = {name: np.zeros((batch, heads)) for name in names}
    for entry, head in np.ndindex(batch, heads):
        rows = sampled_rows(reach[entry], size)
        rows = rows[visible[entry, head, rows] >= PATTERN_KEYS]
        if len(rows) == 0:
            continue
        weights = p[entry, head, rows]
        offsets = positions[entry, rows, None] - np.arange(size)  # i - j
        first, number = offsets.min(), np.ptp(offsets) + 1
        by_offset = np.bincount((offsets - first).ravel(), weights.ravel(), number) / len(rows)
        by_key = weights.mean(axis=0)

        sums["pattern_sequences"][entry, head] = 1
        for name, offset in (("self_weight", 0), ("previous_weight", 1)):
            if first <= offset < first + number:
                sums[name][entry, head] = by_offset[offset - first]
        sums["offset_weight"][entry, head] = by_offset.max()
        sums["shared_key"][entry, head] = by_key[1:].max()
    return sums
