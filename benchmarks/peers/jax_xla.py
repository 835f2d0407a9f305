"""JAX's dot_product_attention under jit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.inputs import Inputs, aligned_copy
from benchmarks.peers.base import Unable, Variant, attempt, fold_group


def from_numpy(array: np.ndarray) -> jax.Array:
    """On the CPU an aligned array is taken without a copy; either way before the clock runs."""
    return jax.block_until_ready(jnp.asarray(array))


def rows_first(array: np.ndarray) -> np.ndarray:
    """(B, H, L, D) as JAX wants it: (B, L, H, D)."""
    return aligned_copy(array.swapaxes(1, 2))


class JaxXla:
    name = "JAX"
    version = jax.__version__

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def variants(self, inputs: Inputs) -> Iterator[Variant | Unable]:
        case = inputs.case
        q, k, v = (from_numpy(rows_first(a)) for a in (inputs.q, inputs.k, inputs.v))
        options: dict[str, dict[str, Any]] = {}
        if case.mask_density is not None:
            options["mask"] = {"mask": from_numpy(inputs.bool_mask)}
        elif case.window is not None:
            options["local_window_size"] = {"local_window_size": (case.window - 1, 0)}
        elif case.key_lengths is not None:
            lengths = from_numpy(np.asarray(case.key_lengths, dtype=np.int32))
            options["key_value_seq_lengths"] = {"key_value_seq_lengths": lengths}
        else:
            options["is_causal" if case.causal else "plain"] = {"is_causal": case.causal}
        for label, option in options.items():
            yield attempt(label, partial(self._variant, label, inputs, q, k, v, options=option))
        if case.group > 1 and not case.is_restricted:
            folded = from_numpy(rows_first(fold_group(inputs.q, case.kv_heads)))
            label = "group folded into rows"
            yield attempt(label, partial(self._variant, label, inputs, folded, k, v, options={}))

    @staticmethod
    def _variant(
        label: str,
        inputs: Inputs,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        options: dict[str, Any],
    ) -> Variant:
        static: dict[str, Any] = {n: o for n, o in options.items() if not isinstance(o, jax.Array)}
        arrays: dict[str, Any] = {n: o for n, o in options.items() if isinstance(o, jax.Array)}

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, arrays: dict[str, Any]) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, **arrays, **static)

        compiled: Callable[..., jax.Array] = jax.jit(attend)  # dispatches faster than an AOT one
        compiled(q, k, v, arrays).block_until_ready()
        shape = inputs.case.q_shape

        def to_numpy(out: jax.Array) -> np.ndarray:
            return np.asarray(out, dtype=np.float32).swapaxes(1, 2).reshape(shape)

        return Variant(label, lambda: compiled(q, k, v, arrays).block_until_ready(), to_numpy)
