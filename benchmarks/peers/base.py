"""What a peer is: a name, and for a case the ways a good user of it would write the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.inputs import Inputs


@dataclass(frozen=True)
class Variant:
    """One way to make the call. Everything that can be prepared is prepared before `run`."""

    label: str
    run: Callable[[], Any]
    to_numpy: Callable[[Any], np.ndarray]  # run's result as (batch, heads, L, D)


@dataclass(frozen=True)
class Unable:
    """A way that does not exist here, and why."""

    label: str
    reason: str


@dataclass(frozen=True)
class Missing:
    """A peer that cannot be imported."""

    name: str
    reason: str


class Peer(Protocol):
    name: str
    version: str

    def variants(self, inputs: Inputs) -> Iterator[Variant | Unable]:
        """The variants for these inputs; the fastest of them counts as the peer's time."""
        ...

    def context(self) -> AbstractContextManager[Any]:
        """What must be in force while the peer runs (inference mode, say)."""
        ...


def attempt(label: str, build: Callable[[], Variant]) -> Variant | Unable:
    """Build a variant; a peer that refuses the case says why in its own words."""
    try:
        return build()
    except Exception as error:  # each framework raises its own types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Unable(label, lines[0].rsplit(", Error ", 1)[-1][:200])


def fold_group(q: np.ndarray, kv_heads: int) -> np.ndarray:
    """Query heads that share a key head become query rows: (B, Hkv, group*L, D), a view.

    Without any restriction on what a row sees, grouped attention is then plain attention, and
    each key is read once for its whole group.
    """
    batch, _, length, dim = q.shape
    return q.reshape(batch, kv_heads, -1, dim) if length else q
