"""Whether two contenders computed the same thing."""

from __future__ import annotations

import numpy as np

# Largest difference, relative to the largest value. float32 contenders differ by rounding only;
# peers round bfloat16 scores or weights between their steps, which costs up to a few of its ulps.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over the largest value; infinite if shapes or NaNs differ."""
    if ours.shape != theirs.shape or not np.isfinite(theirs).all() or not np.isfinite(ours).all():
        return float("inf")
    a, b = ours.astype(np.float32), theirs.astype(np.float32)
    largest = float(np.abs(a).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / max(largest, 1e-30)
