"""Watching the attention that PyTorch itself has: its function, its modules."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import (
    Oracle,
    Stack,
    assert_same_gradients,
    assert_same_health,
    assert_same_step,
    lively,
    oracle,
    randn,
    train_step,
    watch_training,
)

import levelhead as lh
import levelhead.torch

NESTED = "ignore:The PyTorch API of nested tensors:UserWarning"

# ---------------------------------------------------------------- the function


def test_the_function_inside_modules():
    seen = watch_training(lively(Stack()), lambda m: m(randn(2, 13, 32)))
    assert list(seen.health) == list(seen.gradients) == ["layers.0", "layers.1"]
    assert seen.calls == 2


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": randn(11, 9, seed=4) > -0.5},
    "float mask": {"attn_mask": randn(2, 1, 11, 9, seed=4)},
    "hiding mask": {"attn_mask": torch.where(randn(4, 11, 9, seed=4) > -1, 0.0, -torch.inf)},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_function_outside_of_any_module(options, grouped):
    key_heads = 2 if grouped else 4
    tensors = (
        randn(2, 4, 11, 8),
        randn(2, key_heads, 9, 8, seed=1),
        randn(2, key_heads, 9, 6, seed=2),
    )

    def gradients(attend):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        output = attend(q, k, v, enable_gqa=grouped, **options)
        (output * randn(*output.shape, seed=5)).sum().backward()
        return output, q.grad, k.grad, v.grad

    plain = gradients(F.scaled_dot_product_attention)
    with levelhead.torch.watch(nn.Identity()) as seen:
        watched = gradients(F.scaled_dot_product_attention)
    truth = Oracle()
    gradients(truth)
    for a, b in zip(watched, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    assert list(seen.health) == [""] and seen.calls == 1
    but = ("distance",) if "is_causal" in options else ()  # the oracle has it as a mask
    assert_same_health(seen.health, truth.health(), but=but)
    assert_same_gradients(seen.gradients, truth.gradients())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("width", [8, 0])
@pytest.mark.parametrize("lead", [(), (4,), (2, 4)], ids=["2-D", "3-D", "4-D"])
@pytest.mark.parametrize("name", ["plain", "causal", "bool mask", "scale"])
def test_any_rank_and_no_column(name, lead, width, dropout):
    def gradients(attend):
        shapes = (*lead, 11, width), (*lead, 9, width), (*lead, 9, 6)
        tensors = [randn(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
        with torch.random.fork_rng():
            torch.manual_seed(7)
            output = attend(*tensors, dropout_p=dropout, **OPTIONS[name])
        (output * randn(*output.shape, seed=5)).sum().backward()
        return [output, *(x.grad for x in tensors)]

    calls = []
    with levelhead.torch.listen(calls.append):
        seen = gradients(F.scaled_dot_product_attention)
    assert len(calls) == 1
    for ours, theirs in zip(seen, gradients(F.scaled_dot_product_attention), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_three_dimensions_are_heads_outside_of_modules_and_else_what_the_module_says():
    q, k, v = randn(3, 6, 10, 8)
    got = {}
    with levelhead.torch.watch(nn.Identity()) as seen:
        output = F.scaled_dot_product_attention(q, k, v)
    got["outside"] = seen.health[""].shape

    class Folded(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    for heads in (None, 3):
        module = Folded()
        if heads:
            module.num_heads = heads
        with levelhead.torch.watch(module) as seen:
            assert torch.equal(module(q, k, v), output)
        got[heads] = seen.health[""].shape
        expected = lh.reference(q.numpy(), k.numpy(), v.numpy(), return_health=True).health
        sums = expected.sums.reshape(-1, heads or 1, expected.sums.shape[-1])
        assert_same_health(seen.health, {"": lh.Health(sums).over_batch()})
    assert got == {"outside": (6,), None: (1,), 3: (3,)}
    for mask in (randn(1, 10, 10), randn(6, 10, 10), randn(10, 10), randn(6, 1, 10)):
        plain = F.scaled_dot_product_attention(q, k, v, mask)
        module.forward = lambda *qkv, mask=mask: F.scaled_dot_product_attention(*qkv, mask)
        with levelhead.torch.watch(module) as seen:
            torch.testing.assert_close(module(q, k, v), plain, rtol=1e-5, atol=1e-5)
        assert seen.calls == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = lively(Stack(), size=0.12).to(dtype)
    x = randn(2, 13, 32).to(dtype)
    plain = train_step(model, lambda m: m(x))
    with levelhead.torch.watch(model) as seen:
        watched = train_step(model, lambda m: m(x))
    bound = 1e-12 if dtype is torch.float64 else 4 * torch.finfo(dtype).eps
    assert_same_step(watched, plain, bound)
    assert watched[0].dtype is dtype
    with oracle() as truth:
        train_step(model.double(), lambda m: m(x.double()))
    rtol = 1e-8 if dtype is torch.float64 else 0.2
    assert_same_health(seen.health, truth.health(), rtol, rtol, but=("saturated", "large_scores"))


def test_autocast():
    model, x = lively(Stack(), size=0.12), randn(2, 13, 32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = train_step(model, lambda m: m(x))
        with levelhead.torch.watch(model) as seen:
            watched = train_step(model, lambda m: m(x))
    assert_same_step(watched, plain, 0.03)
    assert seen.calls == 2 and list(seen.gradients) == ["layers.0", "layers.1"]


def test_dropout_draws_the_same_random_numbers():
    torch.manual_seed(0)
    model = lively(Stack(dropout=0.4)).train()
    seen = watch_training(model, lambda m: m(randn(2, 13, 32)))
    assert list(seen.gradients) == ["layers.0", "layers.1"]
    torch.manual_seed(0)
    train_step(model, lambda m: m(randn(2, 13, 32)))
    after = torch.rand(3)
    torch.manual_seed(0)
    with levelhead.torch.watch(model):
        train_step(model, lambda m: m(randn(2, 13, 32)))
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("dropout", [0.3, 1.0])
@pytest.mark.parametrize("mask", [None, "bool", "float", "causal"])
def test_dropout_with_masks_groups_and_16_bits(dropout, mask):
    q, k, v = randn(2, 4, 11, 8), randn(2, 2, 9, 8, seed=1), randn(2, 2, 9, 8, seed=2)
    seen_by = {"bool": randn(11, 9) > 0, "float": randn(2, 4, 11, 9)}.get(mask)
    for dtype in (torch.float32, torch.bfloat16):
        given = [x.to(dtype) for x in (q, k, v)]
        bias = seen_by.to(dtype) if mask == "float" else seen_by

        def call(given=given, bias=bias):
            torch.manual_seed(3)
            return F.scaled_dot_product_attention(
                *given, bias, dropout, is_causal=mask == "causal", enable_gqa=True
            )

        plain = call()
        with levelhead.torch.watch(nn.Identity()) as seen:
            watched = call()
        bound = 1e-5 if dtype is torch.float32 else 0.04
        torch.testing.assert_close(watched, plain, rtol=bound, atol=bound)
        health = lh.reference(
            *(x.float().numpy() for x in given), causal=mask == "causal", query_offset=0,
            mask=None if bias is None else (bias.float() if mask == "float" else bias).numpy(),
            return_health=True,
        ).health  # fmt: skip
        but = ("distance",) if mask != "causal" else ()
        assert_same_health(seen.health, {"": health.over_batch()}, 1e-3, 1e-3, but=but)


def test_a_gradient_of_a_gradient_where_the_fused_kernels_are_off():
    model, x = lively(Stack(layers=1)), randn(1, 9, 32)

    def penalty():
        y = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(y).square().sum(), y, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), model.layers[0].qkv.weight)[0]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = penalty()
        with levelhead.torch.watch(model) as seen:
            watched = penalty()
    torch.testing.assert_close(watched, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))
    assert seen.calls == 1


def test_a_wrong_call_fails_in_pytorchs_words():
    q = randn(2, 4, 11, 8)
    calls = (
        lambda: F.scaled_dot_product_attention(q, q),
        lambda: F.scaled_dot_product_attention(q, q, q, randn(11, 11), 0.1, True),
        lambda: F.scaled_dot_product_attention(q, q, q, randn(11, 11).double()),
        lambda: F.scaled_dot_product_attention(q, q, q, randn(11)),
        lambda: F.scaled_dot_product_attention(q, q[..., :5], q),
        lambda: F.scaled_dot_product_attention(q, q, q, randn(7, 11)),
        lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=2.0),
        lambda: F.scaled_dot_product_attention(q, q.double(), q),
    )
    for call in calls:
        with pytest.raises((TypeError, RuntimeError, IndexError)) as plain:
            call()
        with levelhead.torch.listen(lambda call: None), pytest.raises(plain.type) as watched:
            call()
        assert str(watched.value) == str(plain.value)


def test_what_is_done_in_a_listener_that_fails_is_not_hidden():
    def fail(call):
        raise ValueError("mine")

    q = randn(2, 4, 11, 8)
    with levelhead.torch.listen(fail), pytest.raises(ValueError, match="mine"):
        F.scaled_dot_product_attention(q, q, q)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_tensors_that_stand_for_others_are_left_alone():
    model, x = lively(Stack()), randn(3, 9, 32)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    plain = per_sample(parameters, x)
    with levelhead.torch.watch(model) as seen:
        watched = per_sample(parameters, x)
        traced = torch.jit.trace(model, x, check_trace=False)
        copy.deepcopy(model).to("meta")(x.to("meta"))
        assert seen.calls == 0
        model(x)
    assert seen.calls == 2
    for name, grad in plain.items():
        torch.testing.assert_close(watched[name], grad, rtol=1e-4, atol=1e-4)
    assert "levelhead::" not in str(traced.inlined_graph)
    assert "aten::scaled_dot_product_attention" in str(traced.inlined_graph)


# ---------------------------------------------------------------- its modules

MASKS = {
    "none": {},
    "attn_mask": {"attn_mask": torch.ones(11, 11, dtype=torch.bool).triu(1)},
    "bias": {"attn_mask": randn(11, 11, seed=8)},
    "bias per head": {"attn_mask": randn(2 * 4, 11, 11, seed=8)},
    "padding": {"key_padding_mask": torch.arange(11) >= torch.tensor([[11], [7]])},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [None, "mean", "heads"])
def test_multihead_attention(mask, batch_first, weights):
    model = lively(nn.MultiheadAttention(32, 4, batch_first=batch_first))
    x = randn(2, 11, 32) if batch_first else randn(11, 2, 32)
    asked = {"need_weights": weights is not None, "average_attn_weights": weights == "mean"}

    def run(m, **options):
        return m(x, x, x, **mask, **(asked | options))[0]

    seen = watch_training(
        model, run, oracle_run=lambda m: run(m, need_weights=False), but=("distance",)
    )
    assert list(seen.health) == [""] and seen.health[""].shape == (4,)
    with torch.no_grad():
        plain = model(x, x, x, **mask, **asked)
        with levelhead.torch.watch(model):
            watched = model(x, x, x, **mask, **asked)
    for a, b in zip(watched, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "extra", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 5, "vdim": 7}]
)
@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_with_more(extra, weights):
    model = lively(nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.2, **extra))
    x = randn(2, 11, 32)
    k, v = (randn(2, 9, extra.get(name, 32), seed=3) for name in ("kdim", "vdim"))

    def run(m, weights=weights):
        torch.manual_seed(1)
        return m(x, k, v, need_weights=weights)[0]

    watch_training(model, run, oracle_run=lambda m: run(m, False), but=("distance",))


def encoder(layers=2, norm=True, **options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    norm = nn.LayerNorm(32) if norm else None
    return lively(nn.TransformerEncoder(layer, layers, norm, mask_check=True))


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder(training):
    model = encoder(dropout=0.1).train(training)
    seen = watch_training(model, lambda m: m(randn(2, 11, 32)), but=("distance",))
    assert list(seen.health) == ["layers.0.self_attn", "layers.1.self_attn"]


LEFT = torch.arange(11) >= torch.tensor([[11], [7], [10]])  # padding after the words
RIGHT = LEFT.flip(1)


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("padding", [None, LEFT, RIGHT, LEFT.float().masked_fill(LEFT, -torch.inf)])
@pytest.mark.parametrize("mask", [None, torch.ones(11, 11, dtype=torch.bool).triu(1)])
@pytest.mark.parametrize("gradients", [True, False])
def test_transformer_encoder_on_its_fast_path(norm, padding, mask, gradients):
    if padding is RIGHT and mask is not None:
        mask = mask.T  # else there are rows that see nothing: NaN on the fast path, 0 here
    if padding is not None and padding.dtype is not torch.bool and mask is not None:
        mask = torch.zeros(11, 11).masked_fill(mask, -torch.inf)
    model, x = encoder(norm=norm).eval(), randn(3, 11, 32)
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        with torch.set_grad_enabled(gradients):
            plain = model(x, mask=mask, src_key_padding_mask=padding)
            with levelhead.torch.watch(model) as seen:
                watched = model(x, mask=mask, src_key_padding_mask=padding)
        torch.testing.assert_close(watched, plain, rtol=1e-5, atol=2e-5)
        assert not any(layer._forward_hooks for layer in model.layers)
        with oracle() as truth, torch.no_grad():
            model(x, mask=mask, src_key_padding_mask=padding)
        assert_same_health(seen.health, truth.health(), but=("distance",))
        assert seen.calls == 2


@pytest.mark.filterwarnings(NESTED)
def test_padding_that_is_not_checked_and_a_pass_that_failed():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = lively(nn.TransformerEncoder(layer, 2, mask_check=False)).eval()
    x = randn(3, 11, 32)

    def fail(module, args):
        raise RuntimeError("half way")

    with torch.no_grad():
        plain = model(x, src_key_padding_mask=LEFT), model(x)
        with levelhead.torch.watch(model):
            broken = model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="half way"):
                model(x, src_key_padding_mask=LEFT)
            broken.remove()
            other = model(x)  # what was to be filled then is not filled now
            padded = model(x, src_key_padding_mask=LEFT)
    torch.testing.assert_close((padded, other), plain, rtol=1e-5, atol=2e-5)


def test_transformer():
    model = lively(nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True), size=0.15)
    source, target = randn(2, 9, 32), randn(2, 11, 32, seed=1)
    causal = nn.Transformer.generate_square_subsequent_mask(11)
    seen = watch_training(
        model, lambda m: m(source, target, tgt_mask=causal), but=("distance",), tolerance=1e-4
    )
    assert list(seen.health) == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    ]


@pytest.mark.parametrize("weights", [False, True])
def test_levelheads_own(weights):
    model = lively(levelhead.torch.nn.MultiHeadAttention(32, 4))
    x = randn(2, 11, 32)
    plain = train_step(model, lambda m: m(x, need_weights=weights)[0])
    with levelhead.torch.watch(model) as seen:
        watched = train_step(model, lambda m: m(x, need_weights=weights)[0])
    assert_same_step(watched, plain)
    assert seen.calls == 1 and seen.health[""].shape == (4,)
    assert np.isfinite(seen.gradients[""].survival).all()


def test_levelheads_own_function_gives_all_that_is_asked_for():
    q, k, v = randn(3, 2, 4, 11, 8)
    for asked in ({}, {"return_lse": True}, {"return_health": True}, {"return_weights": True}):
        for shape in ((2, 4, 11, 8), (8, 11, 8), (11, 8), (2, 2, 2, 11, 8)):
            given = [x.flatten()[: np.prod(shape)].reshape(shape) for x in (q, k, v)]
            plain = levelhead.torch.attention(*given, causal=True, **asked)
            with levelhead.torch.watch(nn.Identity()) as seen:
                watched = levelhead.torch.attention(*given, causal=True, **asked)
            assert seen.calls == 1
            if not asked:
                assert torch.equal(watched, plain)
                continue
            for a, b in zip(watched, plain, strict=True):
                assert type(a) is type(b)
                if isinstance(a, torch.Tensor):
                    assert torch.equal(a, b)
            assert watched.health == plain.health
