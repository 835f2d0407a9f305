"""Random queries and keys, and the engine's statistics of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import Health, attention
from ._figures import Array


def normal(seed: int, *shape: int) -> Array:
    """Independent entries of mean 0 and variance 1."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def queries_and_keys(seed: int, heads: int, length: int, d_k: int) -> tuple[Array, Array]:
    """(heads, length, d_k) each, as claim 2 assumes them."""
    query, key = normal(seed, 2, heads, length, d_k)
    return query, key


def health(query: Array, key: Array, scale: float | None = None, **options: Any) -> Health:
    """The engine's statistics, all heads merged into one; they do not depend on the values."""
    result = attention(query, key, key[..., :1], scale=scale, return_health=True, **options)
    measured: Health = result.health
    heads = measured.sums.reshape(-1, 1, measured.sums.shape[-1])
    return Health.from_sums(heads).over_batch()
