"""Arrays of other libraries: the same kind comes out, and nothing is copied on the way in."""

import resource

import ml_dtypes
import numpy as np
import pytest
import torch
from support import EVERYTHING, inputs, same_bits

import levelhead as lh

jax = pytest.importorskip("jax")
jnp = jax.numpy

LENGTHS = (3, 20)  # decode and prefill
TORCH = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def arrays(length, dtype=np.float32):
    return inputs(2, heads=4, kv_heads=2, length=length, size=30, d=16, dtype=dtype)


def to_torch(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def from_torch(x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


# ---------------------------------------------------------------- PyTorch


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", TORCH)
def test_torch(dtype, length):
    q, k, v = arrays(length, np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    want = lh.attention(q, k, v, causal=True, **EVERYTHING)
    got = lh.attention(*map(to_torch, (q, k, v)), causal=True, **EVERYTHING)
    assert all(type(x) is torch.Tensor for x in got[:3])
    assert got.output.dtype == got.weights.dtype == TORCH[dtype]
    assert got.lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert same_bits(from_torch(ours), theirs)
    assert got.health == want.health
    got.output.add_(1)  # the result is the caller's to change


@pytest.mark.parametrize("dtype", TORCH)
def test_torch_backward(dtype):
    q, k, v = arrays(20, np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    r = lh.attention(q, k, v, return_lse=True)
    want = lh.attention_backward(r.output, q, k, v, r.output, r.lse)
    call = [to_torch(x) for x in (r.output, q, k, v, r.output, r.lse)]
    got = lh.attention_backward(*call)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert ours.dtype == TORCH[dtype] and same_bits(from_torch(ours), theirs)


def test_torch_views():
    q, k, v = arrays(20)
    want = lh.attention(q, k, v)
    heads_last = [to_torch(x).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    fused = torch.cat([heads_last[1], heads_last[2]], dim=-1)
    split = fused[..., :16], fused[..., 16:]
    assert not split[0].is_contiguous()
    assert same_bits(lh.attention(*heads_last).numpy(), want)
    assert same_bits(lh.attention(heads_last[0], *split).numpy(), want)
    expanded = to_torch(k[:, :1]).expand(2, 2, 30, 16)
    assert same_bits(
        lh.attention(to_torch(q), expanded, expanded).numpy(),
        lh.attention(q, np.repeat(k[:, :1], 2, 1), np.repeat(k[:, :1], 2, 1)),
    )


def test_torch_agrees_with_its_own_attention():
    q, k, v = (to_torch(x) for x in inputs(2, heads=4, length=20, size=20, d=16))
    ours = lh.attention(q, k, v, causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_torch_masks_and_options():
    q, k, v = arrays(20)
    mask = np.random.default_rng(0).random((20, 30)) > 0.3
    want = lh.attention(q, k, v, mask=mask, key_lengths=[30, 9], scale=[0.1, 0.2, 0.3, 0.4])
    got = lh.attention(
        *map(to_torch, (q, k, v)),
        mask=torch.from_numpy(mask),
        key_lengths=torch.tensor([30, 9]),
        scale=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
    )
    assert same_bits(got.numpy(), want)


def test_mixed_kinds_follow_the_query():
    q, k, v = arrays(20)
    assert type(lh.attention(q, to_torch(k), to_torch(v))) is np.ndarray
    assert type(lh.attention(to_torch(q), k, v)) is torch.Tensor


# ---------------------------------------------------------------- JAX


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_jax(dtype, length):
    q, k, v = arrays(length, dtype)
    want = lh.attention(q, k, v, causal=True, return_lse=True, return_weights=True)
    got = lh.attention(
        *map(jnp.asarray, (q, k, v)), causal=True, return_lse=True, return_weights=True
    )
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert isinstance(ours, jax.Array) and ours.dtype == theirs.dtype
        assert same_bits(np.asarray(ours), theirs)


def test_jax_agrees_with_its_own_attention():
    q, k, v = inputs(2, heads=4, length=20, size=20, d=16)
    ours = lh.attention(*map(jnp.asarray, (q, k, v)), causal=True)
    theirs = jax.nn.dot_product_attention(
        *(jnp.asarray(x).swapaxes(1, 2) for x in (q, k, v)), is_causal=True
    ).swapaxes(1, 2)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- anything that speaks DLPack


class Wrapped:
    """The least that the protocol asks for; counts its exports."""

    def __init__(self, array):
        self.array, self.exports = array, 0

    def __dlpack__(self, **options):
        self.exports += 1
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_class_of_ones_own(dtype, length):
    q, k, v = arrays(length, dtype)
    wrapped = [Wrapped(x) for x in (q, k, v)]
    got = lh.attention(*wrapped, causal=True)
    assert type(got) is np.ndarray
    assert same_bits(got, lh.attention(q, k, v, causal=True))
    assert [x.exports for x in wrapped] == [1, 1, 1]


def test_the_lent_memory_is_given_back():
    q, k, v = arrays(20)
    tensors = [to_torch(x) for x in (q, k, v)]
    lh.attention(*tensors)
    for x in tensors:
        x.resize_(1)  # allowed only if nobody holds on to the storage
    freed = []

    class Watched(np.ndarray):
        def __del__(self):
            freed.append(True)

    lh.attention(q.view(Watched), k.view(Watched), v.view(Watched))
    assert freed == [True] * 3


# ---------------------------------------------------------------- no copies


def peak_memory():
    """The most this process has used so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("kind", ["numpy", "torch", "wrapped"])
@pytest.mark.parametrize("length", LENGTHS)
def test_nothing_is_copied(length, kind):
    """8 million broadcast keys are one row in memory and would be two gigabytes if copied."""
    keys = 8_000_000
    row = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    q = np.ones((length, 64), np.float32)
    k = np.broadcast_to(row, (keys, 64))
    k_in = {
        "numpy": lambda: k,
        "torch": lambda: torch.from_numpy(row).expand(keys, 64),
        "wrapped": lambda: Wrapped(k),
    }[kind]()
    # One visible window keeps the arithmetic short.
    before = peak_memory()
    got = lh.attention(q, k_in, k_in, window=40)
    assert peak_memory() - before < 200e6
    np.testing.assert_allclose(np.asarray(got), np.broadcast_to(row, (length, 64)), rtol=1e-5)


def test_inputs_are_read_where_they_lie():
    """A change of the memory shows in the next call: no cache, no copy."""
    q, k, v = (to_torch(x) for x in arrays(20))
    before = lh.attention(q, k, v)
    v.mul_(2)
    torch.testing.assert_close(lh.attention(q, k, v), 2 * before)


def test_results_share_no_memory_with_the_inputs():
    q, k, v = arrays(20)
    r = lh.attention(q, k, v, **EVERYTHING)
    for x in r[:3]:
        assert x.flags.writeable and not any(np.shares_memory(x, y) for y in (q, k, v))
