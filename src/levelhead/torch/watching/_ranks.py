"""Several processes that watch one model: who takes part, and how their steps become one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from ..._health.statistics import Floats
from ..._records import StepRecord
from ._group import BorrowedGroup, Group
from ._shared import Entry, Layout, entries

_ALONE = "pass group=False to watch this rank alone"


class Ranks:
    """The ranks that merge what they see, this one among them.

    several:  whether there are others; as long as the watch is on, even if they no longer answer
    count:    how many they are
    is_first: whether this rank writes, logs and calls for all of them

    group, head_group: as given to `watch`
    timeout: the most seconds to wait for the others
    """

    def __init__(self, group: Any, head_group: Any, timeout: float) -> None:
        for name, given in (("group", group), ("head_group", head_group)):
            allowed = given is None or (name == "group" and given is False)
            if not allowed and not (dist.is_available() and _is_group(given)):
                hint = "; of a DeviceMesh pass mesh.get_group()" if hasattr(given, "mesh") else ""
                wanted = "a process group, None or False" if name == "group" else "a process group"
                raise TypeError(f"{name}: expected {wanted}, got {type(given).__name__}{hint}")
        if not timeout > 0:
            raise ValueError(f"timeout: expected seconds, more than 0, got {timeout!r}")
        self._given, self._timeout = (group, head_group), timeout
        self.several, self.count, self.is_first = False, 1, True
        self._group: Group | None = None

    # ------------------------------------------------------------ from beginning to end

    def open(self) -> None:
        """Find the others, which must do the same now."""
        self.several, self.count, self.is_first = False, 1, True
        if not (dist.is_available() and dist.is_initialized()):
            return
        head_group = self._given[1]
        self._shard, self._shards = 0, 1
        if head_group is not None:
            _ranks_of("head_group", head_group)
            self._shard, self._shards = dist.get_rank(head_group), dist.get_world_size(head_group)
        try:
            ranks = self._ranks()
            if len(ranks) < 2:
                return
            self._group = self._connect(ranks)
        except RuntimeError as error:
            raise RuntimeError(
                f"levelhead.torch.watch: the ranks did not find each other ({_first_line(error)}). "
                f"Open the watch on every rank at the same place, or {_ALONE}."
            ) from error
        self.several, self.count = True, len(ranks)
        self.is_first = dist.get_rank() == min(ranks)
        self._rank = dist.get_rank()
        self._entries: dict[Entry, None] = {}  # of this rank, that the others know of
        self._know([])

    def _ranks(self) -> list[int]:
        """All that take part, by their number in the default group."""
        group, head_group = self._given
        if group is None:
            return list(range(dist.get_world_size()))
        ranks = [dist.get_rank()] if group is False else _ranks_of("group", group)
        if head_group is None:
            return ranks
        heads = _ranks_of("head_group", head_group)
        if len(heads) < 2 or group is False:
            return sorted({*ranks, *heads})
        found = Group(heads, self._timeout, "heads").exchange(ranks)
        return sorted({rank for some in found for rank in some})

    def _connect(self, ranks: list[int]) -> Group:
        if dist.is_gloo_available():
            return Group(ranks, self._timeout)
        group, head_group = self._given
        if group is None or head_group is None:
            return BorrowedGroup(group)
        if group is False:
            return BorrowedGroup(head_group)
        raise RuntimeError("PyTorch has no Gloo here, which group and head_group together need")

    def agree(self, every: int, error: Exception | None) -> None:
        """Go on only if all ranks can, and mean the same.

        error: why this rank cannot
        """
        if self._group is None:
            if error is not None:
                raise error
            return
        mine = [every, self._shards, None if error is None else str(error)]
        try:
            everyone = self._group.exchange(mine)
        except RuntimeError:
            self.close()
            raise error or RuntimeError(
                f"levelhead.torch.watch: a rank left while the watch was opened; {_ALONE}."
            ) from None
        problem = _disagreement(everyone)
        if problem:
            self.close()
            raise error or ValueError(f"levelhead.torch.watch: {problem}")

    def close(self) -> None:
        """Leave; whoever waits for this rank hears of it at once."""
        self._group = None

    # ------------------------------------------------------------ merging

    def merge(self, record: StepRecord, asked: bool = False) -> StepRecord:
        """The record of all ranks at this step, from that of this one. All ranks call it.

        If they do not, this rank goes on alone: training must not stop for a watch. It stops only
        for who has asked for a merge.

        asked: not for the end of a step, but by `watch.merge()`: then steps may differ
        """
        if self._group is not None:
            try:
                return self._merge(record, self._group, asked)
            except RuntimeError as error:
                self.close()
                message = self._lost(record.step, error)
                if asked:
                    raise RuntimeError(message) from error
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        elif asked:
            raise RuntimeError(
                "watch.merge: the ranks no longer merge. Call it on every rank, inside the `with` "
                "block."
            )
        if self._has_new(record):  # heads keep the numbers that they have
            self._know([*self._known, (self._shard, [*self._entries])])
        return self._layout.reduce(record, _as_it_is, _as_it_is)

    def _merge(self, record: StepRecord, group: Group, asked: bool) -> StepRecord:
        header = [self._has_new(record), record.step, -record.step, asked, -asked]
        new, latest, earliest, *asks = group.largest(np.array(header, np.float64)).tolist()
        if sum(asks):
            raise RuntimeError("some ranks call watch.merge() while others end a step")
        if latest != -earliest and not asked:
            raise RuntimeError(f"they are at different steps, {-earliest:.0f} and {latest:.0f}")
        if new:  # rarely: each rank says what it has seen so far
            ranks = group.exchange([self._shard, [*self._entries]])
            self._know([(shard, [Entry(*entry) for entry in found]) for shard, found in ranks])
        merged = self._layout.reduce(record, group.total, group.largest)
        return replace(merged, step=int(latest))

    def _has_new(self, record: StepRecord) -> bool:
        before = len(self._entries)
        self._entries.update(dict.fromkeys(entries(record)))
        return len(self._entries) > before

    def _know(self, ranks: list[tuple[int, list[Entry]]]) -> None:
        self._known = ranks
        self._layout = Layout(self._shard, self._shards, ranks)

    def _lost(self, step: int, error: RuntimeError) -> str:
        return (
            f"levelhead.torch.watch: rank {self._rank} could not merge step {step} with the other "
            f"ranks ({_first_line(error)}); from here on it watches alone. Every rank must end the "
            f"same steps, or {_ALONE}."
        )


def _as_it_is(array: Floats) -> Floats:
    return array


def _is_group(given: Any) -> bool:
    return isinstance(given, dist.ProcessGroup) or given is dist.GroupMember.NON_GROUP_MEMBER


def _ranks_of(name: str, group: Any) -> list[int]:
    """The ranks of a group, by their number in the default group."""
    rank = dist.get_rank()
    if group is dist.GroupMember.NON_GROUP_MEMBER or rank not in (
        ranks := dist.get_process_group_ranks(group)
    ):
        raise ValueError(f"{name}: rank {rank} is not in it; {_ALONE}")
    return sorted(ranks)


def _disagreement(everyone: list[list[Any]]) -> str | None:
    """What keeps the ranks from watching together, in words."""
    errors = [error for *_, error in everyone if error is not None]
    every, shards = ({each[at] for each in everyone} for at in (0, 1))
    if errors:
        return f"the rank that writes cannot: {errors[0]}"
    if len(every) > 1:
        return f"every: expected the same on all ranks, got {sorted(every)}"
    if len(shards) > 1:
        return f"head_group: expected the same size on all ranks, got {sorted(shards)}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
