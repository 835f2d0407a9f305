"""levelhead.torch.nn's AdditiveAttention and CosineAttention against their NumPy namesakes."""

import math

import numpy as np
import pytest
import torch
from support import assert_health
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_support import leaf, same, tensors

import levelhead as lh
import levelhead.torch as lt
from levelhead.torch.nn import AdditiveAttention, CosineAttention, _additive


def additive(**options):
    torch.manual_seed(0)
    return AdditiveAttention(4, 6, 8, dtype=torch.float64, **options)


def numpy_weights(layer):
    return [
        layer.w_query.weight.detach().numpy().T,
        layer.w_key.weight.detach().numpy().T,
        layer.v_score.weight.detach().numpy()[0],
    ]


def given(*lead, length=5, size=7):
    return leaf(*lead, length, 4), leaf(*lead, size, 6, seed=4), leaf(*lead, size, 3, seed=5)


def dense(layer, q, k, v, mask=None):
    """The whole matrix at once, in plain torch."""
    hidden = torch.tanh(layer.w_query(q)[..., :, None, :] + layer.w_key(k)[..., None, :, :])
    logits = layer.v_score(hidden)[..., 0]
    if mask is not None:
        logits = (
            logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
        )
    return logits.softmax(-1) @ v


@pytest.fixture
def one_row_at_a_time(monkeypatch):
    monkeypatch.setattr(_additive, "BLOCK", 1)


# ---------------------------------------------------------------- additive


@pytest.mark.parametrize("block", [1, 200, 1 << 20])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["2-D", "3-D", "4-D"])
def test_additive_is_the_numpy_function(lead, block, monkeypatch):
    monkeypatch.setattr(_additive, "BLOCK", block)
    layer, (q, k, v) = additive(), given(*lead)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1, 3:] = mask[2] = False
    for opts in (
        {},
        {"causal": True},
        {"mask": mask},
        {"mask": leaf(5, 7).detach(), "causal": True},
    ):
        numpy_opts = {name: x.numpy() if torch.is_tensor(x) else x for name, x in opts.items()}
        want = lh.additive_attention(
            *arrays, *numpy_weights(layer), return_weights=True, **numpy_opts
        )
        got = layer(q, k, v, return_weights=True, **opts)
        np.testing.assert_allclose(got.output.detach().numpy(), want.output, atol=1e-12)
        np.testing.assert_allclose(got.weights.numpy(), want.weights, atol=1e-12)
        assert same(layer(q, k, v, **opts), got.output)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_additive_gradients(kind, one_row_at_a_time):
    layer = additive(bias=True)
    q, k, v = given(2)
    mask = None if kind == "none" else leaf(5, 7, seed=9)
    if kind == "bool":
        mask = mask > -0.5
    leaves = [q, k, v, *layer.parameters(), *([mask] if kind == "float" else [])]
    weight = leaf(2, 5, 3, seed=8).detach()
    results = []
    for out in (layer(q, k, v, mask=mask), dense(layer, q, k, v, mask)):
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.abs().max() > 0


def test_additive_broadcasts_and_defaults():
    layer, (q, k, v) = additive(), given(2)
    want = torch.stack([layer(q[i], k[0], v[0]) for i in range(2)])
    torch.testing.assert_close(layer(q, k[:1], v[:1]), want)
    torch.testing.assert_close(layer(q, k), layer(q, k, k))
    same_width = AdditiveAttention(4)
    assert same_width.w_key.weight.shape == (4, 4) and same_width.v_score.weight.shape == (1, 4)


def test_additive_padding():
    layer, (q, k, v) = additive(), given(2)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    got = layer(q, k, v, key_padding_mask=padding)
    torch.testing.assert_close(got[0], layer(q[0], k[0], v[0]))
    torch.testing.assert_close(got[1], layer(q[1], k[1, :4], v[1, :4]))
    poisoned = v.detach().clone()
    poisoned[1, 4:] = torch.nan
    assert same(layer(q, k, poisoned, key_padding_mask=padding), got)
    added = torch.zeros(2, 7, dtype=torch.float64).masked_fill(padding, -torch.inf)
    torch.testing.assert_close(layer(q, k, v, key_padding_mask=added), got)
    whole = layer(q, k, v, key_padding_mask=torch.ones(2, 7, dtype=torch.bool))
    assert (whole == 0).all()


@pytest.mark.parametrize(("length", "size"), [(0, 7), (5, 0), (0, 0)])
def test_additive_with_nothing_to_attend(length, size):
    layer, (q, k, v) = additive(), given(2, length=length, size=size)
    r = layer(q, k, v, return_weights=True, return_health=True)
    assert r.output.shape == (2, length, 3) and (r.output == 0).all()
    assert r.weights.shape == (2, length, size) and (r.health.rows == length).all()
    r.output.sum().backward()
    assert q.grad.shape == q.shape and (q.grad == 0).all()


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize("causal", [False, True])
def test_additive_health(block, causal, monkeypatch):
    monkeypatch.setattr(_additive, "BLOCK", block)
    layer, (q, k, v) = additive(), given(2)
    mask = leaf(5, 7, seed=9).detach()
    health = layer(q, k, v, mask=mask, causal=causal, return_health=True).health
    hidden = torch.tanh(layer.w_query(q)[..., :, None, :] + layer.w_key(k)[..., None, :, :])
    scores = layer.v_score(hidden)[..., 0].detach()
    # Scores as products: each query is a row of them, each key a unit vector.
    want = lh.reference(
        scores[:, None], np.broadcast_to(np.eye(7), (2, 1, 7, 7)), v.detach()[:, None],
        mask=mask, causal=causal, scale=1.0, return_health=True,
    ).health  # fmt: skip
    assert_health(health, want, 1e-14)


