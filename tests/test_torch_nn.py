"""levelhead.torch.nn.MultiHeadAttention against PyTorch's and against its steps written out."""

import math

import pytest
import torch
from torch import nn
from torch_support import same

import levelhead as lh
import levelhead.torch as lt
from levelhead.torch.nn import MultiHeadAttention


def pair(ours=None, theirs=None, dtype=torch.float64, seed=0):
    """A layer of ours and one of PyTorch's with the same parameters, none of them 0."""
    theirs = nn.MultiheadAttention(24, 6, dtype=dtype, **{"batch_first": True, **(theirs or {})})
    torch.manual_seed(seed)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer = MultiHeadAttention(24, 6, dtype=dtype, **(ours or {}))
    return layer, theirs


def normal(*shape, dtype=torch.float64, seed=1):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradients(layer, output, *inputs):
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    named = dict(layer.named_parameters())
    found = torch.autograd.grad((output * weight).sum(), [*named.values(), *inputs])
    names = [*named, *(f"input {i}" for i in range(len(inputs)))]
    return dict(zip(names, found, strict=True))


def agree(layer, theirs, inputs, our_options, their_options):
    """Outputs, gradients of all parameters and inputs; returns our output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    ours, _ = layer(*leaves, **our_options)
    ours_gradients = gradients(layer, ours, *leaves)
    want, _ = theirs(*leaves, need_weights=False, **their_options)
    torch.testing.assert_close(ours, want)
    torch.testing.assert_close(ours_gradients, gradients(theirs, want, *leaves))
    return ours


# ---------------------------------------------------------------- PyTorch's module


WIDTHS = [{}, {"kdim": 10}, {"kdim": 10, "vdim": 7}]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_fit_both_ways(widths, bias):
    layer, theirs = pair({**widths, "bias": bias}, {**widths, "bias": bias})
    inputs = [
        normal(2, 5, 24),
        normal(2, 7, widths.get("kdim", 24)),
        normal(2, 7, widths.get("vdim", 24)),
    ]
    with torch.no_grad():
        before = layer(*inputs)[0]
    layer.load_state_dict(theirs.state_dict())
    assert not torch.allclose(agree(layer, theirs, inputs, {}, {}), before)
    again = nn.MultiheadAttention(24, 6, batch_first=True, dtype=torch.float64, bias=bias, **widths)
    again.load_state_dict(layer.state_dict())
    agree(layer, again, inputs, {}, {})


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_initialisation_is_pytorchs(widths):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(24, 6, **widths).state_dict()
    torch.manual_seed(3)
    layer = MultiHeadAttention(24, 6, **widths)
    ours = layer.state_dict()
    assert list(ours) == list(theirs)
    assert all(same(ours[name], theirs[name]) for name in theirs)
    torch.manual_seed(3)
    layer.reset_parameters()
    assert all(same(layer.state_dict()[name], theirs[name]) for name in theirs)


CAUSAL = torch.ones(5, 7).triu(3).bool()  # True is hidden; the queries are the last 5
PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"causal": True}, {"attn_mask": CAUSAL}),
        ({"mask": ~CAUSAL}, {"attn_mask": CAUSAL}),
        ({"attn_mask": CAUSAL}, {"attn_mask": CAUSAL}),
        ({"attn_mask": CAUSAL, "is_causal": True}, {"attn_mask": CAUSAL}),
        ({"attn_mask": normal(5, 7)}, {"attn_mask": normal(5, 7)}),
        ({"attn_mask": normal(12, 5, 7)}, {"attn_mask": normal(12, 5, 7)}),
        ({"mask": normal(12, 5, 7).reshape(2, 6, 5, 7)}, {"attn_mask": normal(12, 5, 7)}),
        ({"key_padding_mask": PADDING}, {"key_padding_mask": PADDING}),
        ({"key_lengths": [7, 4]}, {"key_padding_mask": PADDING}),
        (
            {"causal": True, "key_padding_mask": PADDING},
            {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
        ),
        (
            {"mask": ~CAUSAL, "key_padding_mask": PADDING},
            {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
        ),
        (
            {"attn_mask": normal(5, 7), "key_padding_mask": PADDING},
            {
                "attn_mask": normal(5, 7),
                "key_padding_mask": torch.zeros(2, 7).double().masked_fill(PADDING, -torch.inf),
            },
        ),
        (
            {"attn_mask": normal(5, 7), "key_padding_mask": normal(2, 7, seed=4)},
            {"attn_mask": normal(5, 7), "key_padding_mask": normal(2, 7, seed=4)},
        ),
        (
            {"mask": ~CAUSAL, "key_padding_mask": normal(2, 7, seed=4)},
            {
                "attn_mask": torch.zeros(5, 7).double().masked_fill(CAUSAL, -torch.inf),
                "key_padding_mask": normal(2, 7, seed=4),
            },
        ),
    ],
)
def test_masks(ours, theirs):
    layer, reference = pair()
    layer.load_state_dict(reference.state_dict())
    inputs = [normal(2, 5, 24), normal(2, 7, 24, seed=2), normal(2, 7, 24, seed=3)]
    output = agree(layer, reference, inputs, ours, theirs)
    assert not torch.allclose(output, layer(*inputs)[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_layouts(batch_first, batched):
    layer, theirs = pair({"batch_first": batch_first}, {"batch_first": batch_first})
    layer.load_state_dict(theirs.state_dict())
    x, context = normal(2, 5, 24), normal(2, 7, 24, seed=2)
    if not batched:
        x, context = x[0], context[0]
    elif not batch_first:
        x, context = x.transpose(0, 1), context.transpose(0, 1)
    padding = PADDING if batched else PADDING[1]
    opts = {"key_padding_mask": padding}
    agree(layer, theirs, [x, context, context], opts, opts)
    for average in (True, False):
        opts = {"need_weights": True, "average_attn_weights": average, "key_padding_mask": padding}
        torch.testing.assert_close(
            layer(x, context, **opts), theirs(x, context, context, **opts), check_dtype=True
        )


def test_self_and_cross_need_no_repetition():
    layer = MultiHeadAttention(24, 6)
    x, context = normal(2, 5, 24, dtype=torch.float32), normal(2, 7, 24, dtype=torch.float32)
    torch.testing.assert_close(layer(x)[0], layer(x, x.clone(), x.clone())[0])
    torch.testing.assert_close(layer(x, context)[0], layer(x, context, context.clone())[0])
    assert layer(x)[1] is None


def test_dropout_only_in_training():
    layer, theirs = pair({"dropout": 0.5}, {"dropout": 0.5})
    layer.load_state_dict(theirs.state_dict())
    x = normal(2, 5, 24)
    torch.manual_seed(0)
    first, second = layer(x)[0], layer(x)[0]
    assert not torch.allclose(first, second)
    torch.manual_seed(0)
    assert same(layer(x)[0], first)
    layer.eval(), theirs.eval()
    torch.testing.assert_close(layer(x)[0], theirs(x, x, x)[0])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mode", ["plain", "causal", "padded"])
def test_it_takes_the_place_of_pytorchs_in_its_transformers(train, mode):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(24, 6, 32, dropout=0.0, batch_first=True).train(train)
    decoder = nn.TransformerDecoderLayer(24, 6, 32, dropout=0.0, batch_first=True).train(train)
    x, memory = normal(2, 7, 24, dtype=torch.float32), normal(2, 5, 24, dtype=torch.float32, seed=2)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    opts = {
        "plain": {},
        "causal": {"src_mask": causal, "is_causal": True},
        "padded": {"src_key_padding_mask": PADDING},
    }[mode]
    tgt = {"tgt_mask": causal, "tgt_is_causal": True} if mode == "causal" else {}
    want = encoder(x, **opts), decoder(x, memory, **tgt)
    for holder, name in (
        (encoder, "self_attn"),
        (decoder, "self_attn"),
        (decoder, "multihead_attn"),
    ):
        layer = MultiHeadAttention(24, 6).train(train)
        layer.load_state_dict(getattr(holder, name).state_dict())
        setattr(holder, name, layer)
    calls = []
    encoder.self_attn.register_forward_hook(lambda *_: calls.append(1))
    visible = ~PADDING if mode == "padded" else torch.ones(2, 7).bool()
    for ours, theirs in zip((encoder(x, **opts), decoder(x, memory, **tgt)), want, strict=True):
        torch.testing.assert_close(ours[visible], theirs[visible], atol=2e-6, rtol=1e-5)
    assert calls == [1]  # PyTorch's fast path did not go around it


# ---------------------------------------------------------------- what PyTorch's has not


def by_hand(layer, x, context, **options):
    """The same from the parameters, with the specification's attention."""
    query, key, value = (
        nn.functional.linear(y, w, b)
        for y, w, b in zip(
            (x, context, context),
            layer.in_proj_weight.split(layer._sizes),
            layer.in_proj_bias.split(layer._sizes),
            strict=True,
        )
    )
    heads = [
        y.unflatten(-1, (count, 4)).transpose(-2, -3).detach().numpy()
        for y, count in zip((query, key, value), (6, *[layer.num_kv_heads] * 2), strict=True)
    ]
    if layer.q_norm is not None:
        for i, norm in enumerate((layer.q_norm, layer.k_norm)):
            rms = (heads[i] ** 2).mean(-1, keepdims=True) ** 0.5
            heads[i] = heads[i] / rms * norm.weight.detach().numpy()
    out = torch.from_numpy(lh.reference(*heads, **options))
    return layer.out_proj(out.transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_grouped_heads_norms_and_softcap(kv_heads, qk_norm, softcap):
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        24, 6, num_kv_heads=kv_heads, qk_norm=qk_norm, softcap=softcap, dtype=torch.float64
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    assert layer.in_proj_weight.shape == (4 * (6 + 2 * kv_heads), 24)
    x, context = normal(2, 5, 24), normal(2, 7, 24, seed=2)
    opts = {"scale": 0.5} if softcap is None else {"scale": 0.5, "softcap": softcap}
    for source, given in ((x, (x,)), (context, (x, context))):
        ours, _ = layer(*given, causal=True)
        torch.testing.assert_close(
            ours, by_hand(layer, x, source, causal=True, **opts), rtol=1e-5, atol=1e-7
        )
    ours.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_gradcheck_of_a_grouped_layer():
    layer = MultiHeadAttention(4, 2, num_kv_heads=1, qk_norm=True, softcap=2.0, dtype=torch.float64)
    nn.init.normal_(layer.in_proj_bias)
    x = normal(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, _: layer(x, causal=True)[0], (x, layer.in_proj_weight)
    )


def test_qk_norm_bounds_the_scores():
    layer, theirs = pair({"qk_norm": True, "scale": "sqrt_dk"})
    missing = layer.load_state_dict(theirs.state_dict(), strict=False)
    assert missing.missing_keys == ["q_norm.weight", "k_norm.weight"]
    with torch.no_grad():
        layer.in_proj_weight *= 1000
    _, _, health = layer(normal(2, 5, 24), return_health=True)
    assert (health.score_max <= math.sqrt(4) + 1e-9).all() and (health.score_max > 0.5).all()


@pytest.mark.parametrize(
    ("scale", "number"),
    [
        ("sqrt_dk", 0.5),
        ("none", 1.0),
        ("dk", 0.25),
        ("sqrt_dmodel", 1 / math.sqrt(24)),
        (0.3, 0.3),
        (0, 0.0),
        (lambda d_k, d_model: d_k / d_model, 4 / 24),
    ],
)
def test_scales(scale, number):
    layer = MultiHeadAttention(24, 6, scale=scale, dtype=torch.float64)
    assert layer.scale == number
    x = normal(2, 5, 24)
    torch.testing.assert_close(layer(x)[0], by_hand(layer, x, x, scale=number))
    torch.testing.assert_close(layer(x, scale=0.7)[0], by_hand(layer, x, x, scale=0.7))


def test_health_and_weights():
    layer = MultiHeadAttention(24, 6, num_kv_heads=2)
    x = normal(2, 5, 24, dtype=torch.float32)
    output, weights, health = layer(
        x, causal=True, need_weights=True, average_attn_weights=False, return_health=True
    )
    assert same(output, layer(x, causal=True)[0])
    assert weights.shape == (2, 6, 5, 5) and (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 5))
    assert health.shape == (2, 6) and (health.pairs == 15).all()
    top = torch.from_numpy(health.top_weight).float()
    torch.testing.assert_close(weights.amax(-1).mean(-1), top)


