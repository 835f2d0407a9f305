"""A process group of the watch's own, so that nothing it sends can meet what the training sends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..._health.statistics import Floats

_opened: Counter[str] = Counter()  # groups of the same ranks, one after the other


class Group:
    """Ranks that reduce float64 arrays, on the CPU by Gloo, and never wait longer than a timeout.

    It is made of the default group's store alone: `new_group` would want every rank of the job, or
    give the name of a group that is gone to the next one of the same ranks. Dropping it closes its
    connections, which the others notice at once.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, purpose: str = "merge") -> None:
        place = "levelhead/{}/{}".format(purpose, "-".join(map(str, ranks)))
        number, _opened[place] = _opened[place], _opened[place] + 1
        whole = distributed_c10d._get_default_store()
        store = distributed_c10d.PrefixStore(f"{place}/{number}", whole)
        wait = timedelta(seconds=timeout)
        self._group: Any = dist.ProcessGroupGloo(
            store, ranks.index(dist.get_rank()), len(ranks), wait
        )
        self._size = len(ranks)

    def total(self, array: Floats) -> Floats:
        return self._reduce(array, dist.ReduceOp.SUM)

    def largest(self, array: Floats) -> Floats:
        return self._reduce(array, dist.ReduceOp.MAX)

    def exchange(self, thing: Any) -> list[Any]:
        """What each rank gives, in the order of the ranks; anything that JSON can hold."""
        text = json.dumps(thing).encode()
        size = int(self.largest(np.array([float(len(text))]))[0])
        mine = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        texts = [torch.empty_like(mine) for _ in range(self._size)]
        self._gather(texts, mine)
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def _reduce(self, array: Floats, how: Any) -> Floats:
        tensor = torch.from_numpy(array.copy())
        self._group.allreduce(tensor, how).wait()
        return tensor.numpy()

    def _gather(self, parts: list[Tensor], mine: Tensor) -> None:
        self._group.allgather(parts, mine).wait()


class BorrowedGroup(Group):
    """The same over a group of the training itself, where Gloo is not there; its timeout holds."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._borrowed, self._size = group, dist.get_world_size(group)
        self._device = distributed_c10d._get_pg_default_device(group)

    def _reduce(self, array: Floats, how: Any) -> Floats:
        tensor = torch.from_numpy(array.copy()).to(self._device)
        dist.all_reduce(tensor, how, self._borrowed)
        return tensor.cpu().numpy()

    def _gather(self, parts: list[Tensor], mine: Tensor) -> None:
        there = [part.to(self._device) for part in parts]
        dist.all_gather(there, mine.to(self._device), self._borrowed)
        for part, found in zip(parts, there, strict=True):
            part.copy_(found)
