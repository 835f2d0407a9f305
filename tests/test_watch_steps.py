"""What a step is, and that a watch leaves the rest of a training loop alone."""

import copy
import io
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from watch_support import (
    Stack,
    assert_same_gradients,
    assert_same_health,
    assert_same_step,
    lively,
    modes,
    oracle,
    randn,
    train_step,
    watching,
)

import levelhead.torch

X = randn(2, 13, 32)


# ---------------------------------------------------------------- what ends a step


def test_an_optimizer_ends_steps():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [record.step for record in records] == [0, 1, 2]
    assert watch.calls == 6
    for record in records:
        assert list(record.health) == list(record.gradients) == ["layers.0", "layers.1"]
        assert (record.health["layers.0"].rows == 26).all()
    assert (watch.health["layers.1"].rows == 3 * 26).all()
    parts = [record.health["layers.0"] for record in records]
    assert_same_health({"a": watch.health["layers.0"]}, {"a": parts[0].merge(*parts[1:])}, 1e-12)


def test_every_so_many_steps():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, records = watching(model, every=3)
    with watch:
        on = []
        for _ in range(8):
            on.append(modes())
            model(X).square().mean().backward()
            optimizer.step()
    assert [record.step for record in records] == [0, 3, 6]
    assert on == [1, 0, 0, 1, 0, 0, 1, 0]  # between recorded steps nothing is in the way
    assert watch.calls == 6


def test_several_forwards_a_step_and_gradient_accumulation():
    """A step's health is that of all its calls, its gradients those of all its backwards."""
    model = lively(Stack(), size=0.2)
    parts = [randn(n, 13, 32, seed=n) for n in (1, 2, 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch, records = watching(model)
    with watch:
        for x in parts[:2]:
            model(x).square().sum().backward()
        (model(parts[2]).square().sum() + model(parts[0]).sum()).backward()
        optimizer.step()
    with oracle() as truth:
        for x in parts[:2]:
            model(x).square().sum().backward()
        (model(parts[2]).square().sum() + model(parts[0]).sum()).backward()
    for place, call in enumerate(truth.calls):
        call.name = f"layers.{place % 2}"
    assert len(records) == 1 and watch.calls == 8
    assert_same_health(records[0].health, truth.health())
    assert_same_gradients(records[0].gradients, truth.gradients())


def test_evaluation_between_steps_is_left_out():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, records = watching(model)
    with watch:
        for _ in range(2):
            model(X).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(randn(5, 13, 32))
            with torch.inference_mode():
                model(X)
            model.train()
    assert [record.step for record in records] == [0, 1]
    assert watch.calls == 4
    assert (watch.health["layers.0"].rows == 2 * 26).all()


def test_without_an_optimizer_each_forward_without_gradients_is_a_step():
    model = Stack()
    watch, records = watching(model, every=2)
    with watch, torch.no_grad():
        for _ in range(5):
            model(X)
    assert [record.step for record in records] == [0, 2, 4]
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            model(X)  # with gradients: nobody says that a step is over
    assert [record.step for record in records] == [0]
    assert (records[0].health["layers.0"].rows == 3 * 26).all()


def test_steps_by_hand():
    model = Stack()
    watch, records = watching(model, every=2)
    with watch, torch.no_grad():
        watch.step()
        for _ in range(3):
            model(X)
            model(X)
            watch.step()
    assert [record.step for record in records] == [2]
    assert (records[0].health["layers.0"].rows == 2 * 26).all()


def test_optimizers_of_other_models_and_several_of_this():
    model, other = Stack(), Stack()
    one = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    two = torch.optim.Adam(model.layers[1].parameters(), lr=0.1)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            model(X).square().mean().backward()
            for optimizer in (foreign, one, two):
                optimizer.step()
    assert [record.step for record in records] == [0, 1, 2]
    assert all(list(record.health) == ["layers.0", "layers.1"] for record in records)


def test_an_optimizer_that_is_replaced():
    model = Stack()
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(X).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                del optimizer
                model(X)
    assert [record.step for record in records] == [0, 1, 2]
    assert watch.calls == 6


def test_an_optimizer_that_calls_the_model():
    model = Stack()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    watch, records = watching(model)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with watch:
        optimizer.step(closure)
        optimizer.step(closure)
    assert [record.step for record in records] == [0, 1]
    assert watch.calls > 4


@pytest.mark.parametrize("every", [1, 2])
def test_optimizers_that_step_as_gradients_arrive(every):
    """One a parameter, in hooks: the step is over when backward is, and has all its gradients."""
    model = lively(Stack(), size=0.1)
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=1e-4)

        def update(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)
    watch, records = watching(model, every=every)
    with watch:
        for _ in range(4):
            model(X).square().mean().backward()
    assert [record.step for record in records] == list(range(0, 4, every))
    for record in records:
        assert list(record.gradients) == ["layers.0", "layers.1"]
        assert np.isfinite(record.gradients["layers.0"].survival).all()


# ---------------------------------------------------------------- checkpointing


class Checkpointed(Stack):
    reentrant = True

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_counts_once(reentrant, dropout):
    model = lively(Checkpointed(dropout=dropout), size=0.2)
    model.reentrant = reentrant
    state = torch.get_rng_state()

    def run(m):
        torch.set_rng_state(state)
        return m(X.clone().requires_grad_())

    plain = train_step(model, run)
    with levelhead.torch.watch(model) as seen:
        watched = train_step(model, run)
    assert_same_step(watched, plain)
    straight = Stack(dropout=dropout)
    straight.load_state_dict(model.state_dict())
    with oracle() as truth:
        assert_same_step(train_step(straight, run), plain)
    assert seen.calls == 2
    assert_same_health(seen.health, truth.health())
    assert_same_gradients(seen.gradients, truth.gradients())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_whole_model_checkpointed_is_still_training(reentrant):
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model)
    with watch:
        for _ in range(3):
            x = X.clone().requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
    assert [record.step for record in records] == [0, 1, 2]
    assert watch.calls == 6
    assert all(list(record.gradients) == ["layers.0", "layers.1"] for record in records)