class Largest(TorchDispatchMode):
    """The most numbers that any one result had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if torch.is_tensor(x)]
        self.numbers = max([self.numbers, *sizes])
        return out


def test_additive_never_holds_the_hidden_layer(monkeypatch):
    monkeypatch.setattr(_additive, "BLOCK", 3000)
    layer, (q, k, v) = additive(), given(length=40, size=50)
    whole = 40 * 50 * 8
    saved = {}

    def save(x):
        saved[x.data_ptr()] = x.numel()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda x: x)
    with Largest() as largest, hooks:
        out = layer(q, k, v)
        kept = sum(saved.values())
        out.sum().backward()
    assert 0 < largest.numbers <= 3000 < whole
    assert kept < whole / 4


def test_additive_dropout():
    layer, (q, k, v) = additive(dropout=0.5), given(2)
    torch.manual_seed(1)
    first, second = layer(q, k, v), layer(q, k, v)
    assert not torch.allclose(first, second)
    # Linear in v: only if backward drops what forward dropped is <g, out> = <dv, v>.
    grad = leaf(2, 5, 3, seed=8).detach()
    (dv,) = torch.autograd.grad(first, v, grad)
    torch.testing.assert_close((grad * first).sum(), (dv * v).sum())
    layer.eval()
    torch.testing.assert_close(layer(q, k, v), dense(layer, q, k, v))


def test_additive_in_autocast():
    layer = AdditiveAttention(4, 6, 8)
    q, k, v = (x.detach().float() for x in given(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(q, k, v)
    torch.testing.assert_close(half.float(), layer(q, k, v), atol=0.05, rtol=0.05)


def test_additive_errors():
    layer, (q, k, v) = additive(), given(2)
    with pytest.raises(ValueError, match=r"value: expected shape \(2, 7, 'Dv'\), got \(2, 6, 3\)"):
        layer(q, k, v[:, :6])
    with pytest.raises(ValueError, match="dropout: expected a number in"):
        AdditiveAttention(4, dropout=1.0)


# ---------------------------------------------------------------- cosine


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("heads", [None, 4])
def test_cosine_is_the_numpy_function(learned, heads):
    q, k, v = tensors(2, dtype=torch.float64)
    q[0, 1, 2] = 0  # a vector of zeros has a cosine of 0 with any other
    layer = CosineAttention(heads, temperature=0.2, learned=learned, dtype=torch.float64)
    got = layer(q, k, v, causal=True, return_health=True)
    want = lh.cosine_attention(
        *(x.numpy() for x in (q, k, v)), temperature=0.2, causal=True, return_health=True
    )
    np.testing.assert_allclose(got.output.detach().numpy(), want.output, atol=1e-12)
    assert_health(got.health, want.health, 1e-13)
    assert np.abs(got.health.score_max).max() <= 5 + 1e-9
    torch.testing.assert_close(layer(1e4 * q, 1e-4 * k, v, causal=True), got.output)


def test_cosine_learns_its_temperatures():
    q, k, v = tensors(2, dtype=torch.float64)
    layer = CosineAttention(4, dtype=torch.float64)
    assert list(layer.state_dict()) == ["log_scale"]
    with torch.no_grad():
        layer.log_scale.copy_(torch.tensor([0.0, 1.0, 2.0, 100.0]))
    per_head = torch.tensor([1.0, math.e, math.e**2, 100.0]).tolist()  # the last is held back
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    torch.testing.assert_close(
        layer(q, k, v), lt.attention(*unit, v, scale=per_head), atol=1e-6, rtol=1e-5
    )
    layer(q, k, v).square().sum().backward()
    assert (layer.log_scale.grad[:3] != 0).all() and layer.log_scale.grad[3] == 0
    layer.reset_parameters()
    torch.testing.assert_close(layer.log_scale.exp(), torch.full((4,), 10.0, dtype=torch.float64))


def test_cosine_gradcheck():
    sizes = {"heads": 2, "kv_heads": 1, "length": 3, "size": 4, "d": 3, "dv": 2}
    q, k, v = tensors(dtype=torch.float64, grad=True, **sizes)
    layer = CosineAttention(2, temperature=0.5, dtype=torch.float64)

    def call(q, k, v, _):
        return layer(q, k, v, causal=True)

    assert torch.autograd.gradcheck(call, (q, k, v, layer.log_scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cosine_in_halves(dtype):
    q, k, v = tensors(2, dtype=dtype)
    q[0, 0, 0] = 0
    layer = CosineAttention(4)
    got = layer(1000 * q, k, v)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), layer(q.double(), k.double(), v.double()), atol=0.05, rtol=0.05
    )
    assert CosineAttention(learned=False)(q, k, v).isfinite().all()


def test_cosine_errors_and_repr():
    for temperature in (0.0, -1.0, 0.001, math.inf):
        with pytest.raises(ValueError, match="temperature: expected a number above 0 and at least"):
            CosineAttention(temperature=temperature)
    assert repr(CosineAttention(4)) == "CosineAttention(4, temperature=0.1, learned=True)"
    with pytest.raises(TypeError, match="scale"):
        CosineAttention()(*tensors(2), scale=1.0)
