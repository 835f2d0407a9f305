"""What several experiments measure in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import Health, attention

Array = NDArray[Any]


def normal(seed: int, *shape: int) -> Array:
    """Independent entries of mean 0 and variance 1."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def queries_and_keys(seed: int, heads: int, length: int, d_k: int) -> tuple[Array, Array]:
    """(heads, length, d_k) each, as claim 2 supposes them."""
    query, key = normal(seed, 2, heads, length, d_k)
    return query, key


def health(query: Array, key: Array, scale: float | None = None, **options: Any) -> Health:
    """The engine's statistics, all heads merged into one; they do not depend on the values."""
    result = attention(query, key, key[..., :1], scale=scale, return_health=True, **options)
    measured: Health = result.health
    heads = measured.sums.reshape(-1, 1, measured.sums.shape[-1])
    return Health.from_sums(heads).over_batch()


def table(rows: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns."""
    listed = list(rows)
    return {name: [row[name] for row in listed] for name in listed[0]}
