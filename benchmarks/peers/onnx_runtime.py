"""ONNX Runtime: the standard Attention operator and the two com.microsoft ones.

Inputs and outputs are bound beforehand, each operator in the layout it likes, so that a run
copies nothing in or out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks.inputs import Inputs, aligned_copy
from benchmarks.machine import cores
from benchmarks.peers.base import Unable, Variant, attempt, fold_group

ELEMENT = {
    "float32": TensorProto.FLOAT,
    "bfloat16": TensorProto.BFLOAT16,
    "bool": TensorProto.BOOL,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
MICROSOFT = "com.microsoft"


def tokens_first(array: np.ndarray) -> np.ndarray:
    """(B, H, L, D) as the com.microsoft operators want it: (B, L, H·D)."""
    batch, _, length, _ = array.shape
    return aligned_copy(array.swapaxes(1, 2).reshape(batch, length, -1))


def session_of(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # a refusal is reported by the table, not on stderr
    # Spinning is the default and the faster setting; the timing waits for spinners to sleep.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def build_model(
    operator: str,
    domain: str,
    opset: int,
    slots: list[str],
    *,
    arrays: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[int, ...]],
    attributes: Mapping[str, Any],
) -> bytes:
    """One operator as a model; bfloat16 inputs are widened by Cast, the CPU kernels need it."""
    nodes = []
    wanted = list(slots)
    narrow = False
    for position, name in enumerate(slots):
        if name and arrays[name].dtype.name == "bfloat16":
            narrow = True
            wanted[position] = f"{name}_wide"
            nodes.append(helper.make_node("Cast", [name], [f"{name}_wide"], to=TensorProto.FLOAT))
    produced = list(outputs)
    if narrow:
        nodes.append(helper.make_node("Cast", ["wide"], [produced[0]], to=TensorProto.BFLOAT16))
        produced[0] = "wide"
    attend = helper.make_node(operator, wanted, produced, domain=domain, **attributes)
    nodes.insert(len(nodes) - 1 if narrow else len(nodes), attend)
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "attention",
        [declare(n, ELEMENT[a.dtype.name], a.shape) for n, a in arrays.items()],
        [
            declare(n, TensorProto.BFLOAT16 if narrow else TensorProto.FLOAT, shape)
            for n, shape in outputs.items()
        ],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return model.SerializeToString()


def ort_value(array: np.ndarray) -> ort.OrtValue:
    if array.dtype.name == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


class OnnxRuntime:
    name = "ONNX Runtime"
    version = ort.__version__

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def variants(self, inputs: Inputs) -> Iterator[Variant | Unable]:
        case = inputs.case
        builders: dict[str, Callable[[str], Variant]] = {}
        for label, (extra, attributes, opset) in self._restrictions(inputs).items():
            builders[f"Attention, {label}"] = partial(
                self._standard, inputs=inputs, extra=extra, attributes=attributes, opset=opset
            )
        if case.group > 1 and not case.is_restricted:
            builders["Attention, group folded into rows"] = partial(
                self._standard, inputs=inputs, extra={}, attributes={}, opset=23, folded=True
            )
        if case.group == 1:
            for form in self._multi_head_forms(inputs):
                builders[f"MultiHeadAttention, {form}"] = partial(
                    self._multi_head, inputs=inputs, form=form
                )
        else:
            yield Unable("MultiHeadAttention", "the operator has no grouped heads")
        if case.dtype != "float32":
            yield Unable("GroupQueryAttention", f"no {case.dtype} on the CPU, nor a cache in it")
        elif not (case.causal or case.L == 1) or case.mask_density or case.key_lengths:
            yield Unable("GroupQueryAttention", "the operator is always causal, without a mask")
        else:
            builders["GroupQueryAttention"] = partial(self._grouped, inputs=inputs)
        for label, build in builders.items():
            yield attempt(label, partial(build, label))

    @staticmethod
    def _restrictions(
        inputs: Inputs,
    ) -> dict[str, tuple[dict[str, np.ndarray], dict[str, Any], int]]:
        """Ways to tell the standard operator what is visible: inputs, attributes, opset."""
        case = inputs.case
        if not case.is_restricted:
            return {"plain": ({}, {}, 23)}
        if case.causal and case.window is None and case.mask_density is None:
            return {"is_causal": ({}, {"is_causal": 1}, 23)}
        ways: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], int]] = {
            "boolean mask": ({"attn_mask": inputs.bool_mask}, {}, 23),
            "float mask": ({"attn_mask": inputs.float_mask}, {}, 23),
        }
        if case.key_lengths is not None and not case.causal and case.mask_density is None:
            lengths = np.asarray(case.key_lengths, dtype=np.int64)
            ways["nonpad_kv_seqlen"] = ({"nonpad_kv_seqlen": lengths}, {}, 24)
        if case.window is not None and case.causal and case.mask_density is None:
            window = {"is_causal": 1, "left_window_size": case.window - 1}
            ways["left_window_size"] = ({}, window, 25)
        return ways

    def _standard(
        self,
        label: str,
        inputs: Inputs,
        *,
        extra: Mapping[str, np.ndarray],
        attributes: Mapping[str, Any],
        opset: int,
        folded: bool = False,
    ) -> Variant:
        q = fold_group(inputs.q, inputs.case.kv_heads) if folded else inputs.q
        arrays = {"q": q, "k": inputs.k, "v": inputs.v, **extra}
        slots = ["q", "k", "v"]
        if "attn_mask" in extra:
            slots.append("attn_mask")
        if "nonpad_kv_seqlen" in extra:
            slots += ["", "", "", "nonpad_kv_seqlen"]
        model = build_model(
            "Attention",
            "",
            opset,
            slots,
            arrays=arrays,
            outputs={"out": q.shape},
            attributes=attributes,
        )
        shape = inputs.case.q_shape
        return self._bind(label, model, arrays, {"out": q.shape}, lambda out: out.reshape(shape))

    @staticmethod
    def _multi_head_forms(inputs: Inputs) -> list[str]:
        case = inputs.case
        if not case.is_restricted:
            return ["plain"]
        if case.causal and case.window is None and case.mask_density is None:
            return ["unidirectional"]
        if case.key_lengths is not None and not case.causal and case.mask_density is None:
            return ["key_padding_mask", "attention_bias"]
        return ["attention_bias"]

    def _multi_head(self, label: str, inputs: Inputs, form: str) -> Variant:
        case = inputs.case
        arrays = {
            "q": tokens_first(inputs.q),
            "k": tokens_first(inputs.k),
            "v": tokens_first(inputs.v),
        }
        slots = ["q", "k", "v"]
        attributes: dict[str, Any] = {"num_heads": case.heads}
        if form == "unidirectional":
            attributes["unidirectional"] = 1
        elif form == "key_padding_mask":
            arrays["lengths"] = np.asarray(case.key_lengths, dtype=np.int32)
            slots += ["", "lengths"]
        elif form == "attention_bias":
            arrays["bias"] = inputs.float_mask
            slots += ["", "", "bias"]
        outputs = {"out": arrays["q"].shape}
        model = build_model(
            "MultiHeadAttention",
            MICROSOFT,
            23,
            slots,
            arrays=arrays,
            outputs=outputs,
            attributes=attributes,
        )
        return self._bind(label, model, arrays, outputs, self._heads_back(inputs))

    def _grouped(self, label: str, inputs: Inputs) -> Variant:
        """Prefill gives all keys as new ones; decode appends the last to a shared cache."""
        case = inputs.case
        new = slice(case.S - case.L, case.S)
        arrays = {
            "q": tokens_first(inputs.q),
            "k": tokens_first(inputs.k[:, :, new]),
            "v": tokens_first(inputs.v[:, :, new]),
            "past_key": aligned_copy(inputs.k),
            "past_value": aligned_copy(inputs.v),
            "seqlens_k": np.full(case.batch, case.S - 1, dtype=np.int32),
            "total": np.asarray([case.S], dtype=np.int32),
        }
        outputs = {
            "out": arrays["q"].shape,
            "present_key": case.kv_shape,
            "present_value": case.kv_shape,
        }
        attributes: dict[str, Any] = {"num_heads": case.heads, "kv_num_heads": case.kv_heads}
        if case.window is not None:
            attributes["local_window_size"] = case.window
        model = build_model(
            "GroupQueryAttention",
            MICROSOFT,
            23,
            list(arrays),
            arrays=arrays,
            outputs=outputs,
            attributes=attributes,
        )
        shared = {"present_key": "past_key", "present_value": "past_value"}
        return self._bind(label, model, arrays, outputs, self._heads_back(inputs), shared=shared)

    @staticmethod
    def _heads_back(inputs: Inputs) -> Callable[[np.ndarray], np.ndarray]:
        case = inputs.case
        return lambda out: out.reshape(case.batch, case.L, case.heads, case.D).swapaxes(1, 2)

    @staticmethod
    def _bind(
        label: str,
        model: bytes,
        arrays: Mapping[str, np.ndarray],
        outputs: Mapping[str, tuple[int, ...]],
        finish: Callable[[np.ndarray], np.ndarray],
        *,
        shared: Mapping[str, str] | None = None,
    ) -> Variant:
        session = session_of(model)
        values = {name: ort_value(array) for name, array in arrays.items()}
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        buffers = {n: aligned_copy(np.zeros(s, arrays["q"].dtype)) for n, s in outputs.items()}
        for name, buffer in buffers.items():  # on the CPU a value shares its array's memory
            source = (shared or {}).get(name)
            values[name] = values[source] if source else ort_value(buffer)
            binding.bind_ortvalue_output(name, values[name])

        def run() -> None:
            session.run_with_iobinding(binding)

        run()
        return Variant(label, run, lambda _: finish(buffers["out"].astype(np.float32)))