def test_rows_that_see_nothing_are_zero():
    layer = MultiHeadAttention(24, 6)
    x = normal(2, 5, 24, dtype=torch.float32)
    output, _ = layer(x, key_padding_mask=torch.tensor([[True] * 5, [False] * 5]))
    torch.testing.assert_close(output[0], layer.out_proj.bias.expand(5, 24))


def test_batch_dimensions_and_windows():
    layer = MultiHeadAttention(24, 6)
    x = normal(2, 3, 5, 24, dtype=torch.float32)
    output = layer(x, window=2)[0]
    torch.testing.assert_close(output.flatten(0, 1), layer(x.flatten(0, 1), window=2)[0])
    assert not torch.allclose(output, layer(x)[0])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_autocast_and_halves(qk_norm):
    layer = MultiHeadAttention(24, 6, qk_norm=qk_norm)
    x = normal(2, 5, 24, dtype=torch.float32)
    exact = layer(x, causal=True)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x, causal=True)[0]
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, atol=0.03, rtol=0.03)
    output.float().sum().backward()
    assert layer.in_proj_weight.grad.dtype == torch.float32
    half = layer.to(torch.bfloat16)(x.bfloat16(), causal=True)[0]
    torch.testing.assert_close(half.float(), exact, atol=0.03, rtol=0.03)


