"""The arrays of a case: one set, shared by every contender without a copy where it can be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from benchmarks.cases import Case

ALIGNMENT = 64  # JAX and OpenVINO take an array without a copy only if it is aligned so


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """A contiguous copy of `array` that begins on a cache line."""
    size = prod(array.shape) * array.itemsize
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    out = raw[start : start + size].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Inputs:
    """query, key, value as (batch, heads, length, D), and the masks that peers may want."""

    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @cached_property
    def bool_mask(self) -> np.ndarray:
        """(batch or 1, 1, L, S): True may attend."""
        return aligned_copy(self.case.visible)

    @cached_property
    def float_mask(self) -> np.ndarray:
        """The same as numbers to add: 0, or the lowest float where hidden."""
        lowest = np.finfo(np.float32).min
        return aligned_copy(np.where(self.case.visible, np.float32(0), lowest))

    @cached_property
    def expanded_kv(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values repeated for every query head of their group."""
        group = self.case.group
        return (
            aligned_copy(np.repeat(self.k, group, axis=1)),
            aligned_copy(np.repeat(self.v, group, axis=1)),
        )


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Standard-normal inputs: scores of variance 1, the textbook case."""
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(case.dtype)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return aligned_copy(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    return Inputs(case, draw(case.q_shape), draw(case.kv_shape), draw(case.kv_shape))
