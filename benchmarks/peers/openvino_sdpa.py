"""OpenVINO: a compiled model around its ScaledDotProductAttention operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from benchmarks.inputs import Inputs
from benchmarks.machine import cores
from benchmarks.peers.base import Unable, Variant, attempt, fold_group


class OpenVino:
    name = "OpenVINO"
    version = ov.__version__.split("-")[0]

    def __init__(self) -> None:
        self._core = ov.Core()
        self._config = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": cores(),
        }

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def variants(self, inputs: Inputs) -> Iterator[Variant | Unable]:
        case = inputs.case
        k, v = inputs.k, inputs.v
        expanded = ""
        if case.group > 1:
            yield Unable("grouped heads", "the operation has no grouped heads")
            k, v = inputs.expanded_kv
            expanded = ", keys expanded beforehand"
        restrictions: dict[str, tuple[np.ndarray | None, bool]] = {}
        if case.causal and case.window is None and case.mask_density is None:
            restrictions["causal"] = (None, True)
        elif case.is_restricted:
            restrictions["boolean mask"] = (inputs.bool_mask, False)
            restrictions["float mask"] = (inputs.float_mask, False)
        else:
            restrictions["plain"] = (None, False)
        for name, (mask, causal) in restrictions.items():
            label = name + expanded
            build = partial(self._variant, label, inputs, inputs.q, k, v, mask=mask, causal=causal)
            yield attempt(label, build)
        if case.group > 1 and not case.is_restricted:
            folded = fold_group(inputs.q, case.kv_heads)
            label = "group folded into rows"
            build = partial(self._variant, label, inputs, folded, inputs.k, inputs.v, mask=None)
            yield attempt(label, build)

    def _variant(
        self,
        label: str,
        inputs: Inputs,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        mask: np.ndarray | None,
        causal: bool = False,
    ) -> Variant:
        arrays = [q, k, v] if mask is None else [q, k, v, mask]
        tensors = [self._tensor(a) for a in arrays]
        parameters = [ops.parameter(t.get_shape(), t.get_element_type()) for t in tensors]
        nodes: list[Any] = list(parameters)
        half = inputs.case.dtype == "bfloat16"
        if half:  # the CPU has no bfloat16 arithmetic: widen, attend, narrow
            nodes[:3] = [ops.convert(p, "f32") for p in parameters[:3]]
        attend = ops.scaled_dot_product_attention(*nodes, causal=causal)
        result = ops.convert(attend, "bf16") if half else attend
        model = ov.Model([ops.result(result)], parameters, "attention")
        request = self._core.compile_model(model, "CPU", self._config).create_infer_request()
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, tensor)
        shape = inputs.case.q_shape

        def to_numpy(_: object) -> np.ndarray:
            out = request.get_output_tensor(0).data
            if half:
                out = (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return np.array(out, dtype=np.float32).reshape(shape)

        # start_async and wait: infer() would also build a dictionary of the results.
        def run() -> None:
            request.start_async()
            request.wait()

        run()
        return Variant(label, run, to_numpy)

    @staticmethod
    def _tensor(array: np.ndarray) -> ov.Tensor:
        if array.dtype.name == "bfloat16":
            return ov.Tensor(array.view(np.uint16), array.shape, ov.Type.bf16)
        return ov.Tensor(array, shared_memory=True)
