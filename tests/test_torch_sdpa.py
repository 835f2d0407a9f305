"""levelhead.torch.scaled_dot_product_attention against PyTorch's own, option by option."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch_support import leaf, tensors

import levelhead.torch as lt

WIDE = {"heads": 4, "kv_heads": 4, "length": 5, "size": 7, "d": 8, "dv": 6}


def given(*lead, dtype=torch.float64, **sizes):
    return tensors(*lead, dtype=dtype, **{**WIDE, **sizes})


def agree(q, k, v, attn_mask=None, **opts):
    """Outputs and all gradients, a float mask's too, are PyTorch's; returns ours."""
    results = []
    for attend in (lt.scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        mask = attn_mask
        if mask is not None and mask.dtype is not torch.bool:
            mask = mask.detach().clone().requires_grad_()
            leaves.append(mask)
        out = attend(*leaves[:3], mask, **opts)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    return results[0][0]


def test_the_signature_is_torchs():
    # PyTorch's own is built in and has none to read: by position, then by name.
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    ours = inspect.signature(lt.scaled_dot_product_attention).parameters
    assert tuple(ours) == names
    values = (*given(2), None, 0.0, True)
    named = {"scale": 0.5, "enable_gqa": False}
    torch.testing.assert_close(
        lt.scaled_dot_product_attention(*values, **named),
        F.scaled_dot_product_attention(*values, **named),
    )


@pytest.mark.parametrize("lead", [None, (), (2,), (2, 3)], ids=["2-D", "3-D", "4-D", "5-D"])
@pytest.mark.parametrize("causal", [False, True])
def test_dimensions(lead, causal):
    q, k, v = given(*(lead or ()))
    agree(*((x[0] for x in (q, k, v)) if lead is None else (q, k, v)), is_causal=causal)


@pytest.mark.parametrize(("length", "size"), [(5, 7), (7, 5), (6, 6), (1, 4)])
def test_causal_aligns_the_first_query_with_the_first_key(length, size):
    q, k, v = given(2, length=length, size=size)
    ours = agree(q, k, v, is_causal=True)
    assert torch.equal(ours[..., 0, :], v[..., 0, :])  # whatever the sizes


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -1.0, 2])
def test_scale(scale):
    agree(*given(2), scale=scale)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (4, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("kind", ["bool", "float64", "float32"])
def test_masks(shape, kind):
    mask = leaf(*shape).detach()
    mask = mask > -0.5 if kind == "bool" else mask.to(getattr(torch, kind))
    plain = lt.scaled_dot_product_attention(*given(2))
    assert not torch.allclose(agree(*given(2), mask), plain) or shape[-1] == 1


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing(kind):
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(5, 7, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        q, k, v = given(2)  # PyTorch's gradient of such a mask is NaN: outputs alone
        ours = lt.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, mask))
    else:
        ours = agree(*given(2), mask)
    assert (ours[..., 2, :] == 0).all() and (ours[..., 1, :] != 0).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["3-D", "4-D", "5-D"])
def test_grouped_heads(kv_heads, lead):
    agree(*given(*lead, kv_heads=kv_heads), leaf(5, 7), enable_gqa=True)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 4), (1, 4), (1, 4)),
        ((1, 4), (2, 4), (1, 1)),
        ((2, 4), (2, 1), (2, 1)),
        ((3, 2, 4), (2, 4), (1, 4)),
        ((2, 4), (), ()),
        ((), (4,), (4,)),
    ],
)
def test_batches_broadcast(query, key, value):
    agree(leaf(*query, 5, 8), leaf(*key, 7, 8), leaf(*value, 7, 6))


def test_batches_broadcast_beside_grouped_heads():
    agree(leaf(2, 4, 5, 8), leaf(1, 2, 7, 8), leaf(1, 2, 7, 6), enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes(dtype):
    q, k, v = given(2, dtype=dtype)
    ours = lt.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert ours.dtype == dtype
    exact = lt.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 1e-6


def test_nothing_to_attend():
    for sizes in ({"length": 0}, {"size": 0}):
        agree(*given(2, **sizes))
    agree(*given(0))


# ---------------------------------------------------------------- no column


NO_COLUMN = {
    "plain": {},
    "scale": {"scale": 0.5},
    "no scale": {"scale": 0.0},
    "infinite scale": {"scale": float("inf")},
    "NaN scale": {"scale": float("nan")},
    "causal": {"is_causal": True},
    "causal and scale": {"is_causal": True, "scale": -2.0},
    "bool mask": {"attn_mask": leaf(5, 7).detach() > -0.5},
    "float mask": {"attn_mask": leaf(5, 7)},
    "all dropped": {"dropout_p": 1.0},
}


@pytest.mark.parametrize("lead", [None, (), (2,), (2, 3)], ids=["2-D", "3-D", "4-D", "5-D"])
@pytest.mark.parametrize("opts", NO_COLUMN.values(), ids=NO_COLUMN)
def test_queries_and_keys_without_a_column(opts, lead):
    q, k, v = given(*(lead or ()), d=0)
    q, k, v = (x[0] for x in (q, k, v)) if lead is None else (q, k, v)
    ours = agree(q, k, v, **opts)
    if set(opts) <= {"scale"}:  # all keys weigh the same
        torch.testing.assert_close(ours, v.mean(-2, keepdim=True).expand(ours.shape))


def test_no_column_in_values_either():
    for opts in ({}, {"is_causal": True}, {"attn_mask": torch.ones(5, 7, dtype=torch.bool)}):
        assert agree(*given(2, d=0, dv=0), **opts).shape == (2, 4, 5, 0)


def test_no_column_in_groups_and_broadcast_batches_and_16_bits():
    agree(leaf(2, 4, 5, 0), leaf(1, 2, 7, 0), leaf(1, 2, 7, 6), enable_gqa=True)
    agree(leaf(1, 4, 5, 0), leaf(2, 1, 7, 0), leaf(2, 4, 7, 6), leaf(5, 7))
    q, k, v = given(2, d=0, dtype=torch.bfloat16)
    torch.testing.assert_close(
        lt.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    )


def test_no_column_under_compile_and_vmap():
    q, k, v = given(2, d=0)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attend(q, k, v):
        return lt.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), want)
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v), want)


def test_attention_itself_wants_a_column():
    with pytest.raises(ValueError, match=r"^query: expected a last dimension of at least 1, got"):
        lt.attention(*given(2, d=0))


# ---------------------------------------------------------------- biases that PyTorch makes


BIASES = [(causal_upper_left, 5, 7), (causal_upper_left, 7, 5), (causal_lower_right, 5, 7),
          (causal_lower_right, 6, 6), (causal_lower_right, 1, 4)]  # fmt: skip


@pytest.mark.parametrize(("make", "length", "size"), BIASES)
def test_causal_biases(make, length, size):
    """They are tensors without values: what they mean is what they are."""
    q, k, v = (x.requires_grad_() for x in given(2, length=length, size=size))
    bias = make(length, size)
    theirs = F.scaled_dot_product_attention(q, k, v, bias, scale=0.4)
    weight = torch.linspace(-1, 1, theirs.numel(), dtype=theirs.dtype).reshape(theirs.shape)
    gradients = torch.autograd.grad((theirs * weight).sum(), (q, k, v))
    compiled = torch.compile(lt.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for ours in (
        lt.scaled_dot_product_attention(q, k, v, bias, scale=0.4),
        lt.attention(q, k, v, mask=bias, scale=0.4),
        compiled(q, k, v, bias, scale=0.4),
    ):
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(
            torch.autograd.grad((ours * weight).sum(), (q, k, v)), gradients, strict=True
        ):
            torch.testing.assert_close(a, b)
    torch.compiler.reset()


@pytest.mark.parametrize(("make", "length", "size"), BIASES)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_causal_biases_watched(make, length, size, dropout):
    q, k, v = given(2, length=length, size=size)
    bias, model = make(length, size), torch.nn.Identity()
    torch.manual_seed(0)
    plain = F.scaled_dot_product_attention(q, k, v, bias, dropout)
    torch.manual_seed(0)
    with lt.watch(model) as seen:
        watched = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
    torch.testing.assert_close(watched, plain)
    assert seen.calls == 1 and not seen.not_understood
    shown = torch.ones(length, size).tril(size - length if make is causal_lower_right else 0)
    assert (seen.health[""].pairs == 2 * shown.sum().item()).all()


def test_a_causal_bias_beside_other_restrictions():
    q, k, v = given(2)
    shown = torch.ones(5, 7, dtype=torch.bool).tril(2)
    bias = causal_lower_right(5, 7)
    for options in ({"window": (2, None)}, {"causal": True}, {"query_offset": 1, "causal": True}):
        torch.testing.assert_close(
            lt.attention(q, k, v, mask=bias, **options),
            lt.attention(q, k, v, mask=shown, **options),
        )
    with pytest.raises(ValueError) as caught:
        lt.attention(q, k, v, mask=causal_lower_right(5, 6))
    assert str(caught.value) == (
        "mask: expected a lower right bias of (5, 7) queries and keys, got one of (5, 6)"
    )


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("rate", [0.25, 0.7])
def test_dropout_drops_that_share_and_scales_the_rest(rate):
    q, k, _ = given(4, length=128, size=128)
    v = torch.eye(128, dtype=torch.float64).expand(4, 4, -1, -1)  # the output is the weights
    torch.manual_seed(0)
    weights = F.scaled_dot_product_attention(q, k, v)
    ours = lt.scaled_dot_product_attention(q, k, v, dropout_p=rate)
    kept = ours != 0
    count = kept.numel()
    deviation = (rate * (1 - rate) / count) ** 0.5
    assert abs((~kept).double().mean() - rate) < 5 * deviation
    torch.testing.assert_close(ours[kept], weights[kept] / (1 - rate))
    assert (ours.sum(-1) != 1).all() and abs(ours.sum(-1).mean() - 1) < 0.02


def test_dropout_of_everything():
    q, k, v = (x.requires_grad_() for x in given(2))
    mask = leaf(5, 7)
    out = agree(q, k, v, mask, dropout_p=1.0)
    assert out.shape == (2, 4, 5, 6) and (out == 0).all()


# ---------------------------------------------------------------- errors


Q, K, V = given(2)


@pytest.mark.parametrize(
    ("opts", "text"),
    [
        (
            {"attn_mask": torch.ones(5, 7).bool(), "is_causal": True},
            "attn_mask: expected None together with is_causal=True, as in PyTorch, got a mask; "
            "levelhead.torch.attention takes both",
        ),
        (
            {"key": K[:, :2], "value": V[:, :2]},
            "query, key, value: expected dimensions before the last two that broadcast (grouped "
            "heads need enable_gqa=True), got (2, 4, 5, 8), (2, 2, 7, 8) and (2, 2, 7, 6)",
        ),
        (
            {"key": K[:1].expand(3, -1, -1, -1), "enable_gqa": True},
            "query, key, value: expected dimensions before the last two that broadcast, got "
            "(2, 4, 5, 8), (3, 4, 7, 8) and (2, 4, 7, 6)",
        ),
        (
            {"key": K[:, :3], "value": V[:, :3], "enable_gqa": True},
            "key: expected a number of heads that divides query's 4, got 3",
        ),
        (
            {"query": Q[0, 0], "enable_gqa": True},
            "enable_gqa: expected query, key and value of at least 3 dimensions, got (5, 8), "
            "(2, 4, 7, 8) and (2, 4, 7, 6)",
        ),
        ({"dropout_p": 1.5}, "dropout_p: expected a number in [0, 1], got 1.5"),
        (
            {"attn_mask": torch.ones(3, 2, 4, 5, 7)},
            "mask: expected a shape that broadcasts to (2, 4, 5, 7), got (3, 2, 4, 5, 7)",
        ),
        (
            {"query": Q[0, 0, 0], "key": K[0, 0, 0], "value": V[0, 0, 0]},
            "query: expected at least 2 dimensions (..., heads, length, dim), got shape (8,)",
        ),
    ],
)
def test_it_refuses_what_torch_refuses(opts, text):
    opts = {"query": Q, "key": K, "value": V, **opts}
    with pytest.raises(ValueError) as caught:
        lt.scaled_dot_product_attention(**opts)
    assert str(caught.value) == text
    with pytest.raises((RuntimeError, IndexError)):
        F.scaled_dot_product_attention(**opts)


@pytest.mark.parametrize(
    ("opts", "text"),
    [
        ({"query": [[1.0]]}, "query: expected a torch.Tensor, got list; pass torch.as_tensor(...)"),
        ({"key": None}, "key: expected a torch.Tensor, got NoneType"),
        ({"value": 3.0}, "value: expected a torch.Tensor, got float"),
        ({"attn_mask": 5}, "attn_mask: expected a torch.Tensor, got int"),
        ({"is_causal": 1}, "is_causal: expected True or False, got 1"),
        ({"enable_gqa": None}, "enable_gqa: expected True or False, got None"),
        ({"dropout_p": "a"}, "dropout_p: expected a number, got 'a'"),
        ({"dropout_p": None}, "dropout_p: expected a number, got None"),
        ({"scale": "a"}, "scale: expected a number, got 'a'"),
    ],
    ids=str,
)
def test_things_of_the_wrong_kind(opts, text):
    opts = {"query": Q, "key": K, "value": V, **opts}
    with pytest.raises(TypeError) as caught:
        lt.scaled_dot_product_attention(**opts)
    assert str(caught.value) == text
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(**opts)


def test_a_negative_rate_is_refused():  # PyTorch takes it for none
    with pytest.raises(ValueError, match=r"dropout_p: expected a number in .*, got -0\.1"):
        lt.scaled_dot_product_attention(Q, K, V, dropout_p=-0.1)
