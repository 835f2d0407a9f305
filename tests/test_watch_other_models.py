"""Whose calls these are: other models' are not counted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from watch_support import (
    Attention,
    Stack,
    lively,
    randn,
    watching,
)

import levelhead.torch

X = randn(2, 13, 32)
ROWS = 26
LAYERS = ["layers.0", "layers.1"]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel, lambda model: Stack()])
def test_a_teacher_or_an_average_in_the_loop(gradients, copied):
    model = lively(Stack(), size=0.1)
    other = copied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            with torch.set_grad_enabled(gradients):
                target = other(X)
            (model(X) - target).square().mean().backward()
            optimizer.step()
    assert [record.step for record in records] == [0, 1, 2]
    for record in records:
        assert list(record.health) == list(record.gradients) == LAYERS
        assert (record.health["layers.0"].rows == ROWS).all()
    assert watch.calls == 6 and watch.left_out == {"other models": 6}


def test_other_models_alone_are_reported_at_the_end():
    model = lively(Stack(), size=0.1)
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-4)
    with (
        pytest.warns(RuntimeWarning, match=r"Other models made 6 calls meanwhile\. If one") as said,
        levelhead.torch.watch(model) as seen,
    ):
        for _ in range(3):
            trained(X).square().mean().backward()
            optimizer.step()
    assert len(said) == 1 and "saw no attention call" in str(said[0].message)
    assert "give the watch that very\nobject: a copy of a model is another model" in str(
        said[0].message
    )
    assert seen.health == {} and seen.left_out == {"other models": 6}


class Helped(nn.Module):
    """Its forward makes a helper on the fly, and has one that nobody registered."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 32)
        self.kept = [Attention()]

    def forward(self, x):
        return self.forward_features(x)

    def forward_features(self, x):
        return self.kept[0](Attention()(self.project(x)))


class Called(Helped):
    def __call__(self, x):
        return self.kept[0](Attention()(self.project(x)))


@pytest.mark.parametrize("kind", [Helped, Called])
def test_helpers_in_a_forward_belong_to_the_module_that_runs_them(kind):
    model = nn.Sequential(kind(), Stack(1))
    runs = (
        model,
        lambda x: model[1](model[0](x)),
        lambda x: model[1](model[0].forward(x)),
        lambda x: model[1](model[0].forward_features(x)),
    )
    for run in runs:
        with levelhead.torch.watch(model) as seen, torch.no_grad():
            run(X)
        assert {name: health.rows[0] for name, health in seen.health.items()} == {
            "0": 2 * ROWS,
            "1.layers.0": ROWS,
        }
        assert seen.left_out == {}


class Lit(nn.Module):
    """As Lightning's modules are, with a teacher that is no part of it."""

    def __init__(self):
        super().__init__()
        self.net = Stack()
        self.outside = [Stack()]

    def training_step(self, x):
        with torch.no_grad():
            target = self.outside[0](x)
        q = self.net(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return (F.scaled_dot_product_attention(q, q, q) - target.mean()).square().mean()


def test_a_teacher_that_a_method_of_the_model_calls():
    model = Lit()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(2):
            model.training_step(X).backward()
            optimizer.step()
    for record in records:
        assert list(record.health) == ["net.layers.0", "net.layers.1", ""]  # "": the method's own
        assert (record.health["net.layers.0"].rows == ROWS).all()
    assert watch.calls == 6 and watch.left_out == {"other models": 4}


def test_functions_outside_of_any_module_count_and_inside_of_another_do_not():
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    class Other(nn.Module):
        def forward(self, x):
            return attend(x)

    model = Stack()
    with levelhead.torch.watch(model) as seen:
        attend(X)
        Other()(X)
        Other().forward(X)
    assert list(seen.health) == [""] and seen.calls == 1
    assert seen.left_out == {"other models": 2}


class Pipeline(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.before = net, Attention()

    def forward(self, x):
        return self.net(self.before(x))


WRAPPERS = {
    "pipeline": Pipeline,
    "data parallel": nn.DataParallel,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "sequential": nn.Sequential,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("every", [1, 2])
def test_wrappers_around_the_model_make_its_calls(wrap, every):
    torch.compiler.reset()
    model = lively(Stack(), size=0.1)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    watch, records = watching(model, every=every)
    with watch:
        for _ in range(3):
            wrapped(X).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                wrapped(X)
    assert [record.step for record in records] == list(range(0, 3, every))
    assert all(list(record.health) == LAYERS for record in records)
    assert (watch.health["layers.0"].rows == ROWS * len(records)).all()


def test_a_part_that_comes_while_the_watch_is_on():
    model = nn.Module()
    model.first = Attention()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        model.first(X)
        model.second = nn.Sequential(Attention())
        model.second(X)
        model.first = Attention()
        model.first(X)
    assert {name: health.rows[0] for name, health in seen.health.items()} == {
        "first": 2 * ROWS,
        "second.0": ROWS,
    }
    assert seen.left_out == {}


def test_listening_tells_which_calls_are_other_models():
    model, other, calls = Stack(), Stack(1), []
    with levelhead.torch.listen(calls.append, model), torch.no_grad():
        model(X)
        other(X)
        F.scaled_dot_product_attention(X, X, X)
    assert [(call.module, call.other) for call in calls] == [
        ("layers.0", False), ("layers.1", False), ("", True), ("", False),
    ]  # fmt: skip
