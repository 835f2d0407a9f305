"""Section: the cost of a call itself, one head of 3×3 from NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import contender
from benchmarks.cases import SUITE
from benchmarks.inputs import make_inputs
from benchmarks.timing import Call, race


@dataclass
class TinyResult:
    """Seconds per call. The bar is against PyTorch with its tensors ready, the harder of two."""

    seconds: float
    health_seconds: float
    torch_seconds: float
    torch_from_numpy_seconds: float

    @property
    def share(self) -> float:
        return self.seconds / self.torch_seconds


def run_tiny(seconds: float) -> TinyResult:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    case = next(c for c in SUITE if c.name == "tiny")
    inputs = make_inputs(case)
    arrays = (inputs.q, inputs.k, inputs.v)
    with_health = contender.forward_with_health(inputs)
    with torch.inference_mode():
        q, k, v = (torch.from_numpy(a) for a in arrays)
        from_numpy = torch.from_numpy

        def through_numpy() -> object:
            a, b, c = arrays
            return sdpa(from_numpy(a), from_numpy(b), from_numpy(c)).numpy()

        calls: dict[str, Call] = {
            "ours": contender.forward(inputs),
            "health": lambda: with_health().health.sums,  # and read it
            "torch": lambda: sdpa(q, k, v),
            "torch from numpy": through_numpy,
        }
        times = race(calls, seconds)
    return TinyResult(*times.values())
