"""Attention written out by hand, in the many ways that people do it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import (
    Oracle,
    assert_same_gradients,
    assert_same_health,
    randn,
)

import levelhead.torch

B, H, L, D = 2, 4, 11, 8
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
BIAS = randn(H, L, L, seed=9)
LOW = torch.finfo(torch.float32).min
SCALE = D**-0.5
GIVEN = [2 * randn(B, H, L, D, seed=seed) for seed in range(3)]


def attend(scores, v):
    return scores.softmax(-1) @ v


def scaled_query(q, k, v):
    return F.softmax((q * SCALE) @ k.transpose(-1, -2), dim=-1) @ v


def scaled_in_place(q, k, v):
    scores = torch.matmul(q, k.mT)
    scores *= SCALE
    return attend(scores, v)


def divided(q, k, v):
    return torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D), -1) @ v


def divided_by_a_tensor(q, k, v):
    return attend(q @ k.mT / torch.tensor(D).sqrt(), v)


def half_each(q, k, v):
    return attend((q * SCALE**0.5) @ (k * SCALE**0.5).mT, v)


def einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * SCALE
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)


def heads_last(q, k, v):
    q, k = (x.transpose(1, 2) for x in (q, k))
    scores = torch.einsum("bihd,bjhd->bijh", q, k).mul(SCALE).permute(0, 3, 1, 2)
    return attend(scores, v)


def filled(q, k, v):
    return attend((q @ k.mT * SCALE).masked_fill(~CAUSAL, -torch.inf), v)


def filled_first(q, k, v):
    return attend((q @ k.mT).masked_fill(~CAUSAL, -1e9) * SCALE, v)


def filled_in_place(q, k, v):
    scores = q @ k.mT * SCALE
    scores.masked_fill_(mask=~CAUSAL, value=-1e4)
    return attend(scores, v)


def assigned(q, k, v):
    scores = q @ k.mT * SCALE
    scores[:, :, ~CAUSAL] = -1e9
    return attend(scores, v)


def where(q, k, v):
    return attend(torch.where(CAUSAL, q @ k.mT * SCALE, -1e9), v)


def where_turned(q, k, v):
    return attend(torch.where(~CAUSAL, torch.tensor(-1e9), q @ k.mT * SCALE), v)


def where_method(q, k, v):
    return attend((q @ k.mT * SCALE).where(CAUSAL, -1e9), v)


def added(q, k, v):
    return attend(q @ k.mT * SCALE + torch.where(CAUSAL, 0.0, LOW), v)


def added_in_place(q, k, v):
    scores = q @ k.mT * SCALE
    scores += torch.where(CAUSAL, BIAS, LOW)
    return attend(scores, v)


def biased(q, k, v):
    return attend(BIAS + q @ k.mT * SCALE, v)


def biased_then_scaled(q, k, v):
    return attend((q @ k.mT + BIAS / SCALE) * SCALE, v)


def capped(q, k, v):
    scores = q @ k.mT * SCALE
    scores = torch.tanh(scores / 0.7) * 0.7
    return attend(scores + torch.where(CAUSAL, 0.0, LOW), v)


def capped_in_place(q, k, v):
    scores = q @ k.mT * SCALE
    scores = scores.div_(0.7).tanh_() * 0.7
    return attend(scores.masked_fill(~CAUSAL, -torch.inf), v)


def folded(q, k, v):
    """Heads folded into the batch, unfolded for the mask, as fairseq does."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q * SCALE, k.transpose(1, 2))
    scores = scores.view(B, H, L, L).masked_fill(~CAUSAL, -torch.inf).view(B * H, L, L)
    return torch.bmm(F.dropout(scores.softmax(-1), 0.5, training=False), v).view(B, H, L, D)


def folded_with_bias(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = BIAS.repeat(B, 1, 1)
    scores = torch.baddbmm(bias, q, k.mT, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v).view(B, H, L, D)


def by_names(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = BIAS.repeat(B, 1, 1).baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=SCALE)
    return torch.bmm(F.softmax(input=scores, dim=-1), v).view(B, H, L, D)


def sharpened(q, k, v):
    """A learned factor per head, as Swin 2 has."""
    factor = torch.linspace(0.5, 2, H)[:, None, None]
    return attend(q @ k.mT * factor, v)


def in_16_bits_and_back(q, k, v):
    scores = (q @ k.mT * SCALE).double()
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


WAYS = {
    (scaled_query, scaled_in_place, divided, divided_by_a_tensor, half_each, einsum, heads_last,
     in_16_bits_and_back): {},
    (filled, filled_first, filled_in_place, assigned, where, where_turned, where_method, added,
     folded): {"attn_mask": CAUSAL},
    (biased, biased_then_scaled, folded_with_bias, by_names): {"attn_mask": BIAS},
    (added_in_place,): {"attn_mask": torch.where(CAUSAL, BIAS, LOW)},
    (capped, capped_in_place): {"attn_mask": CAUSAL, "softcap": 0.7},
}  # fmt: skip
WAYS = {way: options for ways, options in WAYS.items() for way in ways}


class Written(nn.Module):
    num_heads = H

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, *given):
        return self.way(*given)


