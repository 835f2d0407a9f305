"""Four processes: two of them share the data, two the heads."""

import pytest
import torch.distributed as dist
from ranks_support import team
from test_watch_ranks import Sharded, assert_equal, assert_merged, batches, train
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture(scope="module")
def four():
    with team(4) as started:
        yield started


def mesh(rank, given):
    """Data by the first digit of a rank, heads by the second."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    data, shard = divmod(rank, 2)
    watched = Sharded(4 * shard, 4 * shard + 4)
    group = grid["data"].get_group() if given else None
    own = [x.chunk(2)[data] for x in batches()]
    return train(watched, own, group=group, head_group=grid["heads"].get_group())


@pytest.mark.parametrize("given", [True, False], ids=["given", "default"])
def test_data_and_heads(four, given):
    first, *others = four(mesh, given)
    for other in others:
        assert_equal(first, other)
    assert_merged(first, train(Sharded(0, 8), batches()))


def pairs(rank):
    """Two trainings side by side, each of two ranks; twice, for a group may come again."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data = [x.chunk(2)[rank % 2] * (1 + rank // 2) for x in batches()]
    return [train(Sharded(0, 8), data, group=groups[rank // 2]) for _ in range(2)]


def test_groups_of_ones_own(four):
    found = four(pairs)
    for place, rank in enumerate((0, 2)):
        for first, second in zip(found[rank], found[rank + 1], strict=True):
            assert_equal(first, second)
            assert_merged(first, train(Sharded(0, 8), [x * (1 + place) for x in batches()]))
