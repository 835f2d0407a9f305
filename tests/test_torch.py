"""levelhead.torch.attention: the engine on tensors, with gradients, at any strides."""

import doctest
import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from support import EVERYTHING, OPTION_NAMES, options
from torch import nn
from torch.autograd import gradcheck
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch_support import DTYPES, HALVES, array, in_torch, leaf, same, tensors

import levelhead as lh
import levelhead.torch as lt
from levelhead.torch import _ops
from levelhead.torch._attention import compute, normalise


@pytest.fixture
def engine(monkeypatch):
    """What the engine was called with: a list of (name, arguments)."""
    calls = []

    class Spy:
        def forward(self, *args):
            calls.append(("forward", args))
            return lh._attention._engine.forward(*args)

        def backward(self, *args):
            calls.append(("backward", args))
            return lh._attention._engine.backward(*args)

    monkeypatch.setattr(_ops, "_engine", Spy())
    return calls


# ---------------------------------------------------------------- the same as on arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_every_option_gives_the_bits_of_the_array_operator(name, dtype):
    opts = options(2, 4, 5, 7)[name]
    q, k, v = tensors(2, dtype=dtype)
    got = lt.attention(q, k, v, **EVERYTHING, **in_torch(opts))
    want = lh.attention(array(q), array(k), array(v), **EVERYTHING, **opts)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert array(ours).tobytes() == theirs.tobytes() and ours.shape == theirs.shape
    assert got.output.dtype == got.weights.dtype == dtype
    assert got.health.sums.tobytes() == want.health.sums.tobytes()
    assert not same(got.output, lt.attention(q, k, v))  # the option has an effect


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_gradients_are_those_of_the_array_operator(name):
    opts = options(2, 4, 5, 7)[name]
    q, k, v = tensors(2, grad=True)
    out = lt.attention(q, k, v, **in_torch(opts))
    grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    got = torch.autograd.grad(out, (q, k, v), grad)
    arrays = [array(x) for x in (q, k, v)]
    r = lh.attention(*arrays, return_lse=True, **opts)
    want = lh.attention_backward(grad.numpy(), *arrays, r.output, r.lse, **opts)
    for ours, theirs in zip(got, want[:3], strict=True):
        assert ours.numpy().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("lead", [None, (), (2,), (2, 3)], ids=["2-D", "3-D", "4-D", "5-D"])
def test_dimensions(lead):
    q, k, v = tensors(*(lead or ()), dtype=torch.float64, grad=True)
    if lead is None:  # one head without a head dimension
        q, k, v = (x.detach()[0].requires_grad_() for x in (q, k, v))
    got = lt.attention(q, k, v, causal=True, **EVERYTHING)
    want = lh.reference(array(q), array(k), array(v), causal=True, **EVERYTHING)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(array(ours), theirs, atol=1e-12)
    assert got.health.shape == want.health.shape
    got.output.sum().backward()
    dq, dk, dv, _ = lh.reference_backward(
        np.ones(want.output.shape), array(q), array(k), array(v), causal=True
    )
    for x, theirs in zip((q, k, v), (dq, dk, dv), strict=True):
        np.testing.assert_allclose(x.grad.numpy(), theirs, atol=1e-12)


@pytest.mark.parametrize(
    ("lead", "length", "size"), [((2,), 0, 7), ((2,), 5, 0), ((0,), 5, 7), ((), 0, 0)]
)
def test_nothing_to_attend(lead, length, size):
    q, k, v = tensors(*lead, length=length, size=size, dv=3, grad=True)
    r = lt.attention(q, k, v, **EVERYTHING)
    assert r.output.shape == (*lead, 4, length, 3) and r.lse.shape == (*lead, 4, length)
    assert r.weights.shape == (*lead, 4, length, size)
    assert (r.output == 0).all() and (r.lse == -torch.inf).all()
    assert (r.health.rows == length).all()
    r.output.sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and (x.grad == 0).all()


def test_one_head_without_queries():
    q, k, v = (x[0] for x in tensors(length=0))
    r = lt.attention(q, k, v, return_lse=True, return_weights=True)
    assert r.output.shape == (0, 8) and r.lse.shape == (0,) and r.weights.shape == (0, 7)