def test_compile_in_one_graph():
    layer = MultiHeadAttention(24, 6, num_kv_heads=2, qk_norm=True)
    x = normal(2, 5, 24, dtype=torch.float32)
    compiled = torch.compile(
        lambda x: layer(x, causal=True)[0], fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), layer(x, causal=True)[0])
    compiled(x).sum().backward()
    assert layer.q_norm.weight.grad.abs().sum() > 0


def test_gradients_of_each_sample():
    layer = MultiHeadAttention(24, 6, num_kv_heads=2, qk_norm=True, dtype=torch.float64)
    x = normal(3, 5, 24)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return (
            torch.func.functional_call(layer, parameters, (x,), {"causal": True})[0].square().sum()
        )

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        want = torch.autograd.grad(loss(parameters, x[i]), list(parameters.values()))
        torch.testing.assert_close([grad[i] for grad in each.values()], list(want))


def test_repr_shows_the_options():
    text = repr(MultiHeadAttention(24, 6, num_kv_heads=2, scale="dk", qk_norm=True))
    assert "24, 6, num_kv_heads=2, scale=0.25, softcap=None, dropout=0.0" in text
    assert "q_norm" in text and "out_proj" in text


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"embed_dim": 25},
            "embed_dim: expected a multiple of num_heads, got 25 and 6",
        ),
        (
            {"num_kv_heads": 4},
            "num_kv_heads: expected a number that divides num_heads, got 4 and 6",
        ),
        ({"dropout": 1.0}, "dropout: expected a number in [0, 1), got 1.0"),
        ({"softcap": 0.0}, "softcap: expected a number above 0, got 0.0"),
        (
            {"scale": "sqrt"},
            "scale rule must be one of sqrt_dk, none, dk, sqrt_dmodel; got 'sqrt'",
        ),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError) as caught:
        MultiHeadAttention(**{"embed_dim": 24, "num_heads": 6, **options})
    assert str(caught.value) == text


