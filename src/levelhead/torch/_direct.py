"""The operator without PyTorch's dispatcher, which takes longer than a small call.

For who knows that nothing is traced or mapped here; `differentiable` in _ops.py is for everybody.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _engine
from . import _ops
from ._given import Given

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def is_direct(given: Given) -> bool:
    """Whether a call can go straight to the engine."""
    watched = torch._C._len_torch_dispatch_stack()  # modes that want to see every operator
    return given.query.is_cpu and not given.matrix and not watched


def direct(given: Given, weights: bool, listener: int) -> Results:
    """Output, lse, weights (empty unless asked for) and health sums, as `compute` gives them."""
    inputs = (*given[:-1], True, weights, listener)
    tensors = given[:5]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        results: Results = _Direct.apply(*inputs)
        return results
    return _forward(*inputs)


def _forward(*inputs: Any) -> Results:
    query, key, value, mask = inputs[:4]
    q, k, v, m = _ops._array(query), _ops._array(key), _ops._array(value), _ops._array(mask)
    options, (health, weights) = _ops._options(*inputs[4:16]), inputs[16:18]
    output, lse, matrix, found = _engine.forward(q, k, v, m, *options, True, health, weights)
    return (
        _ops._tensor(output, query),
        torch.from_numpy(lse),
        query.new_empty(0) if matrix is None else _ops._tensor(matrix, query),
        torch.from_numpy(found.sums),
    )


class _Direct(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_ops._remember)
    backward = staticmethod(_ops._backward)