# ---------------------------------------------------------------- gradients


SMALL = {"heads": 2, "kv_heads": 1, "length": 3, "size": 4, "d": 3, "dv": 2, "dtype": torch.float64}


def check_gradients(opts, mask=None, sinks=None, lead=(2,)):
    q, k, v = tensors(*lead, grad=True, **SMALL)

    def call(q, k, v, mask, sinks):
        return lt.attention(q, k, v, mask=mask, sinks=sinks, **opts)

    return gradcheck(call, (q, k, v, mask, sinks), raise_exception=True)


@pytest.mark.parametrize(
    "opts",
    [
        {},
        {"causal": True},
        {"causal": True, "query_offset": [0, -1]},  # the second entry has an empty row
        {"window": 2},
        {"window": (1, 1), "query_offset": 1},
        {"softcap": 0.8},
        {"key_lengths": [4, 0]},
        {"scale": -1.3},
        {"scale": [0.5, 2.0]},
        {"dropout": 0.4, "seed": 5},
        {"causal": True, "softcap": 2.0, "key_lengths": [3, 4], "dropout": 0.3, "seed": 1},
    ],
    ids=str,
)
def test_gradcheck(opts):
    assert check_gradients(opts)
    assert check_gradients(opts, leaf(3, 4), leaf(2))


@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (3, 1), (2, 1, 1), (2, 1, 3, 4), (2, 2, 3, 4)])
def test_gradcheck_of_masks_that_broadcast(shape):
    assert check_gradients({"causal": True}, leaf(*shape))


def test_gradient_of_a_mask_that_hides():
    mask = leaf(3, 4).detach()
    mask[0] = -torch.inf
    mask[1, 2] = -torch.inf
    mask.requires_grad_()
    q, k, v = tensors(2, grad=True, **SMALL)
    lt.attention(q, k, v, mask=mask).sum().backward()
    theirs = mask.detach().clone().requires_grad_()
    every = [x.detach().expand(2, 2, -1, -1) for x in (k, v)]
    nn.functional.scaled_dot_product_attention(q.detach(), *every, theirs).sum().backward()
    finite = mask != -torch.inf
    torch.testing.assert_close(mask.grad[finite], theirs.grad[finite])
    assert (mask.grad[~finite] == 0).all()


def test_gradient_of_sinks_where_rows_are_empty():
    for value in (-torch.inf, 0.5):
        q, k, v = tensors(2, grad=True, **SMALL)
        sinks = torch.full((2,), value, dtype=torch.float64, requires_grad=True)
        lt.attention(q, k, v, sinks=sinks, key_lengths=[0, 4]).sum().backward()
        assert sinks.grad.isfinite().all()
        assert (sinks.grad != 0).all() == (value == 0.5)


def test_only_what_requires_a_gradient_gets_one():
    names = ("query", "key", "value", "mask", "sinks")
    every = [*tensors(2, **SMALL), leaf(3, 4).detach(), leaf(2).detach()]

    def gradients(*wanted):
        leaves = {
            name: x.clone().requires_grad_(name in wanted)
            for name, x in zip(names, every, strict=True)
        }
        out = lt.attention(**leaves, causal=True)
        assert out.requires_grad == bool(wanted)
        if wanted:
            out.square().sum().backward()
        return {n: x.grad for n, x in leaves.items()}

    full = gradients(*names)
    assert all(grad is not None and grad.abs().max() > 0 for grad in full.values())
    assert gradients() == dict.fromkeys(names)
    for one in names:
        grads = gradients(one)
        assert same(grads.pop(one), full[one])
        assert not any(x is not None for x in grads.values())


def test_a_float_mask_without_gradient_costs_no_matrix(engine):
    q, k, v = tensors(2, grad=True)
    mask = torch.zeros(5, 7)
    lt.attention(q, k, v, mask=mask).sum().backward()
    lt.attention(q, k, v, mask=mask.requires_grad_()).sum().backward()
    wants_scores = [args[-1] for name, args in engine if name == "backward"]
    assert wants_scores == [False, True]


