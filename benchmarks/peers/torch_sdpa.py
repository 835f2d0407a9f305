"""PyTorch's scaled_dot_product_attention, in every form a good user would try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.inputs import Inputs
from benchmarks.machine import cores
from benchmarks.peers.base import Unable, Variant, attempt, fold_group


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy()


class TorchSdpa:
    name = "PyTorch"
    version = torch.__version__

    def __init__(self) -> None:
        torch.set_num_threads(cores())

    def context(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def variants(self, inputs: Inputs) -> Iterator[Variant | Unable]:
        with self.context():  # tensors made here carry no autograd bookkeeping
            found = dict(self._calls(inputs))
        for label, call in found.items():
            yield attempt(label, partial(self._checked, label, inputs, call))

    def _checked(self, label: str, inputs: Inputs, call: Callable[[], torch.Tensor]) -> Variant:
        with self.context():
            call()
        shape = inputs.case.q_shape
        return Variant(label, call, lambda out: to_numpy(out).reshape(shape))

    def _calls(self, inputs: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        case = inputs.case
        q, k, v = (from_numpy(a) for a in (inputs.q, inputs.k, inputs.v))
        masks = self._masks(inputs, q.dtype)
        for label, (mask, causal) in masks.items():
            call = partial(sdpa, attn_mask=mask, is_causal=causal)
            if case.group == 1:
                yield label, partial(call, q, k, v)
                continue
            wide_k, wide_v = (from_numpy(a) for a in inputs.expanded_kv)
            yield f"{label}, enable_gqa", partial(call, q, k, v, enable_gqa=True)
            yield f"{label}, keys expanded beforehand", partial(call, q, wide_k, wide_v)
        if case.group > 1 and not case.is_restricted:
            folded = from_numpy(fold_group(inputs.q, case.kv_heads))
            yield "group folded into rows", partial(sdpa, folded, k, v)
            yield "group folded into rows, math backend", self._math(folded, k, v)
        elif case.L <= 8 or case.L * case.S <= 64 * 64:
            yield "math backend", self._math(q, k, v)
        if case.key_lengths is not None:
            yield "a loop over the sequences", self._per_sequence(inputs, q, k, v)
        if case.window is not None:
            yield "a loop over blocks of the band", self._banded(inputs, q, k, v)
        if case.dtype == "bfloat16":
            causal = case.causal and case.window is None
            yield (
                "in float32",
                lambda: sdpa(
                    q.float(), k.float(), v.float(), is_causal=causal, enable_gqa=case.group > 1
                ).to(q.dtype),
            )

    @staticmethod
    def _masks(inputs: Inputs, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor | None, bool]]:
        case = inputs.case
        if not case.is_restricted:
            return {"plain": (None, False)}
        if case.causal and case.window is None and case.mask_density is None:
            return {"is_causal": (None, True)}
        return {
            "boolean mask": (from_numpy(inputs.bool_mask), False),
            "float mask": (from_numpy(inputs.float_mask).to(dtype), False),
        }

    @staticmethod
    def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        return call

    @staticmethod
    def _per_sequence(
        inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        lengths = inputs.case.key_lengths or ()

        def call() -> torch.Tensor:
            out = torch.empty_like(q)
            for b, n in enumerate(lengths):
                out[b] = sdpa(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])[0]
            return out

        return call

    @staticmethod
    def _banded(
        inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """A window without the hidden blocks: each block of queries against its band of keys."""
        case = inputs.case
        window = case.window or case.S
        block = min(case.L, max(128, window))
        visible = torch.from_numpy(inputs.bool_mask)
        bands = []
        for start in range(0, case.L, block):
            rows = slice(start, min(case.L, start + block))
            keys = slice(max(0, start - window + 1), rows.stop)
            bias = torch.zeros(rows.stop - rows.start, keys.stop - keys.start, dtype=q.dtype)
            bias.masked_fill_(~visible[0, 0, rows, keys], float("-inf"))
            bands.append((rows, keys, bias))

        def call() -> torch.Tensor:
            out = torch.empty_like(q)
            for rows, keys, bias in bands:
                out[:, :, rows] = sdpa(
                    q[:, :, rows],
                    k[:, :, keys],
                    v[:, :, keys],
                    attn_mask=bias,
                    enable_gqa=case.group > 1,
                )
            return out

        return call