def test_gradients_by_torch_autograd_grad():
    model = lively(Checkpointed(), size=0.1)
    model.reentrant = False

    def gradient():
        x = X.clone().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    plain = gradient()
    with levelhead.torch.watch(model) as seen:
        torch.testing.assert_close(gradient(), plain, rtol=1e-5, atol=1e-4)
    assert list(seen.gradients) == ["layers.0", "layers.1"] and seen.calls == 2


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.parametrize("watched", ["inner", "outer"])
def test_compiled_models_run_eagerly_on_recorded_steps_only(compiled_first, watched):
    torch.compiler.reset()
    model = lively(Stack(), size=0.1)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def make():
        return torch.compile(model, backend=backend, fullgraph=True)

    compiled = make()
    expected = train_step(model, lambda m: m(X))
    if compiled_first:
        compiled(X)
        assert len(graphs) == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    subject = compiled if watched == "outer" else model
    watch, records = watching(subject, every=3)
    with watch:
        for step in range(7):
            before = len(graphs)
            got = train_step(model, lambda m: compiled(X))
            assert_same_step(got, expected)
            optimizer.step()
            if step % 3 == 0:
                assert len(graphs) == before
        count = len(graphs)
    assert 1 <= count <= 2  # compiled once more at most, for the hooks
    assert [record.step for record in records] == [0, 3, 6]
    assert list(watch.health) == list(watch.gradients) == ["layers.0", "layers.1"]
    compiled(X)
    assert len(graphs) == count


def test_compiled_in_place_and_evaluated():
    torch.compiler.reset()
    model = lively(Stack())
    expected = model(X)
    model.compile(backend="aot_eager", fullgraph=True)
    watch, records = watching(model)
    with watch, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(X), expected.detach(), rtol=1e-5, atol=2e-5)
    assert [record.step for record in records] == [0, 1]


def test_a_compiled_model_that_only_infers():
    torch.compiler.reset()
    model = lively(Stack()).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    watch, records = watching(compiled, every=2)
    with watch, torch.no_grad():
        for _ in range(5):
            compiled(X)
    assert [record.step for record in records] == [0, 2, 4]
    assert list(watch.health) == ["layers.0", "layers.1"]


# ---------------------------------------------------------------- other modes, threads, several


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.attention = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.attention += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("every", [1, 2])
def test_other_modes_inside_and_outside(every):
    model, outer, inner = Stack(), Counting(), Counting()
    watch, records = watching(model, every=every)
    with outer, torch.device("cpu"), watch, torch.no_grad():
        model(X)
        with inner, torch.device("cpu"):
            model(X)
            model(X)
            assert torch.zeros(1).device.type == "cpu"
        model(X)
        assert modes() == 3
    assert [record.step for record in records] == list(range(0, 4, every))
    assert (outer.attention, inner.attention) == (8, 4)


def test_a_default_device_set_inside():
    model = Stack()
    watch, records = watching(model, every=2)
    try:
        with watch, torch.no_grad():
            model(X)
            torch.set_default_device("cpu")
            for _ in range(3):
                model(X)
        assert modes() == 1
    finally:
        torch.set_default_device(None)
    assert [record.step for record in records] == [0, 2]