def test_lse_weights_and_health_carry_no_gradient():
    q, k, v = tensors(2, grad=True)
    r = lt.attention(q, k, v, **EVERYTHING)
    assert r.output.requires_grad and not r.lse.requires_grad and not r.weights.requires_grad
    with torch.no_grad():
        assert not lt.attention(q, k, v).requires_grad


def test_inputs_changed_after_the_call_are_noticed():
    q, k, v = tensors(2, grad=True)
    x = k * 1
    out = lt.attention(q, x, v)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_expanded_and_repeated_inputs():
    q, k, v = tensors(2, dtype=torch.float64, grad=True)
    lt.attention(q, k.expand(2, 2, 7, 8), v).sum().backward(torch.tensor(2.0, dtype=torch.float64))
    doubled = q.grad.clone()
    q.grad = None
    lt.attention(q, k, v).sum().backward()
    torch.testing.assert_close(doubled, 2 * q.grad)
    assert gradcheck(lambda x: lt.attention(x, x, x, causal=True), (leaf(2, 3, 2),))


def test_listeners_hear_the_gradient_health():
    received = []
    q, k, v = tensors(2, grad=True)
    given = normalise(q, k, v, causal=True)
    _ops.listeners[77] = received.append
    try:
        output, lse, _, _ = compute(given, listener=77)
        output.sum().backward()
        compute(given)[0].sum().backward()  # a call that nobody listens to
    finally:
        del _ops.listeners[77]
    arrays = [array(x) for x in (q, k, v, output, lse)]
    want = lh.attention_backward(
        np.ones(output.shape, np.float32), *arrays, causal=True, return_health=True
    )
    assert len(received) == 1
    assert received[0].numpy().tobytes() == want.health.sums.tobytes()


def test_checkpointing_drops_the_same_twice():
    q, k, v = tensors(2, grad=True)

    def gradient(run):
        q.grad = None
        torch.manual_seed(3)
        run(lambda q: lt.attention(q, k, v, dropout=0.5), q).sum().backward()
        return q.grad

    again = gradient(lambda f, x: checkpoint(f, x, use_reentrant=False))
    assert same(again, gradient(lambda f, x: f(x)))


# ---------------------------------------------------------------- any strides, nothing copied


LAYOUTS = {
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "slice": lambda x: nn.functional.pad(x, (3, 1, 2, 2), value=1000.0)[:, :, 2:-2, 3:-1],
    "one for all": lambda x: x[:1].clone().expand(2, -1, -1, -1),
    "packed": lambda x: torch.stack([x, x], 2).flatten(0, 1)[:, 1].unflatten(0, (2, -1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_reach_the_engine_as_they_are(engine, layout, dtype):
    made = [LAYOUTS[layout](x).requires_grad_() for x in tensors(2, dtype=dtype, dv=6)]
    plain = [x.detach().contiguous().requires_grad_() for x in made]
    mask = LAYOUTS[layout](torch.randn(2, 1, 5, 7))
    outs = [
        lt.attention(*made, mask=mask, causal=True),
        lt.attention(*plain, mask=mask.contiguous(), causal=True),
    ]
    assert same(*outs)
    grads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in outs]
    for out, grad in zip(outs, grads, strict=True):
        out.backward(grad.detach())
    for ours, theirs in zip(made, plain, strict=True):
        assert same(ours.grad, theirs.grad)

    assert not any(x.is_contiguous() for x in made)
    (_, forward), _, *backwards = engine
    backward = next(args for _, args in backwards if address(args[1]) == made[0].data_ptr())
    for got, given in [
        *zip(forward[:4], (*made, mask), strict=True),
        *zip(backward[:4], (grads[0], *made), strict=True),
    ]:
        assert address(got) == given.data_ptr()
        assert strides(got) == tuple(s * given.element_size() for s in given.stride())


def address(x):
    return x.data_ptr() if isinstance(x, torch.Tensor) else x.__array_interface__["data"][0]


def strides(x):
    if isinstance(x, torch.Tensor):
        return tuple(s * x.element_size() for s in x.stride())
    return x.strides


def test_negative_views_are_resolved():
    q, k, v = tensors(2)
    conjugate = torch.complex(q, q).conj().imag
    assert conjugate.is_neg()
    assert same(lt.attention(conjugate, k, v), lt.attention(-q, k, v))


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_casts_as_torch_does(dtype):
    q, k, v = tensors(2, kv_heads=4, grad=True)
    for given in [(q, k, v), (q.half(), k, v.bfloat16()), (q.double(), k.double(), v.double())]:
        with torch.autocast("cpu", dtype=dtype):
            ours, theirs = lt.attention(*given), nn.functional.scaled_dot_product_attention(*given)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)
    with torch.autocast("cpu", dtype=dtype):
        lt.attention(q, k, v, mask=torch.zeros(5, 7)).sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert lt.attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_keep_masks_and_sinks_in_their_own_precision(dtype):
    q, k, v = tensors(2, dtype=dtype, grad=True)
    mask = torch.randn(5, 7, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)
    lt.attention(q, k, v, mask=mask, sinks=sinks).float().square().sum().backward()
    assert q.grad.dtype == dtype and mask.grad.dtype == sinks.grad.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask, sinks)]
    lt.attention(*exact[:3], mask=exact[3], sinks=exact[4]).square().sum().backward()
    tolerance = 0.02 if dtype is torch.float16 else 0.1
    for ours, theirs in zip((q, k, v, mask, sinks), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------- seeds and threads


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**70 + 5])
def test_seeds_are_those_of_the_array_operator(seed):
    q, k, v = tensors(2)
    got = lt.attention(q, k, v, dropout=0.5, seed=seed)
    want = lh.attention(array(q), array(k), array(v), dropout=0.5, seed=seed)
    assert got.numpy().tobytes() == want.tobytes()


