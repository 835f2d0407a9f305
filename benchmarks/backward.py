"""Section: forward and backward together, against PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import contender
from benchmarks.agreement import TOLERANCE, difference
from benchmarks.cases import Case
from benchmarks.inputs import Inputs, aligned_copy, make_inputs
from benchmarks.timing import Call, race

OURS = "levelhead"
FLOPS_OF_FORWARD = 3.5  # two products forward, five backward (the scores again among them)


@dataclass
class BackwardResult:
    case: Case
    seconds: float = float("nan")
    torch_seconds: float = float("nan")
    torch_variant: str = ""
    mismatches: list[str] = field(default_factory=list)

    def join(self, later: BackwardResult) -> None:
        """The best of two sweeps."""
        self.seconds = min(self.seconds, later.seconds)
        if not later.torch_seconds > self.torch_seconds:
            self.torch_seconds, self.torch_variant = later.torch_seconds, later.torch_variant
        self.mismatches = list(dict.fromkeys(self.mismatches + later.mismatches))

    @property
    def ratio(self) -> float:
        return self.torch_seconds / self.seconds

    @property
    def gflops(self) -> float:
        return FLOPS_OF_FORWARD * self.case.flops / self.seconds / 1e9


def torch_steps(
    inputs: Inputs, grad: np.ndarray
) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]]]]:
    """PyTorch's forward and backward; grouped heads natively, and with keys expanded."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    case = inputs.case
    q, k, v = (torch.from_numpy(a).requires_grad_() for a in (inputs.q, inputs.k, inputs.v))
    upstream = torch.from_numpy(grad)

    def native() -> tuple[Any, ...]:
        out = sdpa(q, k, v, is_causal=case.causal, enable_gqa=case.group > 1)
        return torch.autograd.grad(out, (q, k, v), upstream)

    def expanded() -> tuple[Any, ...]:
        wide_k = k.repeat_interleave(case.group, dim=1)
        wide_v = v.repeat_interleave(case.group, dim=1)
        out = sdpa(q, wide_k, wide_v, is_causal=case.causal)
        return torch.autograd.grad(out, (q, k, v), upstream)

    if case.group == 1:
        yield "is_causal" if case.causal else "plain", native
    else:
        yield "enable_gqa", native
        yield "keys expanded", expanded


def run_backward(case: Case, seconds: float) -> BackwardResult:
    inputs = make_inputs(case)
    rng = np.random.default_rng(1)
    grad = aligned_copy(rng.standard_normal(case.q_shape, dtype=np.float32))
    result = BackwardResult(case)
    ours = contender.forward_and_backward(inputs, grad)
    expected = ours()[:3]
    calls: dict[str, Call] = {OURS: ours}
    for label, step in torch_steps(inputs, grad):
        for name, mine, theirs in zip(("dq", "dk", "dv"), expected, step(), strict=True):
            off = difference(np.asarray(mine), theirs.numpy())
            if off > TOLERANCE[case.dtype]:
                result.mismatches.append(f"PyTorch, {label}: {name} differs by {off:.1e}")
        if not result.mismatches:
            calls[label] = step
    times = race(calls, seconds)
    result.seconds = times.pop(OURS)
    if times:
        result.torch_variant, result.torch_seconds = min(times.items(), key=lambda t: t[1])
    return result
