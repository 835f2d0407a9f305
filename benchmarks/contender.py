"""Levelhead's own calls, for the same inputs as the peers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import levelhead as lh
from benchmarks.inputs import Inputs


def options_of(inputs: Inputs) -> dict[str, Any]:
    """The arguments of the case; only what it needs, as a user would write it."""
    case = inputs.case
    options: dict[str, Any] = {}
    if case.causal:
        options["causal"] = True
    if case.window is not None:
        options["window"] = case.window
    if case.key_lengths is not None:
        options["key_lengths"] = np.asarray(case.key_lengths, dtype=np.int64)
    if case.mask_density is not None:
        options["mask"] = case.dense_mask
    return options


def forward(inputs: Inputs) -> Callable[[], np.ndarray]:
    q, k, v, options = inputs.q, inputs.k, inputs.v, options_of(inputs)
    if not options:  # as one would write it: a tiny call feels the dictionary
        return lambda: lh.attention(q, k, v)
    return lambda: lh.attention(q, k, v, **options)


def forward_with_health(inputs: Inputs) -> Callable[[], Any]:
    q, k, v, options = inputs.q, inputs.k, inputs.v, options_of(inputs)
    if not options:
        return lambda: lh.attention(q, k, v, return_health=True)
    return lambda: lh.attention(q, k, v, return_health=True, **options)


def forward_and_backward(inputs: Inputs, grad: np.ndarray) -> Callable[[], Any]:
    """One training step's attention; the call returns (dq, dk, dv)."""
    q, k, v, options = inputs.q, inputs.k, inputs.v, options_of(inputs)

    def step() -> Any:
        result = lh.attention(q, k, v, return_lse=True, **options)
        return lh.attention_backward(grad, q, k, v, result.output, result.lse, **options)

    return step
