"""What the tests of watching share: models, and the same statistics by other means."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import levelhead as lh
import levelhead.torch


class Attention(nn.Module):
    """Self-attention as people write it, on PyTorch's function."""

    def __init__(self, d=32, heads=4, causal=True, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Layers of attention, each added to what it reads."""

    def __init__(self, layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(Attention(**options) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Wrapper(nn.Module):
    """As Lightning's modules are: training and validation call a part of it, or all of it."""

    def __init__(self, **options):
        super().__init__()
        self.net = Stack(**options)

    def forward(self, x):
        return self.net(x)

    def training_step(self, x):
        return self.net(x).square().mean()


def lively(model, seed=0, size=0.3):
    """The model with weights so large that scores differ and no head is like another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * size)
            if weight.dim() == 1 and not name.endswith("bias"):
                weight.add_(1)
    return model


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- the same by other means


class Oracle:
    """Attention as an explicit softmax that keeps all its matrices, call after call."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False, softcap=None, sinks=None, name=None,
    ):  # fmt: skip
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        group = query.shape[-3] // key.shape[-3]
        keys, values = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
        scores = query @ keys.transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            attn_mask = causal if attn_mask is None else attn_mask.where(causal, -torch.inf)
        visible = torch.ones_like(scores, dtype=torch.bool)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            visible = attn_mask.expand(scores.shape)
            scores = scores.masked_fill(~visible, -torch.inf)
        elif attn_mask is not None:
            visible = (attn_mask > torch.finfo(attn_mask.dtype).min / 2).expand(scores.shape)
            scores = scores + attn_mask
        logits = scores
        if sinks is not None:
            null = sinks[:, None, None].expand(*scores.shape[:-1], 1)
            logits = torch.cat([scores, null], -1)
        weights = logits.softmax(-1)
        if weights.requires_grad:
            weights.retain_grad()
            logits.retain_grad()
        dropped = F.dropout(weights, dropout_p)[..., : keys.shape[-2]]
        mask = None if attn_mask is None else attn_mask.detach().numpy()
        found = lh.reference(
            *(x.detach().numpy() for x in (query, key, value)),
            mask=mask, scale=scale, softcap=softcap, return_health=True,
            sinks=None if sinks is None else sinks.detach().double().numpy(),
        )  # fmt: skip
        self.calls.append(SimpleNamespace(
            name=name, health=found.health.over_batch(), weights=weights, logits=logits,
            visible=visible,
        ))  # fmt: skip
        return dropped @ values

    def health(self):
        """Health of each name, or of each call if they have none."""
        return self._merged(lambda call: call.health)

    def gradients(self):
        """(‖dL/dP‖, ‖dL/dS‖) of each name or call, per head; after backward."""

        def squares(call):
            keys = call.visible.shape[-1]
            return np.stack([
                torch.where(call.visible, x.grad[..., :keys].double(), 0)
                .square().sum((-2, -1)).reshape(-1, call.visible.shape[-3]).sum(0).numpy()
                for x in (call.weights, call.logits)
            ], -1)  # fmt: skip

        return self._merged(lambda call: lh.GradHealth(squares(call)))

    def _merged(self, of):
        parts = {}
        for place, call in enumerate(self.calls):
            parts.setdefault(place if call.name is None else call.name, []).append(of(call))
        return {name: some[0].merge(*some[1:]) for name, some in parts.items()}


@contextmanager
def oracle():
    """PyTorch's function replaced by an Oracle, its fast paths off."""
    truth, original = Oracle(), F.scaled_dot_product_attention
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    F.scaled_dot_product_attention = truth
    try:
        yield truth
    finally:
        F.scaled_dot_product_attention = original
        torch.backends.mha.set_fastpath_enabled(fast)


COUNTS = ("rows", "pairs", "empty_rows", "nonfinite_rows", "widest_row")