def test_another_default_device_does_not_reach_our_tensors():
    model = lively(Stack(dropout=0.3), size=0.1)
    with torch.device("meta"), levelhead.torch.watch(model) as seen:
        model(X).square().sum().backward()
    assert seen.calls == 2 and (seen.health["layers.0"].rows == 26).all()
    assert (seen.gradients["layers.0"].survival > 0).all()


def test_watches_one_after_the_other_and_one_in_another():
    model = lively(Stack(), size=0.1)
    with levelhead.torch.watch(model) as first:
        model(X).sum().backward()
    outer_calls = []
    with levelhead.torch.watch(model) as outer, levelhead.torch.listen(outer_calls.append):
        with levelhead.torch.watch(model.layers[1], every=2) as inner:
            model(X).sum().backward()
        model(X)
    assert list(outer.health) == ["layers.0", "layers.1"]
    assert (outer.health["layers.0"].rows == 2 * 26).all()
    assert list(inner.health) == [""]  # the layer itself; the other is no part of it
    assert (inner.health[""].rows == 26).all()
    assert (first.calls, inner.calls, outer.calls, len(outer_calls)) == (2, 1, 4, 4)
    assert [call.module for call in outer_calls[:2]] == ["Attention", "Attention"]
    assert first.gradients == outer.gradients
    assert_same_gradients(inner.gradients, {"": first.gradients["layers.1"]}, 1e-9)


def test_watches_that_end_out_of_order():
    model = Stack()
    one, two = levelhead.torch.watch(model), levelhead.torch.watch(model)
    with torch.no_grad():
        one.__enter__()
        model(X)
        two.__enter__()
        model(X)
        one.__exit__(None, None, None)
        model(X)
        two.__exit__(None, None, None)
    model(X)
    assert (one.calls, two.calls) == (4, 4)


def test_entering_again():
    model = Stack()
    watch, records = watching(model)
    with watch:
        model(X)
        with pytest.raises(RuntimeError, match="already on"):
            watch.__enter__()
        assert modes() == 1
    model(X)  # not seen
    with watch:
        model(X)
    assert [record.step for record in records] == [0, 1]
    assert watch.calls == 4


def test_entering_again_after_training():
    model = Stack()
    watch, records = watching(model)
    with watch:
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.layers.append(Stack(1).layers[0])  # has a name, too
    with watch, torch.no_grad():
        model(X)  # nothing trains now: this is a step
    assert [record.step for record in records] == [0, 1]
    assert list(records[1].health) == ["layers.0", "layers.1", "layers.2"]


def test_errors_pass_through():
    model = Stack()
    watch, records = watching(model)
    with pytest.raises(KeyError, match="mine"), watch:
        model(X)
        raise KeyError("mine")
    assert modes() == 0 and not model._forward_hooks and not model._forward_pre_hooks
    assert len(records) == 1
    with pytest.raises(RuntimeError, match="mat1 and mat2"), levelhead.torch.watch(model):
        model(randn(2, 13, 5))  # no warning either that nothing was seen
    assert modes() == 0


def test_threads_of_their_own():
    seen, errors = {}, []

    def work(name):
        try:
            model = Stack()
            watch, records = watching(model, every=2)
            with watch, torch.no_grad():
                for _ in range(5):
                    model(X)
            seen[name] = watch.calls, [record.step for record in records]
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        work("here")
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and seen == dict.fromkeys(("a", "b", "here"), (6, [0, 2, 4]))


def test_another_thread_ends_no_step_but_may_hold_the_optimizer():
    model = lively(Stack(), size=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch, records = watching(model, every=2)

    def elsewhere(call):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with watch:
        for _ in range(4):
            elsewhere(torch.no_grad()(lambda: model(X)))
            model(X).sum().backward()
            elsewhere(optimizer.step)
    assert [record.step for record in records] == [0, 2]
    assert watch.calls == 4 and modes() == 0


# ---------------------------------------------------------------- saving and copying inside


def test_models_saved_and_copied_inside_take_nothing_along():
    model = lively(Stack())
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        model(X)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        twin(X)  # is not the model: no step, and no call of it
        assert seen.calls == 2 and seen.left_out == {"other models": 2}
        assert (seen.health["layers.0"].rows == 26).all()
    assert b"levelhead.torch" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(X), model(X))
        assert torch.equal(twin(X), model(X))


def test_tensors_made_inside_are_saved_as_ever():
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    with levelhead.torch.watch(model):
        kept = {"weights": model(X, X, X)[1].detach(), "scaled": X * 0.5, "product": X @ X.mT}
        file = io.BytesIO()
        torch.save(kept, file)
        assert not any(vars(tensor) for tensor in kept.values())
    file.seek(0)
    for name, tensor in torch.load(file, weights_only=True).items():
        assert torch.equal(tensor, kept[name])
