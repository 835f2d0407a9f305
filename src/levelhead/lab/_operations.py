"""Layers operation by operation, and which operations wait for which. Needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..torch.nn import MultiHeadAttention


def attention_steps(layer: MultiHeadAttention, x: Tensor) -> Tensor:
    """What the layer computes, operation by operation."""
    from torch.nn.functional import linear  # noqa: PLC0415

    assert layer.in_proj_weight is not None
    query, key, value = (
        part.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for part in linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    weights = (query @ key.transpose(-1, -2) * layer.head_dim**-0.5).softmax(-1)
    output: Tensor = layer.out_proj((weights @ value).transpose(1, 2).flatten(-2))
    return output


def lstm_steps(layer: nn.LSTM, x: Tensor) -> Tensor:
    """Likewise; all inputs are projected at once, because nothing there has to wait."""
    import torch  # noqa: PLC0415
    from torch.nn.functional import linear  # noqa: PLC0415

    weight: dict[str, Tensor] = dict(layer.named_parameters())
    inputs = linear(x, weight["weight_ih_l0"], weight["bias_ih_l0"])
    hidden = cell = x.new_zeros(len(x), layer.hidden_size)
    outputs = []
    for now in inputs.unbind(1):
        gates = now + linear(hidden, weight["weight_hh_l0"], weight["bias_hh_l0"])
        enter, forget, new, leave = gates.chunk(4, -1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs, 1)


def longest_chain(output: Tensor) -> int:
    """Operations on the longest path from a parameter to the output, in the gradient's graph."""
    length: dict[Any, int] = {}
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting[-1]
        before = [each for each, _ in node.next_functions if each is not None]
        missing = [each for each in before if each not in length]
        if missing:
            waiting += missing
        else:
            # A parameter, which has nothing before it, is no operation.
            length[node] = 1 + max((length[each] for each in before), default=-1)
            waiting.pop()
    return length[output.grad_fn]