def gradients(call):
    given = [x.clone().requires_grad_() for x in GIVEN]
    output = call(*given)
    (output * randn(*output.shape, seed=5)).sum().backward()
    return [output, *(x.grad for x in given)]


@pytest.mark.parametrize("way", [*WAYS, sharpened], ids=lambda way: way.__name__)
def test_by_hand(way):
    plain = gradients(Written(way))
    calls = []
    model = Written(way)
    with levelhead.torch.watch(model) as seen, levelhead.torch.listen(calls.append):
        watched = gradients(model)
    for a, b in zip(watched, plain, strict=True):
        assert torch.equal(a, b)  # nothing is computed otherwise
    assert list(seen.health) == [""] and seen.calls == 1
    assert (calls[0].kind, calls[0].dk, calls[0].shape) == ("eager", D, (B, H, L, L))
    if way is sharpened:
        truth = [Oracle() for _ in range(H)]
        gradients(lambda q, k, v: torch.cat(
            [one(q[:, [h]], k[:, [h]], v[:, [h]], scale=float(torch.linspace(0.5, 2, H)[h]))
             for h, one in enumerate(truth)], 1))  # fmt: skip
        for head, one in enumerate(truth):
            (health,) = one.health().values()
            for field in ("score_max", "score_var", "entropy"):
                ours = getattr(seen.health[""], field)[head]
                assert ours == pytest.approx(getattr(health, field)[0], rel=1e-5)
        assert calls[0].scale == pytest.approx(1.25)
        return
    truth = Oracle()
    explicit = gradients(lambda q, k, v: truth(q, k, v, **WAYS[way]))
    for a, b in zip(watched, explicit, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    assert calls[0].scale == pytest.approx(SCALE)
    assert_same_health(seen.health, truth.health())
    assert_same_gradients(seen.gradients, truth.gradients())


def test_one_head_of_a_lecture():
    """Three dimensions and no number of heads anywhere: a batch of one head."""

    class Head(nn.Module):
        def forward(self, x):
            weights = (x @ x.transpose(-2, -1) * SCALE).masked_fill(~CAUSAL, float("-inf"))
            return F.softmax(weights, dim=-1) @ x

    model = nn.ModuleList([Head(), Head()])
    x = randn(5, L, D)
    with levelhead.torch.watch(model) as seen:
        for head in model:
            head(x)
        model[0](x[:2])
    assert {name: health.shape for name, health in seen.health.items()} == {"0": (1,), "1": (1,)}
    assert seen.health["0"].rows[0] == 7 * L and seen.health["1"].rows[0] == 5 * L


def test_what_is_no_attention_is_not_taken_for_it():
    x, weight = randn(2, L, D), randn(D, 5)
    seen = []
    with levelhead.torch.listen(seen.append):
        (x @ weight).softmax(-1)  # a classifier
        x.softmax(-1)
        (x @ x.mT).softmax(1)  # over another dimension
        (x @ x.mT).relu().softmax(-1)  # of something else
        (x * 2).softmax(-1)
        ((x @ x.mT).softmax(-1) @ x).softmax(-1)  # this one is: the first, not the second
        scores = x @ x.mT
        scores.exp_()
    assert len(seen) == 1


def test_forms_that_cannot_be_followed_are_left_alone():
    x = randn(2, 3, L, D)
    with levelhead.torch.listen(lambda call: None):
        scores = x @ x.mT / 0
        (x @ x.mT * (1 + 2j)).abs().softmax(-1)
        scores[:, :, :, torch.randperm(L)].nan_to_num().softmax(-1)
        torch.cat([x @ x.mT, x @ x.mT], -1).softmax(-1)
        (x @ x.mT).masked_fill(CAUSAL, 0.0).softmax(-1)


def test_notes_go_with_their_tensors():
    from levelhead.torch.watching import _eager_trace

    with levelhead.torch.listen(lambda call: None):
        for _ in range(3):
            x = randn(2, 3, L, D) * 0.5
            y = (x @ x.mT).masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ x
            assert _eager_trace._notes
        del x, y
    assert not _eager_trace._notes
