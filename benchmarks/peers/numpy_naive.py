"""The textbook in NumPy: five steps, the whole L×S matrix in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from benchmarks.inputs import Inputs
from benchmarks.peers.base import Unable, Variant


def naive_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    """softmax(q kᵀ/√D + bias) v over the last two axes."""
    scores = q @ k.swapaxes(-1, -2)
    scores *= q.shape[-1] ** -0.5
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ v


class NumpyNaive:
    name = "NumPy"
    version = np.__version__

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def variants(self, inputs: Inputs) -> Iterator[Variant | Unable]:
        case = inputs.case
        bias = inputs.float_mask if case.is_restricted else None
        batch, _, length, dim = case.q_shape
        group = case.group
        half = case.dtype != "float32"

        def all_heads() -> np.ndarray:
            q, k, v = (
                (a.astype(np.float32) for a in (inputs.q, inputs.k, inputs.v))
                if half
                else (inputs.q, inputs.k, inputs.v)
            )
            if group == 1:
                return naive_attention(q, k, v, bias).astype(inputs.q.dtype, copy=False)
            q = q.reshape(batch, case.kv_heads, group, length, dim)
            grouped = None if bias is None else bias[:, :, None]
            out = naive_attention(q, k[:, :, None], v[:, :, None], grouped)
            return out.reshape(case.q_shape).astype(inputs.q.dtype, copy=False)

        def head_by_head() -> np.ndarray:
            out = np.empty(case.q_shape, dtype=inputs.q.dtype)
            for b in range(batch):
                row_bias = None if bias is None else bias[b if bias.shape[0] > 1 else 0, 0]
                for h in range(case.kv_heads):
                    heads_here = slice(h * group, (h + 1) * group)
                    q, k, v = inputs.q[b, heads_here], inputs.k[b, h], inputs.v[b, h]
                    if half:
                        q, k, v = (a.astype(np.float32) for a in (q, k, v))
                    out[b, heads_here] = naive_attention(q, k, v, row_bias)
            return out

        yield Variant("all heads at once", all_heads, np.asarray)
        yield Variant("head by head", head_by_head, np.asarray)
