"""What a watch counts as a call of attention by hand, and what it says of the rest."""

import gc
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import Oracle, assert_same_gradients, assert_same_health, randn

import levelhead.torch
from levelhead.torch.watching import _eager_trace

B, H, L, D = 2, 4, 6, 8
SCALE = D**-0.5
Q, K, V = (2 * randn(B, H, L, D, seed=seed) for seed in range(3))
SINKS = torch.tensor([-1.0, 0.0, 1.0, 2.0])
MASK = torch.ones(L, L, dtype=torch.bool).tril()


class Run(nn.Module):
    """A module that does what it is asked to."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, *given):
        return self.way(*given)


def watch(way, *given, inner=False):
    """Watch a module that runs this, in a model or as one; nothing seen at all is no warning."""
    model = nn.Sequential(Run(way)) if inner else Run(way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with levelhead.torch.watch(model) as seen:
            model(*given) if not inner else model[0](*given)
    return seen


def scores(q=Q, k=K):
    return q @ k.mT * SCALE


# ---------------------------------------------------------------- complete when values are weighed


def weighs_after_much(weights):
    weights = F.dropout(weights, 0.1).to(torch.float64).float()
    weights = weights.masked_fill(~MASK, 0) / weights.sum(-1, keepdim=True)
    return weights.view(B * H, L, L).transpose(1, 2).contiguous().transpose(1, 2) @ V.flatten(0, 1)


PRODUCTS = {
    "matmul": lambda w: w @ V,
    "bmm": lambda w: torch.bmm(w.flatten(0, 1), V.flatten(0, 1)),
    "baddbmm": lambda w: torch.baddbmm(torch.zeros(1), w.flatten(0, 1), V.flatten(0, 1)),
    "einsum": lambda w: torch.einsum("bhij,bhjd->bihd", w, V),
    "values first": lambda w: V.mT @ w.mT,
    "multiplied and summed": lambda w: (w.unsqueeze(-1) * V.unsqueeze(2)).sum(3),
    "after much": weighs_after_much,
    "heads mixed by einsum": lambda w: torch.einsum("gh,bhij->bgij", randn(H, H), w) @ V,
    "heads mixed by a layer": lambda w: F.linear(w.movedim(1, -1), randn(H, H)).movedim(-1, 1) @ V,
    "heads mixed by a convolution": lambda w: F.conv2d(w, randn(H, H, 1, 1)) @ V,
    "difference": lambda w: (w - 0.3 * w.flip(0)) @ V,
    "stacked": lambda w: torch.stack([w, w]) @ V,
    "in place": lambda w: w.mul_(MASK).masked_fill_(~MASK, 0) @ V,
    "a part": lambda w: w[..., :2, :4] @ V[..., :4, :],
    "twice": lambda w: (w @ V, w @ K),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_of_values_are_a_call(name):
    seen = watch(lambda: PRODUCTS[name](scores().softmax(-1)))
    assert (seen.calls, seen.not_understood) == (1, {})


def test_weights_of_nothing_are_none():
    def way():
        dead = scores().softmax(-1)
        dead.mean(1), dead.argmax(-1), dead.sum(-1), dead @ randn(L), dead.topk(2)
        torch.ones_like(dead) @ V, (dead > 0.1).float() @ V
        return dead

    seen = watch(way)
    assert (seen.calls, seen.not_understood) == (0, {})


def test_two_softmaxes_that_weigh_values_together_are_two_calls():
    seen = watch(lambda: (scores().softmax(-1) - 0.5 * scores(K, Q).softmax(-1)) @ V)
    assert seen.calls == 2


def test_health_is_that_of_the_softmax_whatever_comes_after():
    def way():
        logits = scores() + torch.where(MASK, 0.0, -torch.inf)
        weights = logits.softmax(-1)
        logits.fill_(7.0)
        return weights @ V

    truth = Oracle()
    truth(Q, K, V, MASK)
    seen = watch(way, inner=True)
    assert_same_health({"0": seen.health["0"]}, {"0": truth.health()[0]})


def test_gradients_are_those_of_the_weights_before_anything_is_done_to_them():
    mask = torch.rand(B, H, L, L, generator=torch.Generator().manual_seed(0)) > 0.3

    def step(attend):
        given = [x.clone().requires_grad_() for x in (Q, K, V)]
        (attend(*given) * randn(B, H, L, D, seed=5)).sum().backward()

    def by_hand(q, k, v):
        return scores(q, k).softmax(-1).clone().masked_fill_(~mask, 0).mul_(2) @ v

    model = Run(by_hand)
    with levelhead.torch.watch(model) as seen:
        step(model)
    truth = Oracle()

    def explicit(q, k, v):
        truth(q, k, v)
        return truth.calls[0].weights.masked_fill(~mask, 0) * 2 @ v

    step(explicit)
    assert_same_gradients(seen.gradients, truth.gradients())


def held():
    """Bytes of the floats that notes keep alive, but for tensors that they go with, and sums."""
    found, ahead = {}, [note for note, _ in _eager_trace._notes.values()]
    seen = set()
    while ahead:
        thing = ahead.pop()
        if id(thing) in seen or isinstance(thing, type | nn.Module):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing
        elif isinstance(thing, list | tuple | dict | set) or hasattr(thing, "__dict__"):
            ahead += gc.get_referents(thing)
    sums = len(levelhead.Health.COLUMNS)
    return sum(x.nbytes for x in found.values() if x.is_floating_point() and x.shape[-1] != sums)


@pytest.mark.parametrize("learns", [False, True])
def test_weights_that_nobody_uses_keep_nothing_alive(learns):
    model, kept = nn.Linear(D, D), []
    with levelhead.torch.watch(model) as seen, torch.set_grad_enabled(learns):
        for _ in range(3):
            x = model(Q)
            kept.append((x @ x.mT + 1).masked_fill(~MASK, -torch.inf).softmax(-1))
        del x
        assert len(_eager_trace._notes) >= 3 and held() == 0
        F.scaled_dot_product_attention(Q, K, V)
    assert seen.calls == 1


# ---------------------------------------------------------------- sinks


def beside(*columns, first=True):
    """Columns put before the scores or after them."""
    some = [x.expand(B, H, L, -1) for x in columns]
    return torch.cat([*some, scores()] if first else [scores(), *some], -1).softmax(-1)


SINK = SINKS[:, None, None]
ONE_SINK = {
    "last": lambda: beside(SINK, first=False)[..., :-1] @ V,
    "first": lambda: beside(SINK)[..., 1:] @ V,
    "first, then narrow": lambda: beside(SINK).narrow(-1, 1, L) @ V,
    "first, then split": lambda: beside(SINK).split([1, L], -1)[1] @ V,
    "first, with a value": lambda: beside(SINK) @ F.pad(V, (0, 0, 1, 0)),
    "first, masked after": lambda: (
        torch.cat([SINK.expand(B, H, L, 1), scores()], -1)
        .masked_fill(torch.zeros(L, L + 1, dtype=torch.bool), -torch.inf)
        .softmax(-1)[..., 1:]
        @ V
    ),
    "first, reshaped": lambda: (
        torch.cat([SINK.expand(B, H, L, 1).flatten(0, 1), scores().flatten(0, 1)], -1)
        .view(B, H, L, L + 1)
        .softmax(-1)[..., 1:]
        @ V
    ),
    "keys not last": lambda: (
        torch.cat([SINK.expand(B, H, 1, L), (scores() + 0).mT], -2).softmax(-2)[:, :, 1:].mT @ V
    ),
}


@pytest.mark.parametrize("name", ONE_SINK)
def test_a_sink_on_either_side(name):
    model = nn.Sequential(Run(ONE_SINK[name]))
    with levelhead.torch.watch(model) as seen:
        output = model[0]()
    truth = Oracle()
    torch.testing.assert_close(truth(Q, K, V, sinks=SINKS), output, rtol=1e-5, atol=1e-5)
    assert_same_health(seen.health, {"0": truth.health()[0]})
    assert (seen.health["0"].null_mass > 0.01).all()


def test_gradients_with_a_sink_first():
    def by_hand(q, k, v, sinks):
        null = sinks[:, None, None].expand(B, H, L, 1)
        return torch.cat([null, scores(q, k)], -1).softmax(-1)[..., 1:] @ v

    def step(attend):
        given = [x.clone().requires_grad_() for x in (Q, K, V, SINKS)]
        (attend(*given) * randn(B, H, L, D, seed=5)).sum().backward()

    model = Run(by_hand)
    with levelhead.torch.watch(model) as seen:
        step(model)
    truth = Oracle()
    step(lambda q, k, v, sinks: truth(q, k, v, sinks=sinks))
    assert_same_health(seen.health, truth.health())
    assert_same_gradients(seen.gradients, truth.gradients())


@pytest.mark.parametrize("first", [True, False])
def test_several_sinks(first):
    def way():
        weights = beside(SINK, SINK - 1, first=first)
        return (weights[..., 2:] if first else weights[..., :L]) @ V

    seen = watch(way, inner=True)
    (health,) = (seen.health["0"],)
    logits = torch.cat([(SINK + x).expand(B, H, L, 1) for x in (0, -1)] + [scores()], -1).double()
    p = logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    expected = {
        "null_mass": p[..., :2].sum(-1),
        "first_key": p[..., 2],
        "entropy": entropy,
        "entropy_ratio": entropy / np.log(L + 2),
        "top_weight": p.amax(-1),
        "effective_keys": 1 / p.square().sum(-1),
        "signal": 1 - p.square().sum(-1),
    }
    for field, rows in expected.items():
        np.testing.assert_allclose(
            getattr(health, field), rows.mean((0, 2)).numpy(), rtol=1e-5, err_msg=field
        )
    assert (health.pairs == B * L * L).all()


def test_a_zero_put_before_the_scores_is_a_sink():
    seen = watch(lambda: F.pad(scores(), (1, 0)).softmax(-1)[..., 1:] @ V, inner=True)
    truth = Oracle()
    truth(Q, K, V, sinks=torch.zeros(H))
    assert_same_health({"0": seen.health["0"]}, {"0": truth.health()[0]})


def test_several_columns_with_values_are_keys_that_were_not_followed():
    seen = watch(lambda: beside(SINK, SINK) @ F.pad(V, (0, 0, 2, 0)))
    assert (seen.calls, seen.not_understood) == (0, {"": 1})


# ---------------------------------------------------------------- scores from several products


def test_joined_scores():
    bias = randn(H, L, L, seed=7)

    def way():
        first, second = scores(k=K[:, :, :2]), scores(k=K[:, :, 2:])
        first = first.masked_fill(~MASK[:, :2], -1e9) + bias[..., :2]
        second = (second + bias[..., 2:]).masked_fill(~MASK[:, 2:], -torch.inf)
        return torch.cat([first, second], -1).softmax(-1) @ V

    truth = Oracle()
    truth(Q, K, V, torch.where(MASK, bias, -torch.inf))
    seen = watch(way, inner=True)
    assert_same_health({"0": seen.health["0"]}, {"0": truth.health()[0]})
    plain = watch(
        lambda: torch.cat([Q @ K[:, :, :2].mT, Q @ K[:, :, 2:].mT], 3).mul(SCALE).softmax(-1) @ V,
        inner=True,
    )
    truth = Oracle()
    truth(Q, K, V)
    assert_same_health({"0": plain.health["0"]}, {"0": truth.health()[0]})


@pytest.mark.parametrize("least", [torch.max, torch.maximum, torch.Tensor.max, torch.clamp_min])
def test_a_least_score(least):
    low = torch.finfo(torch.float32).min
    low = low if least is torch.clamp_min else torch.tensor(low)

    def way():
        logits = scores() + torch.where(MASK, 0.0, -torch.inf)
        return least(logits, low).softmax(-1) @ V

    truth = Oracle()
    truth(Q, K, V, MASK)
    seen = watch(way, inner=True)
    assert_same_health({"0": seen.health["0"]}, {"0": truth.health()[0]})


def test_projections_by_products_of_their_own():
    """Weights of three dimensions, as XLNet has them: those products are no scores."""
    layers = [nn.Parameter(randn(H * D, H, D, seed=seed)) for seed in range(3)]
    x = randn(L, B, H * D)

    def way():
        q, k, v = (torch.einsum("ibf,fhd->ibhd", x, layer) for layer in layers)
        logits = torch.einsum("ibhd,jbhd->bhij", q * 0.5 + 0.1, k) * SCALE
        return torch.einsum("bhij,jbhd->ibhd", logits.softmax(3), v)

    calls = []
    with levelhead.torch.listen(calls.append):
        way()
    (call,) = calls
    assert (call.shape, call.dk) == ((B, H, L, L), D)
    assert call.scale == pytest.approx(0.5 * SCALE)


# ---------------------------------------------------------------- not understood


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scripted(x):
        return x * 0.3 + 1


def additive():
    hidden = torch.tanh(Q[:, :, :, None] + K[:, :, None])
    return F.linear(hidden, randn(1, D)).squeeze(-1).softmax(-1) @ V


UNKNOWN = {
    "scripted": (lambda: scripted(Q @ K.mT).softmax(-1) @ V, 1),
    "another function": (lambda: scores().relu().softmax(-1) @ V, 1),
    "additive": (additive, 1),
    "linear": (lambda: Q.softmax(-1) @ (K.softmax(-2).mT @ V), 2),
    "over the queries": (lambda: scores().softmax(-2) @ V, 1),
    "a layer mixes the heads before": (
        lambda: F.conv2d(scores(), randn(H, H, 1, 1)).softmax(-1) @ V,
        1,
    ),
    "summed": (
        lambda: (scores().relu().softmax(-1).unsqueeze(-1) * V.unsqueeze(2)).sum(3),
        1,
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_attention_that_is_not_understood_is_said(name):
    way, count = UNKNOWN[name]
    seen = watch(way, inner=True)
    assert (seen.calls, seen.not_understood) == (0, {"0": count})
    calls = "1 call" if count == 1 else f"{count} calls"
    said = f"Attention was seen but not understood in 0 ({calls})."
    assert seen.summary().splitlines()[-1] == said
    model = nn.Sequential(Run(way))
    with (
        pytest.warns(RuntimeWarning, match="saw no attention call") as warned,
        levelhead.torch.watch(model) as seen,
    ):
        model[0]()
    assert str(warned[0].message).splitlines()[-1] == said
    assert seen.summary() == f"no attention call was seen\n{said}"


X, EXPERTS, TABLE = randn(B, L, D), randn(B, L, 5, D), randn(5, D)
QUIET = {
    "mixture": lambda: torch.einsum("bne,bned->bnd", F.linear(X, TABLE).softmax(-1), EXPERTS),
    "mixture by matmul": lambda: F.linear(X, TABLE).softmax(-1).unsqueeze(-2) @ EXPERTS,
    "mixture by hand": lambda: (F.linear(X, TABLE).softmax(-1)[..., None] * EXPERTS).sum(-2),
    "router": lambda: F.linear(X, TABLE).softmax(-1).topk(2).values @ X[:, :2],
    "classifier": lambda: F.linear(X, TABLE).softmax(-1).argmax(-1),
    "classifier by matmul": lambda: (X @ TABLE.T).softmax(-1).log().sum(),
    "codebook": lambda: (X @ TABLE.T).softmax(-1) @ TABLE,
    "flat codebook": lambda: (X[0] @ (layer := nn.Parameter(TABLE)).T).softmax(-1) @ layer,
    "bins": lambda: X.softmax(-1) @ torch.arange(float(D)),
    "layers": lambda: (randn(3).softmax(0)[:, None, None, None] * torch.stack([X] * 3)).sum(0),
    "gates": lambda: (X.softmax(1) * X).sum(1),
}


@pytest.mark.parametrize("name", QUIET)
def test_softmaxes_that_are_no_attention(name):
    seen = watch(QUIET[name])
    assert (seen.calls, seen.not_understood) == (0, {})


def test_not_understood_is_counted_once_and_on_recorded_steps_only():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x):
            def attend(x):
                x = self.layer(x)
                return (x @ x.mT).relu().softmax(-1) @ x

            return torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.warns(RuntimeWarning), levelhead.torch.watch(model, every=2) as seen:
        for _ in range(4):
            model(Q).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(Q)
    assert seen.not_understood == {"": 2}


def test_many_modules_are_named_shortly():
    model = nn.Sequential(*(Run(lambda: scores().relu().softmax(-1) @ V) for _ in range(10)))
    with pytest.warns(RuntimeWarning), levelhead.torch.watch(model) as seen:
        for layer in model:
            layer()
    assert seen.summary().endswith("6 (1 call), 7 (1 call) and 2 more modules.")


def test_the_module_is_the_one_around_its_parts():
    """A softmax and a product that are modules of their own, as in SqueezeBERT."""

    class Product(nn.Module):
        def forward(self, a, b):
            return a @ b

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.softmax, self.second = Product(), nn.Softmax(-1), Product()

        def forward(self, q, k, v):
            return self.second(self.softmax(self.first(q, k.mT)), v)

    model = nn.ModuleDict({"attention": Attention()})
    with levelhead.torch.watch(model) as seen:
        model["attention"](Q, K, V)
    assert list(seen.health) == ["attention"]


# ---------------------------------------------------------------- masks with a meaning of their own


class Doubles(torch.Tensor):
    """A mask that says what attention does with it: all is twice as large."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (F.scaled_dot_product_attention, levelhead.torch.attention):
            kwargs = {k: None if isinstance(v, cls) else v for k, v in (kwargs or {}).items()}
            return 2 * func(*(None if isinstance(x, cls) else x for x in args), **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_mask_of_another_kind_is_asked():
    mask = torch.zeros(L, L).as_subclass(Doubles)
    plain = F.scaled_dot_product_attention(Q, K, V)

    def way():
        return F.scaled_dot_product_attention(Q, K, V, mask)

    torch.testing.assert_close(
        levelhead.torch.scaled_dot_product_attention(Q, K, V, mask), 2 * plain
    )
    torch.testing.assert_close(levelhead.torch.attention(Q, K, V, mask=mask), 2 * plain)
    sinks = torch.zeros(H).as_subclass(Doubles)
    torch.testing.assert_close(levelhead.torch.attention(Q, K, V, sinks=sinks), 2 * plain)
    model = nn.Sequential(Run(way))
    with levelhead.torch.watch(model) as seen:
        torch.testing.assert_close(model[0](), 2 * plain)
        assert seen.not_understood == {"0": 1} and seen.calls == 0
        model[0].way = lambda: levelhead.torch.attention(Q, K, V, sinks=sinks)
        torch.testing.assert_close(model[0](), 2 * plain)
        assert seen.not_understood == {"0": 2} and seen.calls == 0
        model[0].way = lambda: F.scaled_dot_product_attention(Q, K, V)
        model[0]()
    assert seen.calls == 1
