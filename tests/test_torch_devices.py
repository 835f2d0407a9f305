"""Health on a device that computes later: nothing waits for it but one copy per recorded step.

There is no such device here. Fake tensors say that they are on one, and refuse to show numbers;
for the rest, CPU tensors are sent down the road of other devices, and reading them is counted.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import OPTION_NAMES, options
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_support import in_torch, tensors
from watch_support import Stack, lively, randn

import levelhead as lh
import levelhead.torch
from levelhead.torch import _tiled_health
from levelhead.torch._attention import normalise
from levelhead.torch._row_statistics import matrix_health
from levelhead.torch.watching import _intercept
from levelhead.torch.watching._scalars import Scalars
from levelhead.torch.watching._transfers import Transfers

READING = ("item", "cpu", "tolist", "__float__", "__int__", "__bool__")


@pytest.fixture
def fake():
    """Whatever is made inside has a shape and a device, and no numbers."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        yield lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda")


@pytest.mark.parametrize("name", ["plain", *OPTION_NAMES])
@pytest.mark.parametrize("tile", [150, 1 << 22], ids=["tiles", "one tile"])
def test_every_option_on_a_device_without_numbers(name, tile, fake, monkeypatch):
    monkeypatch.setattr(_tiled_health, "TILE", tile)
    opts = {} if name == "plain" else in_torch(options(2, 4, 13, 11)[name])
    opts = {key: fake(x) if torch.is_tensor(x) else x for key, x in opts.items()}
    given = normalise(*(fake(x) for x in tensors(2, length=13, size=11)), **opts)
    sums = _tiled_health.tiled_health(given)
    assert sums.device.type == "cuda" and sums.shape == (2, 4, len(lh.Health.COLUMNS))
    gradients = _tiled_health.tiled_gradients(given, fake(torch.ones(2, 4, 13, 8)))
    assert gradients.device.type == "cuda" and gradients.dtype is torch.float64


def test_matrices_on_a_device_without_numbers(fake):
    scores = fake(torch.ones(2, 3, 20, 20))
    sums = matrix_health(scores, scores, fake(torch.ones(2, 3, 20, 20, dtype=torch.bool)), None)
    assert sums.device.type == "cuda"


def test_long_rows_are_sampled_alike_with_and_without_indices(monkeypatch):
    given = normalise(*tensors(2, length=40, size=40), causal=True)
    expected = _tiled_health.tiled_health(given)
    sampled = _tiled_health._sample(given)
    assert len(sampled.rows) == 33
    x = randn(2, 4, 40, 5)
    stacked = torch.stack([x.select(-2, row) for row in sampled.rows.tolist()], -2)
    assert torch.equal(sampled.of(x, -2), stacked)
    assert torch.isfinite(expected).all()


# ---------------------------------------------------------------- how often it is waited for


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(_intercept, "is_elsewhere", lambda tensor: True)
    monkeypatch.setattr(_intercept, "compute", _tiled_health.attention)


@pytest.fixture
def reads(monkeypatch):
    """How often numbers of tensors were read, by method."""
    counts = Counter()

    def counting(name, method):
        def read(self, *given, **named):
            counts[name] += 1
            return method(self, *given, **named)

        return read

    for name in READING:
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    return counts


class ByHand(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT / 3).softmax(-1) @ v


class Scaled(nn.Module):
    """A scale per head, from a tensor."""

    def forward(self, q, k, v):
        return levelhead.torch.attention(q, k, v, scale=torch.full((4,), 0.3))


class Mixed(nn.Module):
    """Attention of three kinds, several layers of each."""

    def __init__(self):
        super().__init__()
        self.stack = Stack(layers=4)
        self.others = nn.ModuleList([ByHand(), Scaled(), ByHand(), Scaled()])

    def forward(self, x):
        y = self.stack(x).unflatten(-1, (4, 8)).transpose(1, 2)
        for other in self.others:
            y = y + other(y, y, y)
        return y


@pytest.mark.parametrize("every", [1, 3])
def test_one_copy_per_recorded_step(every, elsewhere, reads):
    model, x = lively(Mixed(), size=0.2), randn(2, 16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    records = []
    with levelhead.torch.watch(model, every=every, sinks=[records.append]):
        reads.clear()
        for _ in range(6):
            step()
        counted = Counter(reads)
    assert len(records) == 6 // every and len(records[0].health) == 8
    assert len(records[0].gradients) == 8
    assert records[0].scales["others.1"].scale == pytest.approx(0.3)
    assert dict(counted) == {"cpu": len(records)}


def test_a_transfer_keeps_shapes_and_order():
    transfers, found = Transfers(), []
    given = [randn(2, 3).double(), torch.tensor(7), torch.zeros(0, 4), randn(5)]
    for tensor in given:
        transfers.add(tensor, found.append)
    assert transfers and not found
    transfers.fetch()
    assert not transfers and [x.shape for x in found] == [(2, 3), (), (0, 4), (5,)]
    for got, tensor in zip(found, given, strict=True):
        np.testing.assert_array_equal(got, tensor.numpy())


def test_what_was_logged_comes_with_the_rest(fake):
    scalars, sent = Scalars(), []
    for _ in range(2):
        scalars.log({"loss": torch.ones((), device="cuda"), "lr": 0.1})
        scalars.end_step(recorded=False)
        scalars.begin_step()
    scalars.log({"loss": torch.ones((), device="cuda")})
    stub = SimpleNamespace(add=lambda tensor, use: sent.append(use))
    scalars.send(stub)
    assert len(sent) == 2  # the last one, and the sum of those before with how many they are
    for use, values in zip(sent, (5.0, [4.0, 2.0]), strict=True):
        use(np.array(values))
    assert scalars.numbers() == {"loss": 5} and scalars.means() == {"loss": 3, "lr": 0.1}


def test_calls_outside_of_a_watch_are_read_when_asked(elsewhere, reads):
    q = randn(2, 4, 12, 8)
    calls = []
    with levelhead.torch.listen(calls.append):
        F.scaled_dot_product_attention(q, q, q)
    assert not reads
    assert calls[0].health.shape == (2, 4) and reads["cpu"] == 1
