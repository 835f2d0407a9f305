"""PyTorch's attention where it is no single kernel but products and a softmax.

That is so on the CPU with dropout, and where the fused kernels are switched off. Written out here,
it draws the same random numbers and can be differentiated as often.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call_options import CallOptions


def is_written_out(dropout: float) -> bool:
    """Whether PyTorch would compute a call on the CPU from its parts."""
    return dropout > 0 or not torch.backends.cuda.flash_sdp_enabled()


def write_out(given: CallOptions, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights before dropout and logits, (..., Hq, L, S); 16 bits compute in 32."""
    with torch.autocast("cpu", enabled=False):
        dtype = given.query.dtype
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        query, key, value = (x.to(wide) for x in (given.query, given.key, given.value))
        if (group := query.shape[-3] // key.shape[-3]) != 1:
            key, value = (x.repeat_interleave(group, -3) for x in (key, value))
        logits = (query * given.scale) @ key.transpose(-1, -2)
        mask = given.mask
        if given.right == 0:  # causal
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
            mask = mask.tril(given.offset)
        if mask is not None:
            hides = mask.dtype is torch.bool
            logits = logits.masked_fill(~mask, -torch.inf) if hides else logits + mask
        weights = torch._safe_softmax(logits, -1)
        output = (F.dropout(weights, dropout) @ value).to(dtype)
        return output[0] if given.matrix else output, weights, logits
