"""Which rows of a sequence its patterns are taken from, and how many they are.

A pattern is what rows have in common: the distance, or the key, that all of them look at. A few
rows of a long sequence show it, and only of these are all weights kept. The engine chooses the
same ones (csrc/patterns.h).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PATTERN_ROWS = 64
PATTERN_KEYS = 8  # a row that sees fewer shows no pattern: some key must get much
# Long rows are fewer, so that the weights of a head take no more than a megabyte or so.
PATTERN_WEIGHTS = 1 << 18
PATTERN_LEAST_ROWS = 8


def sampled_rows(reach: NDArray[np.int64], keys: int) -> NDArray[np.int64]:
    """The rows of one sequence, evenly spread over those that may see enough keys.

    >>> import numpy as np
    >>> from levelhead._health.sampling import sampled_rows
    >>> sampled_rows(np.arange(1, 11), keys=10)        # causal: row i sees i + 1 keys
    array([7, 8, 9])

    reach: (L,), how many keys a row may see by its window, a dense mask aside
    """
    candidates = np.flatnonzero(reach >= PATTERN_KEYS)
    most = min(PATTERN_ROWS, max(PATTERN_LEAST_ROWS, PATTERN_WEIGHTS // max(keys, 1)))
    rows = min(most, len(candidates))
    evenly: NDArray[np.int64] = candidates[np.arange(rows) * len(candidates) // max(rows, 1)]
    return evenly
