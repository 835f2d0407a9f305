"""levelhead.torch.attention under torch.library.opcheck, torch.compile and torch.func."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch_support import leaf, same, tensors

import levelhead.torch as lt
from levelhead.torch import _ops
from levelhead.torch._call_options import CallOptions, normalise

# PyTorch's compiler and forward mode use what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
# ---------------------------------------------------------------- torch.library and torch.compile


def op_arguments(*given, health=False, weights=False, **opts):
    *arguments, _ = normalise(*given, **opts)
    return (*arguments, health, weights, 0)


def test_the_operators_take_the_fields_of_a_call_in_their_order():
    fields = list(CallOptions._fields[:-1])
    names = [x.name for x in torch.ops.levelhead.attention.default._schema.arguments]
    assert names == [*fields, "health", "weights", "listener"]
    names = [x.name for x in torch.ops.levelhead.attention_backward.default._schema.arguments]
    # Compiled backward passes on PyTorch's disk cache call it with the arguments in this order.
    first = ["grad", "query", "key", "value", "output", "lse"]
    assert names == [*first, *fields[3:], "health", "scores"]
    is_tensor = [kind in (torch.Tensor, torch.Tensor | None) for kind in _ops.FIELDS.values()]
    assert is_tensor == sorted(is_tensor, reverse=True)  # they come first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_plain(dtype):
    torch.library.opcheck(_ops.attention_op, op_arguments(*tensors(2, dtype=dtype, grad=True)))


class Names(TorchDispatchMode):
    """The operators that PyTorch's dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def gradients(*given):
    output = lt.attention(*given)
    return output, *torch.autograd.grad(output.sum(), given)


def test_who_looks_for_operators_finds_them():
    given = tensors(2, grad=True)
    with Names() as names:
        through = gradients(*given)
    assert {"levelhead.attention.default", "levelhead.attention_backward.default"} <= {*names.seen}
    with torch.profiler.profile() as profile:
        gradients(*given)
    assert {"levelhead::attention", "levelhead::attention_backward"} <= {
        event.key for event in profile.key_averages()
    }
    mode = FakeTensorMode()
    fake = lt.attention(*(mode.from_tensor(x) for x in given))
    assert fake.shape == through[0].shape and type(fake).__name__ == "FakeTensor"
    assert all(same(a, b) for a, b in zip(through, gradients(*given), strict=True))


def test_plain_code_passes_the_dispatcher_by(monkeypatch):
    given = tensors(2, grad=True)
    expected = gradients(*given)
    for operator in ("attention_op", "backward_op"):
        monkeypatch.setattr(_ops, operator, None)
    assert all(same(a, b) for a, b in zip(gradients(*given), expected, strict=True))
    with torch.no_grad():
        assert same(lt.attention(*given), expected[0])
    assert same(lt.attention(torch.nn.Parameter(given[0]), *given[1:]), expected[0])


def every_option(grad):
    return {
        "mask": leaf(2, 1, 5, 7).detach().requires_grad_(grad),
        "sinks": leaf(4).detach().requires_grad_(grad),
        "causal": True,
        "window": (4, None),
        "query_offset": [1, 2],
        "key_lengths": [5, 7],
        "scale": [0.5, 1.0, 1.5, 2.0],
        "softcap": 3.0,
        "dropout": 0.3,
        "seed": 3,
    }


def test_opcheck_with_every_option():
    given = tensors(2, dtype=torch.float64, grad=True)
    arguments = op_arguments(*given, health=True, weights=True, **every_option(True))
    torch.library.opcheck(_ops.attention_op, arguments)


@pytest.mark.parametrize("opts", [{}, every_option(False)], ids=["plain", "every option"])
def test_opcheck_of_backward(opts):
    q, k, v = tensors(2, dtype=torch.float64)
    *fields, _, _, _ = op_arguments(q, k, v, **opts)
    output, lse, _, _ = _ops.attention_op(*fields, False, False, 0)
    arguments = (torch.ones_like(output), q, k, v, output, lse, *fields[3:], True, True)
    torch.library.opcheck(_ops.backward_op, arguments)


def test_compile_in_one_graph():
    def call(q, k, v, mask, lengths):
        r = lt.attention(q, k, v, mask=mask, key_lengths=lengths, causal=True, return_lse=True)
        return r.output, r.lse

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length, size in ((2, 5, 7), (3, 6, 9), (3, 4, 8)):
        given = [
            *tensors(batch, length=length, size=size, grad=True),
            torch.randn(length, size, requires_grad=True),
            torch.arange(batch) + size - 3,
        ]
        outs = [f(*given) for f in (compiled, call)]
        for ours, theirs in zip(*outs, strict=True):
            assert same(ours, theirs)
        weight = torch.randn_like(outs[0][0])
        grads = [torch.autograd.grad((out * weight).sum(), given[:4]) for out, _ in outs]
        for ours, theirs in zip(*grads, strict=True):
            assert same(ours, theirs)


def test_compiled_dropout():
    q, k, v = tensors(2, dtype=torch.float64, grad=True)
    call = torch.compile(lambda q, k, v: lt.attention(q, k, v, dropout=0.5), fullgraph=True)
    torch.manual_seed(1)
    first, second = call(q, k, v), call(q, k, v)
    torch.manual_seed(1)
    assert same(call(q, k, v), first) and not same(first, second)
    # The output is linear in v: only if backward drops what forward dropped is <g, out> = <dv, v>.
    grad = torch.randn_like(first)
    (dv,) = torch.autograd.grad(first, v, grad)
    torch.testing.assert_close((grad * first).sum(), (dv * v).sum())


