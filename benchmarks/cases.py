"""The suite as data: every shape that is raced, and what each one costs at the least."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One call: query (batch, heads, L, D), key and value (batch, kv_heads, S, D).

    All contenders compute the same output, every row of it. In a padded batch that means the
    padded queries too; only keys at or past `key_lengths` do not exist.
    """

    name: str
    batch: int
    heads: int
    L: int
    S: int
    D: int
    kv_heads: int = 0  # 0: as many as heads
    dtype: str = "float32"
    causal: bool = False
    window: int | None = None  # the last `window` keys, a query's own among them
    key_lengths: tuple[int, ...] | None = None
    mask_density: float | None = None  # a dense boolean mask (batch, 1, L, S), this share True
    train: bool = False  # also raced forward and backward

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.heads} heads over {self.kv_heads} kv_heads")
        if self.causal and self.L != self.S:
            raise ValueError(f"{self.name}: peers align a causal L != S differently; not raced")

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, self.L, self.D)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.kv_heads, self.S, self.D)

    @property
    def is_restricted(self) -> bool:
        """Some pairs are hidden."""
        return (
            self.causal
            or self.window is not None
            or self.key_lengths is not None
            or self.mask_density is not None
        )

    @cached_property
    def visible(self) -> np.ndarray:
        """What a query may see, as a boolean (batch or 1, 1, L, S): the peers' mask."""
        i = np.arange(self.L)[:, None] + (self.S - self.L)
        j = np.arange(self.S)[None, :]
        see = np.ones((1, 1, self.L, self.S), dtype=bool)
        if self.causal:
            see &= j <= i
        if self.window is not None:
            see &= j > i - self.window
        if self.key_lengths is not None:
            see = see & (j < np.asarray(self.key_lengths)[:, None, None, None])
        if self.mask_density is not None:
            see = see & self.dense_mask
        return see

    @cached_property
    def dense_mask(self) -> np.ndarray:
        """The dense boolean mask (batch, 1, L, S); no row of it is empty."""
        density = 1.0 if self.mask_density is None else self.mask_density
        rng = np.random.default_rng(7)
        mask = rng.random((self.batch, 1, self.L, self.S)) < density
        mask[..., 0] = True
        return mask

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs over all batches and heads."""
        if not self.is_restricted:
            return self.batch * self.heads * self.L * self.S
        per_head = int(np.count_nonzero(self.visible))
        return per_head * self.heads * (self.batch // self.visible.shape[0])

    @property
    def flops(self) -> int:
        """Useful floating-point operations: a multiply-add per pair and dimension, twice."""
        return 4 * self.pairs * self.D

    @property
    def min_bytes(self) -> int:
        """Bytes any kernel must move: queries, visible keys and values, and output, once each."""
        keys = sum(self.key_lengths) if self.key_lengths else self.batch * self.S
        kv = 2 * keys * self.kv_heads * self.D
        return (kv + 2 * prod(self.q_shape)) * DTYPE_BYTES[self.dtype]

    @property
    def shape_text(self) -> str:
        """The shape as the tables print it: batch×heads×L×S×D."""
        heads = str(self.heads) if self.group == 1 else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}×{heads}×{self.L}×{self.S}×{self.D}"


PADDED_LENGTHS = tuple(int(n) for n in np.linspace(32, 512, 16))

SUITE: tuple[Case, ...] = (
    Case("tiny", 1, 1, 3, 3, 64),
    Case("short-64", 32, 8, 64, 64, 32, train=True),
    Case("short-128", 8, 12, 128, 128, 64, train=True),
    Case("mid-512", 1, 12, 512, 512, 64, train=True),
    Case("prefill-2048-d64", 1, 12, 2048, 2048, 64, train=True),
    Case("prefill-2048-d64-causal", 1, 12, 2048, 2048, 64, causal=True, train=True),
    Case("prefill-2048-d128", 1, 8, 2048, 2048, 128, train=True),
    Case("prefill-4096-d128-causal", 1, 8, 4096, 4096, 128, causal=True, train=True),
    Case(
        "prefill-1024-d128-causal-gqa", 1, 32, 1024, 1024, 128, kv_heads=8, causal=True, train=True
    ),
    Case("decode-4096-mha", 1, 32, 1, 4096, 128),
    Case("decode-4096-gqa", 1, 32, 1, 4096, 128, kv_heads=8),
    Case("decode-16384-mha", 1, 32, 1, 16384, 128),
    Case("decode-16384-gqa", 1, 32, 1, 16384, 128, kv_heads=8),
    Case("window-512-in-4096", 1, 8, 4096, 4096, 64, causal=True, window=512),
    Case("padded-32-to-512", 16, 8, 512, 512, 64, key_lengths=PADDED_LENGTHS),
    Case("dense-mask-1024", 2, 12, 1024, 1024, 64, mask_density=0.8),
    Case("head-dim-80", 1, 16, 1024, 1024, 80, train=True),
    Case("prefill-1024-causal-bf16", 1, 12, 1024, 1024, 64, dtype="bfloat16", causal=True),
    Case("decode-4096-gqa-bf16", 1, 32, 1, 4096, 128, kv_heads=8, dtype="bfloat16"),
)

# Shapes that nothing was tuned for (--more): printed like the others, outside the bars.
MORE: tuple[Case, ...] = (
    Case("vision-197", 4, 12, 197, 197, 64, train=True),
    Case("text-77-causal", 16, 8, 77, 77, 64, causal=True, train=True),
    Case("cross-4096x77-d40", 2, 8, 4096, 77, 40, train=True),
    Case("speculative-5-queries", 1, 32, 5, 4096, 128, kv_heads=8),
    Case("batched-decode", 16, 16, 1, 1024, 64),
    Case("mqa-1000-d96-causal", 1, 12, 1000, 1000, 96, kv_heads=1, causal=True),
    Case("head-dim-256", 1, 4, 1024, 1024, 256, train=True),
    Case("window-64-in-2048", 1, 8, 2048, 2048, 64, causal=True, window=64),
)
