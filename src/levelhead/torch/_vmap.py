"""How torch.func.vmap maps the operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def mapped(op: Any, names: Iterable[str]) -> Any:
    """A rule for vmap: the mapped dimension becomes one more batch dimension in front.

    The arguments up to the mask have the query's dimensions, the mask perhaps fewer. Numbers per
    head or batch entry have no place for one more dimension, and what is dropped depends on the
    place in the batch: with them it is one call for each entry.
    """
    names = list(names)
    arrays = names.index("mask") + 1
    per_entry = [names.index(name) for name in ("offsets", "lengths", "seed")]

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        several = any(dim is not None for dim in in_dims[arrays:])
        if several or any(args[at] is not None for at in per_entry):
            return _one_by_one(op, info.batch_size, in_dims, args)
        rank = args[1].dim() - (in_dims[1] is not None)
        front: list[Tensor | None] = []
        for x, dim in zip(args[:arrays], in_dims[:arrays], strict=True):
            if x is not None:
                moved = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
                if len(front) < arrays - 1:
                    moved = moved.expand(info.batch_size, *moved.shape[1:])
                else:  # a mask broadcasts, but its missing dimensions stand behind the new one
                    missing = (1,) * (rank + 1 - moved.dim())
                    moved = moved.reshape(moved.shape[0], *missing, *moved.shape[1:])
            front.append(None if x is None else moved)
        outputs = op(*front, *args[arrays:])
        return outputs, tuple(0 if out.dim() > 1 else None for out in outputs)

    return rule


def _one_by_one(op: Any, size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> Any:
    entries = []
    for entry in range(size):
        picked = (
            x if dim is None else x.select(dim, entry) for x, dim in zip(args, in_dims, strict=True)
        )
        entries.append(op(*picked))
    outputs = tuple(torch.stack(parts) for parts in zip(*entries, strict=True))
    return outputs, (0,) * len(outputs)
