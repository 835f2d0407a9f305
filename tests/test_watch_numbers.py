"""The numbers of steps: from where they count, and what a store is told of the run."""

import pytest
import torch
from watch_support import Stack, randn, watching

import levelhead.torch
from levelhead.store import list_runs, read_run

X = randn(2, 13, 32)


def train(watch, model, many):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch:
        for _ in range(many):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_steps_count_from_where_a_checkpoint_goes_on():
    model = Stack()
    watch, records = watching(model, every=5, start_step=12)
    train(watch, model, 10)
    assert [record.step for record in records] == [15, 20]


def test_a_step_by_hand_may_have_any_number():
    model = Stack()
    watch, records = watching(model, every=4)
    with watch:
        for following in (2, 4, 6, 8):
            model(X).square().mean().backward()
            watch.step(following)
    assert [record.step for record in records] == [0, 4]


def test_the_run_of_a_watch_goes_on(tmp_path):
    path, model = tmp_path / "run.db", Stack()
    run = {"name": "mine", "meta": {"data": "noise"}, "arguments": {"lr": 0.1}}
    train(levelhead.torch.watch(model, store=path, run=run), model, 3)
    train(levelhead.torch.watch(model, store=path, run=run, start_step=2), model, 2)
    found = read_run(path)
    assert (len(list_runs(path)), found.name, found.steps) == (1, "mine", [0, 1, 2, 3])
    assert found.meta == run["meta"]
    assert found.arguments == {"every": 1, "gradients": True, "lr": 0.1}


def test_a_watch_that_is_opened_again_loses_nothing(tmp_path):
    path, model = tmp_path / "run.db", Stack()
    watch = levelhead.torch.watch(model, store=path, start_step=5)
    train(watch, model, 2)
    train(watch, model, 2)
    assert (len(list_runs(path)), read_run(path).steps) == (1, [5, 6, 7, 8])


@pytest.mark.parametrize(
    "options, said",
    [
        ({"start_step": -1}, "start_step: expected a step, 0 or more, got -1"),
        ({"start_step": 1.5}, "start_step: expected a step, 0 or more, got 1.5"),
        ({"run": {"nam": "x"}}, "run: expected name, meta and arguments, got nam"),
    ],
)
def test_bad_numbers_and_runs(options, said):
    with pytest.raises(ValueError, match=said):
        levelhead.torch.watch(Stack(), **options)
