"""Many numbers in little room: typed arrays, deflated, as text that a page can hold.

assets/packed.js takes them out again.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

from .._health import Floats

DIGITS = 12  # binary ones of a float that are kept: four decimal digits
FEW_DIGITS = 7


def pack_bytes(values: NDArray[np.uint8]) -> str:
    """Bytes, deflated, in base64."""
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode("ascii")


def pack_floats(values: Floats, digits: int = DIGITS) -> str:
    """Floats of shape (points, heads), rounded to so many binary digits.

    Each head's course is kept as differences of its points' bit patterns: where it moves little
    they are small. Their bytes stand apart, the high ones first, for those hardly change.
    """
    bits = np.ascontiguousarray(values.T, np.float32).view(np.uint32).astype(np.int64)
    finite = np.isfinite(values.T)
    rounded = (bits + (1 << (22 - digits))) >> (23 - digits) << (23 - digits)
    kept = np.where(finite, rounded, bits) >> 8
    steps = np.diff(kept, axis=1, prepend=0) & 0xFFFFFF
    planes = np.stack([steps >> 16, steps >> 8, steps]).astype(np.uint8)
    return pack_bytes(planes)