X = torch.zeros(2, 5, 24)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "text"),
    [
        ((X[..., :23],), {}, ValueError, "query: expected shape (..., length, 24), got (2, 5, 23)"),
        ((X[0, 0],), {}, ValueError, "query: expected shape (..., length, 24), got (24,)"),
        ((X, X[..., :23]), {}, ValueError, "key: expected shape (..., length, 24), got (2, 5, 23)"),
        (
            (X, X, X[..., :23]),
            {},
            ValueError,
            "value: expected shape (..., length, 24), got (2, 5, 23)",
        ),
        ((X, None, X), {}, ValueError, "key: expected a tensor together with value, got None"),
        (
            (X,),
            {"is_causal": True},
            ValueError,
            "is_causal: expected attn_mask with it, for it is only PyTorch's hint about one, got "
            "None; causal=True needs no mask",
        ),
        (
            (X,),
            {"mask": torch.ones(5, 5).bool(), "attn_mask": torch.ones(5, 5).bool()},
            ValueError,
            "attn_mask: expected None together with mask, got both; mask is True where attention "
            "is allowed, attn_mask, as in PyTorch, where it is not",
        ),
        (
            (X,),
            {"key_padding_mask": torch.ones(2, 5, dtype=torch.int64)},
            TypeError,
            "key_padding_mask: expected dtype bool or a float's, got torch.int64",
        ),
    ],
)
def test_bad_calls(inputs, options, error, text):
    with pytest.raises(error) as caught:
        MultiHeadAttention(24, 6)(*inputs, **options)
    assert str(caught.value) == text


def test_four_dimensions_need_the_batch_first():
    layer = MultiHeadAttention(24, 6, batch_first=False)
    with pytest.raises(ValueError, match=r"query: expected shape \(length, batch, 24\), got"):
        layer(X[None])


def test_modules_are_public():
    assert lt.nn.__all__ == ["AdditiveAttention", "CosineAttention", "MultiHeadAttention"]