def test_torch_decides_on_the_seed():
    q, k, v = tensors(2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lt.attention(q, k, v)
    assert torch.equal(before, torch.get_rng_state())  # nothing is drawn without dropout
    first, second = (lt.attention(q, k, v, dropout=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert same(first, lt.attention(q, k, v, dropout=0.5)) and not same(first, second)


def test_threads_are_torchs_and_change_no_bit(engine):
    q, k, v = tensors(2, length=97, size=203, grad=True)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out = lt.attention(q, k, v, causal=True)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    finally:
        torch.set_num_threads(before)
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    threads = {"forward": -4, "backward": -3}
    assert [args[threads[name]] for name, args in engine] == [1, 1, 2, 2]
    lt.attention(q, k, v, threads=3)
    assert engine[-1][1][-4] == 3


# ---------------------------------------------------------------- elsewhere


def test_meta_tensors_have_shapes():
    q, k, v = (x.to("meta") for x in tensors(2, dtype=torch.float16, dv=3))
    r = lt.attention(q, k, v, **EVERYTHING, causal=True, softcap=2.0)
    assert r.output.is_meta and r.output.shape == (2, 4, 5, 3) and r.output.dtype == torch.float16
    assert r.lse.shape == (2, 4, 5) and r.lse.dtype == torch.float32
    assert r.weights.shape == (2, 4, 5, 7) and r.health.shape == (2, 4)
    assert not r.health.rows.any()
    assert lt.attention(q[0, 0], k[0, 0], v[0, 0]).shape == (5, 3)
    assert lt.scaled_dot_product_attention(q, k, v, enable_gqa=True).shape == (2, 4, 5, 3)


def test_function_modes_see_the_call():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is lt.attention:
                seen.append(kwargs)
            return func(*args, **(kwargs or {}))

    q, k, v = tensors(2)
    with Mode():
        out = lt.attention(q, k, v, causal=True, window=3)
        lt.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert same(out, lt.attention(q, k, v, causal=True, window=3))
    assert [kwargs["window"] for kwargs in seen] == [3, None]


@pytest.mark.parametrize(
    "name", ["_attention", "nn._multihead", "nn._additive", "nn._cosine"], ids=str
)
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(f"levelhead.torch.{name}"))
    assert tried and not failed


def test_torch_may_be_imported_before_or_after():
    script = """
import sys
import levelhead
assert "torch" not in sys.modules
import levelhead.torch
import torch
x = torch.ones(1, 2, 3, requires_grad=True)
levelhead.torch.attention(x, x, x).sum().backward()
levelhead.torch.nn.CosineAttention()(x, x, x)
assert x.grad.shape == (1, 2, 3)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
