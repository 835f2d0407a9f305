"""What the tests of levelhead.torch share: tensors, and comparison to the last bit."""

import torch
from support import BFLOAT16, inputs

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, torch.float64, *HALVES]


def tensors(*lead, dtype=torch.float32, grad=False, **sizes):
    """query, key, value; 4 query heads, 2 key heads, 5 queries, 7 keys unless said otherwise."""
    arrays = inputs(*lead, **{"kv_heads": 2, **sizes})
    return [torch.from_numpy(x).to(dtype).requires_grad_(grad) for x in arrays]


def array(x):
    if x.dtype is torch.bfloat16:
        return x.detach().view(torch.uint16).numpy().view(BFLOAT16)
    return x.detach().numpy()


def in_torch(opts):
    """Options with masks and sinks as tensors, as levelhead.torch wants them."""
    return {k: torch.from_numpy(x) if k in ("mask", "sinks") else x for k, x in opts.items()}


def same(a, b):
    """To the last bit; NaN is equal to NaN."""
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a, 77.0), torch.nan_to_num(b, 77.0))


def leaf(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