def test_compiled_health_and_sdpa():
    q, k, v = tensors(2)

    def call(q, k, v):
        out = lt.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out, lt.attention(q, k, v, return_health=True).health

    out, health = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert same(out, call(q, k, v)[0])
    assert health.sums.tobytes() == call(q, k, v)[1].sums.tobytes()


# ---------------------------------------------------------------- torch.func


def test_vmap():
    q, k, v = tensors(3, 2, dtype=torch.float64)
    mask = torch.randn(3, 5, 7, dtype=torch.float64)
    batched = lt.attention(q, k, v, mask=mask[:, None, None])
    assert same(torch.func.vmap(lambda *x: lt.attention(*x[:3], mask=x[3]))(q, k, v, mask), batched)
    inner = torch.func.vmap(lt.attention, in_dims=(1, 2, None), out_dims=1)
    want = lt.attention(q, k, v[:1].expand_as(v)).movedim(0, 1)
    assert same(inner(q.movedim(0, 1), k.movedim(0, 2), v[0]), want)
    heads = torch.func.vmap(torch.func.vmap(lt.attention))
    assert same(heads(q[:, 0, :2], k[:, 0], v[:, 0]), lt.attention(q[:, 0, :2], k[:, 0], v[:, 0]))


@pytest.mark.parametrize(
    "opts",
    [
        {"sinks": torch.linspace(-1, 1, 12).reshape(3, 4)},
        {"scale": torch.linspace(0.1, 1, 12).reshape(3, 4)},
        {"key_lengths": torch.tensor([[3, 4], [5, 6], [7, 0]])},
        {"query_offset": torch.tensor([[3, 4], [5, 6], [0, -2]])},
    ],
    ids=lambda opts: next(iter(opts)),
)
def test_vmap_of_options(opts):
    q, k, v = tensors(3, 2)
    ((name, numbers),) = opts.items()

    def call(q, k, v, x):
        return lt.attention(q, k, v, causal=True, **{name: x})

    want = torch.stack([call(*entry) for entry in zip(q, k, v, numbers, strict=True)])
    assert same(torch.func.vmap(call)(q, k, v, numbers), want)
    assert not same(want, torch.func.vmap(call, in_dims=(0, 0, 0, None))(q, k, v, numbers[0]))


def test_vmap_of_dropout():
    q, k, v = (x.expand(3, -1, -1, -1, -1) for x in tensors(2))
    seeded = torch.func.vmap(lambda q, k, v: lt.attention(q, k, v, dropout=0.5, seed=1))(q, k, v)
    assert all(same(out, lt.attention(q[0], k[0], v[0], dropout=0.5, seed=1)) for out in seeded)

    def call(q, k, v):
        return lt.attention(q, k, v, dropout=0.5)

    a, b, _ = torch.func.vmap(call, randomness="different")(q, k, v)
    assert not same(a, b)
    a, b, _ = torch.func.vmap(call, randomness="same")(q, k, v)
    assert same(a, b)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(q, k, v)


@pytest.mark.parametrize("which", range(5), ids=["query", "key", "value", "mask", "sinks"])
def test_vmap_of_grad_and_grad_of_vmap(which):
    every = [*tensors(3, dtype=torch.float64), leaf(3, 5, 7).detach(), leaf(4).detach()]
    dims = (0, 0, 0, 0, None)

    def call(q, k, v, mask, sinks):
        return lt.attention(q, k, v, mask=mask, sinks=sinks, causal=True).square().sum()

    leaves = [x.clone().requires_grad_() for x in every]
    loss = [call(*(x if x.dim() == 1 else x[i] for x in leaves)) for i in range(3)]
    per_entry = [torch.autograd.grad(x, leaves[which], retain_graph=True)[0] for x in loss]
    want = torch.stack([x if which == 4 else x[i] for i, x in enumerate(per_entry)])
    got = torch.func.vmap(torch.func.grad(call, argnums=which), in_dims=dims)(*every)
    torch.testing.assert_close(got, want)
    mapped = torch.func.vmap(call, in_dims=dims)
    got = torch.func.grad(lambda *x: mapped(*x).sum(), argnums=which)(*every)
    torch.testing.assert_close(got, want.sum(0) if which == 4 else want)


def test_jacobian():
    q, k, v = tensors(heads=2, kv_heads=1, length=2, size=3, d=2, dtype=torch.float64)
    got = torch.func.jacrev(lambda q: lt.attention(q, k, v, causal=True))(q)
    want = torch.autograd.functional.jacobian(lambda q: lt.attention(q, k, v, causal=True), q)
    torch.testing.assert_close(got, want)
    assert got.abs().max() > 0.01


def test_health_inside_vmap_says_why_not():
    q, k, v = tensors(3, 2)
    with pytest.raises(
        RuntimeError, match=r"return_health: expected a call outside of torch\.func"
    ):
        torch.func.vmap(lambda *x: lt.attention(*x, return_health=True).output)(q, k, v)


# ---------------------------------------------------------------- refused


def test_a_gradient_of_the_gradient_is_refused():
    q, k, v = tensors(2, grad=True)
    (dq,) = torch.autograd.grad(lt.attention(q, k, v).sum(), q, create_graph=True)
    text = "attention: expected to be differentiated once, got a gradient of its gradient"
    with pytest.raises(RuntimeError, match=text):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match=text):
        torch.func.jacrev(torch.func.grad(lambda x: lt.attention(x, k, v).sum()))(q)


def test_forward_mode_is_refused():
    q, k, v = tensors(2)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: lt.attention(x, k, v), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        lt.attention(forward_ad.make_dual(q, q), k, v)
    with forward_ad.dual_level():  # without a tangent there is nothing to lose
        assert same(lt.attention(q, k, v), lt.attention(q, k, v))