def assert_same_health(got, expected, rtol=2e-4, atol=2e-5, but=()):
    """Every field of every head of every layer; names are compared if both have them."""
    if "distance" in but:  # the oracle has other positions
        but = (*but, "self_weight", "previous_weight", "offset_weight")
    if all(isinstance(name, str) for name in expected):
        assert list(got) == list(expected)
    assert len(got) == len(expected) > 0
    for (name, ours), theirs in zip(got.items(), expected.values(), strict=True):
        assert ours.shape == theirs.shape
        for field in (field for field in ours.FIELDS if field not in but):
            a, b = getattr(ours, field), getattr(theirs, field)
            if field in COUNTS:
                np.testing.assert_array_equal(a, b, err_msg=f"{name} {field}")
            else:
                np.testing.assert_allclose(a, b, rtol, atol, err_msg=f"{name} {field}")


def assert_same_gradients(got, expected, rtol=2e-3):
    assert len(got) == len(expected) > 0
    for (name, ours), theirs in zip(got.items(), expected.values(), strict=True):
        for field in ours.FIELDS:
            a, b = getattr(ours, field), getattr(theirs, field)
            assert np.isfinite(b).all() and (b > 0).all()  # there is something to compare
            np.testing.assert_allclose(a, b, rtol, err_msg=f"{name} {field}")


# ---------------------------------------------------------------- runs


def train_step(model, run):
    """Output, and the gradient of every parameter, of one backward pass."""
    model.zero_grad(set_to_none=True)
    output = run(model)
    weights = randn(*output.shape, seed=5)
    (output * weights).sum().backward()
    return output.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same_step(got, expected, tolerance=2e-5):
    """Output and gradients, relative to the largest number in each (all 0 for a key's bias)."""
    assert got[1].keys() == expected[1].keys()
    pairs = {"output": (got[0], expected[0])} | {n: (g, expected[1][n]) for n, g in got[1].items()}
    for name, (a, b) in pairs.items():
        most = max(float(b.abs().max()), 0.1)
        torch.testing.assert_close(
            a, b, rtol=0, atol=tolerance * most, msg=lambda m, name=name: f"{name}: {m}"
        )


def watch_training(model, run, tolerance=2e-5, but=(), oracle_run=None, **options):
    """Watch one step; results must be those without a watch, statistics those of the oracle."""
    state = torch.get_rng_state()
    plain = train_step(model, run)
    torch.set_rng_state(state)
    with levelhead.torch.watch(model, **options) as seen:
        watched = train_step(model, run)
    assert_same_step(watched, plain, tolerance)
    torch.set_rng_state(state)
    with oracle() as truth:
        assert_same_step(train_step(model, oracle_run or run), plain, tolerance)
    assert_same_health(seen.health, truth.health(), but=but)
    assert_same_gradients(seen.gradients, truth.gradients())
    assert seen.calls == len(truth.calls)
    return seen


def no_grad(run):
    with torch.no_grad():
        return run()


def inference(run):
    with torch.inference_mode():
        return run()


def switched_off(run):
    torch.set_grad_enabled(False)
    try:
        return run()
    finally:
        torch.set_grad_enabled(True)


WITHOUT = [no_grad, inference, switched_off]
PARTS = {
    "all of it": lambda wrapper, x: wrapper(x),
    "a part": lambda wrapper, x: wrapper.net(x),
    "layers": lambda wrapper, x: [layer(x) for layer in wrapper.net.layers],
    "a wrapper": lambda wrapper, x: nn.Sequential(wrapper)(x),
    "a part in a wrapper": lambda wrapper, x: nn.Sequential(wrapper.net)(x),
}


def update(model, loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def entropy(weights):
    """Of rows of weights, from their definition."""
    return float(-(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1).mean())


def is_close(a, b, tolerance=1e-4):
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def watching(model, **options):
    """A watch, and the list of the records it hands on."""
    records = []
    return levelhead.torch.watch(model, sinks=[records.append], **options), records


def modes():
    return torch._C._len_torch_function_stack()
