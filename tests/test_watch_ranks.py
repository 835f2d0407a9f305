"""Several processes that watch one model: their health is that of one process on all data."""

import contextlib
import math
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks_support import team
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from watch_support import Stack, lively, randn

import levelhead as lh
import levelhead.torch
from levelhead.store import read_run
from levelhead.torch.watching._attribution import ModuleNames
from levelhead.torch.watching._reduction import nothing, reduce_sums

SHORT = 3.0  # seconds of waiting for a rank that does not come


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


def train(model, batches, accumulate=1, optimizer=None, **options):
    """A step per batch, the loss logged; what the watch found.

    The learning rate is 0, so that the tensors are the same however the loss is averaged.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    with levelhead.torch.watch(model, **options) as seen:
        for x in batches:
            for part in x.chunk(accumulate):
                loss = model(part).square().sum()
                loss.backward()
            seen.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return found(seen)


def batches(steps=2):
    return [randn(4, 13, 32, seed=step).double() for step in range(steps)]


def own(rank, steps=2):
    """The half of each batch that is a rank's."""
    return [x.chunk(2)[rank] for x in batches(steps)]


def model():
    return lively(Stack(), size=0.2).double()


def assert_equal(first, second):
    """The same on two ranks, bit for bit."""
    for kind in ("health", "gradients"):
        assert list(first[kind]) == list(second[kind])
        for layer, sums in first[kind].items():
            assert sums.tobytes() == second[kind][layer].tobytes()
    for what in ("findings", "alerts", "records"):
        assert repr(first[what]) == repr(second[what])  # NaN is not equal to itself


def assert_merged(got, wanted, rtol=1e-12):
    for kind in ("health", "gradients"):
        assert list(got[kind]) == list(wanted[kind])
        for layer, sums in wanted[kind].items():
            np.testing.assert_allclose(got[kind][layer], sums, rtol=rtol, atol=1e-300)


# ---------------------------------------------------------------- the sums


class Threads:
    """Ranks that are threads: what one gives to a reduction, all get reduced."""

    def __init__(self, size):
        self._barrier, self._given = threading.Barrier(size), {}

    def reduce(self, rank, how):
        def reduce(flat):
            self._given[rank] = flat
            self._barrier.wait()
            found = how([self._given[other] for other in sorted(self._given)], axis=0)
            self._barrier.wait()
            return found

        return reduce


@pytest.mark.parametrize("kind", [lh.Health, lh.GradHealth])
def test_reductions_are_the_merge_of_the_table(kind):
    generator = np.random.default_rng(0)
    parts = [kind(1 + generator.random((5, len(kind.COLUMNS)))) for _ in range(3)]
    parts.append(kind(nothing(kind, 5)))
    ranks = Threads(len(parts))

    def merged(rank):
        return reduce_sums(
            *([(kind, parts[rank].sums)], np.ones(2), np.array([float(rank)])),
            *(ranks.reduce(rank, how) for how in (np.sum, np.max)),
        )

    with ThreadPoolExecutor(len(parts)) as pool:
        for found in pool.map(merged, range(len(parts))):
            want = parts[0].merge(*parts[1:]).sums
            np.testing.assert_allclose(found.sums[0], want, rtol=1e-14)
            assert found.added.tolist() == [4, 4] and found.highest.tolist() == [3]


# ---------------------------------------------------------------- data parallel


def halves(rank, wrap, accumulate):
    return train(WRAPS[wrap](), own(rank), accumulate)


def fsdp1():
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2():
    sharded = model()
    for layer in sharded.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))


