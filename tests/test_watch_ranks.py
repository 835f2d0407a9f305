"""Several processes that watch one model: their health is that of one process on all data."""

import numpy as np
import pytest
import torch
from ranks_support import team
from torch.nn.parallel import DistributedDataParallel
from watch_support import Stack, lively, randn

import levelhead.torch

STEPS = 3


@pytest.fixture(scope="module")
def two():
    with team(2) as started:
        yield started


def found(seen):
    """What a watch knows, to send and compare."""
    return {
        "health": {layer: health.sums for layer, health in seen.health.items()},
        "gradients": {layer: each.sums for layer, each in seen.gradients.items()},
        "findings": [str(finding) for finding in seen.findings()],
        "alerts": [str(alert) for alert in seen.alerts],
        "records": [
            (r.step, r.phase, dict(r.scalars), dict(r.means), dict(r.scales)) for r in seen._history
        ],
    }


def train(model, batches, step=None, **options):
    """Steps of training, the loss logged; what the watch found."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with levelhead.torch.watch(model, **options) as seen:
        for x in batches:
            loss = model(x).square().sum()
            seen.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return found(seen)


def batches():
    return [randn(4, 13, 32, seed=step).double() for step in range(STEPS)]


def model():
    return lively(Stack(), size=0.2).double()


def assert_same(got, wanted, rtol=1e-12):
    for kind in ("health", "gradients"):
        assert list(got[kind]) == list(wanted[kind])
        for layer, sums in wanted[kind].items():
            np.testing.assert_allclose(got[kind][layer], sums, rtol=rtol, err_msg=layer)


# ---------------------------------------------------------------- data parallel


def halves(rank):
    ddp = DistributedDataParallel(model())
    return train(ddp, [x.chunk(2)[rank] for x in batches()])


def test_two_ranks_are_one_process_on_the_whole_batch(two):
    first, second = two(halves)
    whole = train(model(), batches())
    assert_same(first, whole, rtol=1e-12)
    assert first["health"].keys() == second["health"].keys()
    for kind in ("health", "gradients"):
        for layer, sums in first[kind].items():
            assert sums.tobytes() == second[kind][layer].tobytes()
    assert first["findings"] == second["findings"] == whole["findings"]
    assert first["records"] == second["records"]