WRAPS = {
    "DDP": lambda: DistributedDataParallel(model()),
    "static graph": lambda: DistributedDataParallel(model(), static_graph=True),
    "compiled": lambda: DistributedDataParallel(torch.compile(model(), backend="eager")),
    "not wrapped": model,
    "FSDP": fsdp1,
    "fully_shard": fsdp2,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_two_ranks_are_one_process_on_the_whole_batch(two, wrap):
    first, second = two(halves, wrap, 1)
    whole = train(model(), batches())
    assert_equal(first, second)
    assert_merged(first, whole)
    assert first["findings"] == whole["findings"] and list(first["health"]) == LAYERS
    losses = [record[2]["loss"] for record in first["records"]]
    expected = [record[2]["loss"] / 2 for record in whole["records"]]  # a mean of two sums
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


LAYERS = ["layers.0", "layers.1"]


def test_accumulated_batches_are_one_step(two):
    first, second = two(halves, "DDP", 2)
    assert_equal(first, second)
    assert len(first["records"]) == 2
    assert_merged(first, train(model(), batches()))


def scaled(rank):
    """A scaler that skips the second of three steps."""
    scaler, ddp = torch.amp.GradScaler("cpu", init_scale=4.0), DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    with levelhead.torch.watch(ddp) as seen:
        for step, x in enumerate(own(rank, 3)):
            loss = ddp(x).sum() * (math.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [record.step for record in seen._history], found(seen)


def test_a_scaler_that_skips_a_step(two):
    (steps, first), (_, second) = two(scaled)
    assert steps == [0, 1]  # the skipped step is part of the next one
    assert_equal(first, second)


def logged(rank):
    """A loss of one rank alone, another of both, one that is NaN here; a late one."""
    watched, records = model(), []
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    with levelhead.torch.watch(watched, sinks=[records.append]) as seen:
        for x in own(rank):
            watched(x).sum().backward()
            seen.log(both=torch.tensor(float(rank)), **({"loss": 2.0} if rank else {}))
            seen.log(bad=math.nan if rank else 1.0)
            optimizer.step()
            seen.log(late=rank)
    return [dict(r.scalars) for r in seen._history], len(records)


def test_scalars_are_means_over_the_ranks_that_have_them(two):
    (first, wrote), (second, silent) = two(logged)
    assert (wrote, silent) == (2, 0)
    for scalars, late in ((first, 0), (second, 1)):
        for each in scalars:
            assert each.pop("late") == late  # after the step: each rank's own
            assert math.isnan(each.pop("bad"))
            assert each == {"both": 0.5, "loss": 2.0}


class Either(nn.Module):
    """Another layer on each rank, and on both one that they share."""

    def __init__(self, rank):
        super().__init__()
        self.parts = nn.ModuleList(lively(Stack(layers=1), seed=seed) for seed in range(3))
        self.rank = rank

    def forward(self, x):
        return self.parts[2](self.parts[self.rank](x))


def branches(rank):
    watched = Either(rank).double()
    first = train(watched, own(rank, 1))
    watched.rank = 0  # and what rank 1 has never seen before
    return first, train(watched, own(rank, 1))


def test_layers_that_only_some_ranks_see(two):
    (first, same), (second, other) = two(branches)
    assert_equal(first, second)
    assert_equal(same, other)
    assert list(first["health"]) == [f"parts.{place}.layers.0" for place in (0, 2, 1)]
    rows = {layer: sums[0, 0] for layer, sums in first["health"].items()}
    assert list(rows.values()) == [26, 52, 26]


# ---------------------------------------------------------------- who writes


def stored(rank, path, shared):
    alerts, records = [], []
    options = {"on_alert": alerts.append, "sinks": [records.append]}
    watched = lively(Stack(), size=1.5).double()  # ill from the start
    path = f"{path}/run.db" if shared else f"{path}/{rank}.db"
    seen = train(watched, own(rank), store=path, thresholds={"exploding": 1.0}, **options)
    return len(alerts), len(records), len(seen["alerts"])


@pytest.mark.parametrize("shared", [True, False], ids=["one path", "two paths"])
def test_the_first_rank_writes_and_calls(two, shared, tmp_path):
    (alerts, records, known), second = two(stored, str(tmp_path), shared)
    assert alerts and records == 2 and second == (0, 0, known)
    names = ["run.db"] if shared else ["0.db"]
    assert sorted(path.name for path in tmp_path.glob("*.db")) == names
    run = read_run(tmp_path / names[0])
    assert [health.rows.tolist() for _, health in run.health("layers.0")] == [[52] * 4] * 2


def unwritable(rank, path):
    with pytest.raises(Exception) as caught, levelhead.torch.watch(model(), store=path):
        pass
    return type(caught.value).__name__, str(caught.value)


def test_a_store_that_cannot_be_opened_stops_every_rank(two, tmp_path):
    path = tmp_path / "folder.db"
    path.mkdir()
    (kind, why), (other, told) = two(unwritable, str(path))
    assert kind == "StoreError" and other == "ValueError"
    assert told == f"levelhead.torch.watch: the rank that writes cannot: {why}"


# ---------------------------------------------------------------- inference


def inferred(rank):
    watched = model()
    with torch.no_grad(), levelhead.torch.watch(watched) as seen:
        for x in own(rank, 3)[rank:]:  # three calls here, two there
            watched(x)
        alone = found(seen)
        seen.merge()
        merged = found(seen)
        watched(own(rank, 1)[0])
        seen.merge()
    return alone, merged, found(seen)


def test_inference_is_merged_when_asked(two):
    (alone, first, then), (_, second, last) = two(inferred)
    assert first["health"].keys() == second["health"].keys()
    for got, other in ((first, second), (then, last)):
        assert got["findings"] == other["findings"]
        for layer, sums in got["health"].items():
            assert sums.tobytes() == other["health"][layer].tobytes()
    rows = [sums["health"]["layers.0"][0, 0] for sums in (alone, first, then)]
    assert rows == [3 * 26, 5 * 26, 7 * 26]


def test_to_merge_in_a_single_process_does_nothing():
    watched = model()
    with torch.no_grad(), levelhead.torch.watch(watched) as seen:
        watched(batches(1)[0])
        seen.merge()
    assert seen.health["layers.0"].rows[0] == 52


# ---------------------------------------------------------------- ranks that do not come


@contextlib.contextmanager
def told():
    """The warnings of ours meanwhile, and how long it took."""
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.monotonic()
        yield said
        said.append(time.monotonic() - start)
    said[:-1] = [str(each.message) for each in caught if "levelhead" in str(each.message)]


def uneven(rank):
    with told() as said:
        seen = train(model(), own(rank, 4)[: 4 - 2 * rank], timeout=60.0)
    return said, seen


def test_a_rank_with_fewer_steps(two):
    ((said, *_, seconds), first), ((*quiet, _), _) = two(uneven)
    assert "rank 0 could not merge step 2 with the other ranks" in said
    assert "watches alone" in said and "group=False" in said
    assert seconds < 30 and not quiet  # the other one has left, which is noticed at once
    assert first["health"]["layers.0"][0, 0] == 2 * 52 + 2 * 26
    assert [record[0] for record in first["records"]] == [0, 1, 2, 3]


def raising(rank):
    with told() as said, contextlib.suppress(ZeroDivisionError):
        watched = model()
        optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
        with levelhead.torch.watch(watched, timeout=60.0) as seen:
            for step, x in enumerate(own(rank, 3)):
                watched(x).sum().backward()
                if rank == 1 and step == 1:
                    raise ZeroDivisionError
                optimizer.step()
    return said, found(seen)


def test_an_exception_on_one_rank(two):
    ((said, *_, seconds), first), ((*quiet, _), second) = two(raising)
    assert "could not merge step 1" in said and seconds < 30 and not quiet
    assert [len(each["records"]) for each in (first, second)] == [3, 1]


def late(rank):
    """Rank 1 does something else for a while, amid its second step."""
    with told() as said:
        watched = model()
        optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
        with levelhead.torch.watch(watched, timeout=SHORT) as seen:
            for step, x in enumerate(own(rank, 3)):
                watched(x).sum().backward()
                if rank == 1 and step == 1:
                    time.sleep(3 * SHORT)
                optimizer.step()
    return said, found(seen)


def test_nobody_waits_longer_than_the_timeout(two):
    ((said, *more, _), first), ((other, *others, _), second) = two(late)
    assert "rank 0 could not merge step 1" in said and "rank 1 could not merge step 1" in other
    assert not more and not others  # told once
    assert [len(each["records"]) for each in (first, second)] == [3, 3]


def evaluating(rank):
    """Rank 0 evaluates, before training and in it; the other does not."""
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    with told() as said, levelhead.torch.watch(watched) as seen:
        for x in own(rank, 3):
            if rank == 0:
                with torch.no_grad():
                    watched(x)
            watched(x).square().sum().backward()
            optimizer.step()
    return said, found(seen), seen.left_out, list(seen.before_training.health)


def test_evaluation_on_one_rank_alone(two):
    ((*said, _), first, left_out, before), ((*quiet, _), second, none, nothing) = two(evaluating)
    assert not said and not quiet and left_out == {"evaluation": 4} and not none
    assert before == LAYERS and not nothing
    assert_equal(first, second)
    assert_merged(first, train(model(), batches(3)))


def unended(rank):
    """A last forward without an optimizer's step, on one rank alone."""
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.0)
    with levelhead.torch.watch(watched) as seen:
        for x in own(rank, 2):
            watched(x).sum().backward()
            optimizer.step()
        if rank:
            watched(own(rank, 1)[0])
    return found(seen), seen.left_out


def test_a_step_that_does_not_end_is_left_out(two):
    (first, none), (second, left_out) = two(unended)
    assert_equal(first, second)
    assert not none and left_out == {"unended step": 2}


def one_opens(rank):
    if rank == 0:
        with pytest.raises(RuntimeError, match="Open the watch on every rank"):
            levelhead.torch.watch(model(), timeout=SHORT).__enter__()


def disagree(rank):
    with pytest.raises(ValueError, match=r"every: expected the same on all ranks, got \[1, 2\]"):
        levelhead.torch.watch(model(), every=1 + rank).__enter__()
    with levelhead.torch.watch(model(), timeout=SHORT) as seen:
        if rank == 0:
            with pytest.raises(RuntimeError, match="could not merge step 0"):
                seen.merge()
            with pytest.raises(RuntimeError, match="no longer merge"):
                seen.merge()
        else:
            time.sleep(2 * SHORT)


def test_ranks_that_do_not_mean_the_same(two):
    two(disagree)


def alone(rank):
    return train(model(), own(rank), group=False)


def test_a_rank_alone(two):
    for rank, got in enumerate(two(alone)):
        assert_merged(got, train(model(), own(rank)))


# ---------------------------------------------------------------- groups


class Shard(nn.Module):
    """Some of the eight heads of a layer."""

    def __init__(self, qkv, first, last):
        super().__init__()
        self.qkv = nn.Parameter(qkv[:, first:last].clone())

    def forward(self, x):
        q, k, v = torch.einsum("bld,cdhe->cbhle", x, self.qkv.movedim(1, 2)).unbind()
        return F.scaled_dot_product_attention(q, k, v)


class Sharded(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.attn = Shard(randn(3, 8, 32, 8).double() * 0.3, first, last)

    def forward(self, x):
        return self.attn(x)  # no head's gradient depends on another head


def heads(rank, cut, group):
    places = (0, cut, 8)
    world = dist.group.WORLD
    watched = Sharded(*places[rank : rank + 2])
    return train(watched, batches(), group=group, head_group=world)


@pytest.mark.parametrize("group", [None, False], ids=["default", "alone"])
@pytest.mark.parametrize("cut", [4, 2], ids=["even", "uneven"])
def test_heads_of_several_ranks_stand_one_after_the_other(two, cut, group):
    first, second = two(heads, cut, group)
    assert_equal(first, second)
    assert first["health"]["attn"].shape[0] == 8
    whole = train(Sharded(0, 8), batches())
    assert_merged(first, whole)
    assert first["records"][0][4] == whole["records"][0][4]  # the scale, and the model's width


def heads_lost(rank):
    """The other rank leaves; the numbers of the heads stay."""
    watched, world = Sharded(4 * rank, 4 * rank + 4), dist.group.WORLD
    with warnings.catch_warnings(action="ignore"):
        return train(watched, batches(3)[: 3 - rank], head_group=world)


def test_heads_keep_their_numbers_when_a_rank_is_lost(two):
    first, _ = two(heads_lost)
    rows = first["health"]["attn"][:, 0].tolist()
    assert rows == [3 * 52] * 4 + [2 * 52] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group": True}, "group: expected a process group, None or False, got bool"),
        ({"group": "gloo"}, "group: expected a process group, None or False, got str"),
        ({"head_group": False}, "head_group: expected a process group, got bool"),
    ],
)
def test_what_is_no_group(given, message):
    with pytest.raises(TypeError, match=message):
        levelhead.torch.watch(model(), **given)


def test_a_timeout_of_nothing():
    with pytest.raises(ValueError, match="timeout: expected seconds, more than 0, got 0"):
        levelhead.torch.watch(model(), timeout=0)


def not_a_member(rank):
    group = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="group: rank 1 is not in it"):
            levelhead.torch.watch(model(), group=group).__enter__()
    else:
        return train(model(), own(0), group=group)


def no_gloo(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_gloo_available", lambda: False)
        return train(model(), own(rank))


def test_without_gloo_the_training_s_own_group_serves(two):
    first, second = two(no_gloo)
    assert_equal(first, second)
    assert_merged(first, train(model(), batches()))


def test_a_group_without_this_rank(two):
    first, _ = two(not_a_member)
    assert_merged(first, train(model(), own(0)))


def context_parallel(rank):
    from torch.distributed.tensor.experimental import context_parallel

    class Attend(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    x, watched = randn(1, 4, 16, 8), Attend()
    mesh = init_device_mesh("cpu", (2,))
    with (
        warnings.catch_warnings(action="ignore"),
        levelhead.torch.watch(watched) as seen,
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]),
    ):
        watched(x)
    return dict(seen.not_understood), list(seen.health)


def test_context_parallel_is_told_as_not_understood(two):
    for not_understood, health in two(context_parallel):
        assert not_understood == {"": 1} and not health


def test_one_rank_that_opens_the_watch_alone_is_told(two):
    two(one_opens)


# ---------------------------------------------------------------- names


class Named(nn.Module):
    """A part that is called `module`, as wrappers call theirs, and is none."""

    def __init__(self):
        super().__init__()
        self.module, self.other = nn.Linear(1, 1), nn.Linear(1, 1)


def names(model):
    return list(ModuleNames(model).values())


def test_names_are_those_of_the_model_as_written():
    plain = names(Stack())
    wrapped = Stack()
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped.layers[1] = torch.compile(wrapped.layers[1], backend="eager")
    assert (
        list(dict.fromkeys(names(nn.DataParallel(torch.compile(wrapped, backend="eager")))))
        == plain
    )
    assert names(Named()) == ["", "module", "other"]
    assert names(nn.DataParallel(Named())) == ["", "", "module", "other"]
