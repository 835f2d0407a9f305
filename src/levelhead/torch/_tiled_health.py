"""Tensors on another device than the CPU: PyTorch computes, health comes from tiles of scores.

Health and gradient health are taken from a few rows of queries at a time, in plain torch: the
matrix of all queries and keys is never there at once. Nothing here waits for the device: sums stay
on it until somebody reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .._health import GradHealth
from .._options import OPEN
from ._ops import listeners
from ._patterns import Sample, sample
from ._row_statistics import health_sums, hidden_bias, part_of, row_statistics, widened

if TYPE_CHECKING:
    from ._call_options import CallOptions

TILE = 1 << 22  # scores in a tile


class Tile(NamedTuple):
    """Some rows of the scores: (..., Hq, l, S)."""

    rows: slice
    scores: Tensor
    logits: Tensor
    counted: Tensor  # visible to the statistics
    distance: Tensor


def attention(
    given: CallOptions, health: bool, weights: bool, listener: int, lse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, weights and health sums, the last three empty unless asked for."""
    output, rows, matrix = _compute(given, weights, lse)
    sums = torch.empty(0, dtype=torch.float64)
    if health:
        sums = tiled_health(given)
    if (on_gradients := listeners.get(listener)) is not None and output.requires_grad:

        def measure(grad: Tensor) -> None:  # what a hook returns would replace the gradient
            with torch._C.DisableTorchFunction():  # whoever follows scores must not follow these
                sums = tiled_gradients(given, grad)
            on_gradients(sums)

        output.register_hook(measure)
    return output, rows, matrix, sums


def _compute(given: CallOptions, weights: bool, lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given.query, given.key, given.value
    none = query.new_empty(0)
    plain = given.scales is None and given.sinks is None and not given.softcap
    if plain and not weights:
        # Its kernels of linear memory want four dimensions.
        q, k, v = (x if x.dim() > 3 else x.unsqueeze(0) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            q, k, v, _mask(given), given.dropout, False, scale=given.scale,
            enable_gqa=query.shape[-3] != key.shape[-3],
        )  # fmt: skip
        output = output.reshape(*query.shape[:-1], value.shape[-1])
        return output, _tiled_lse(given) if lse else none, none
    tile = tile_of(given)
    joined, logits = tile.logits, tile.logits
    if given.sinks is not None:
        joined = _with_sinks(given.sinks, logits)
    total = joined.logsumexp(-1)
    lows = total.unsqueeze(-1)
    matrix = torch.where(lows == float("-inf"), 0, (logits - lows).exp())
    kept = F.dropout(matrix, given.dropout)
    grouped = kept.unflatten(-3, (key.shape[-3], -1))
    output = (grouped @ value.to(kept.dtype).unsqueeze(-3)).flatten(-4, -3)
    shown = matrix.detach().to(query.dtype) if weights else none
    return output.to(query.dtype), total.detach() if lse else none, shown


def _null(given: CallOptions) -> Tensor | None:
    return None if given.sinks is None else _per_head(given.sinks)


def _per_head(x: Tensor) -> Tensor:
    """One number per head, against (..., H, L, S)."""
    return x.reshape(-1, 1, 1)


def _with_sinks(sinks: Tensor, logits: Tensor) -> Tensor:
    null = _per_head(sinks.to(logits.dtype)).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, null], -1)


def _mask(given: CallOptions) -> Tensor | None:
    """All that hides or biases as one mask, in the form that PyTorch's own attention takes."""
    mask = given.mask
    if mask is not None:
        mask = torch.atleast_2d(mask if mask.dtype is torch.bool else mask.to(given.query.dtype))
    if given.left == given.right == OPEN and given.lengths is None:
        return mask
    seen = _visible(given)
    if mask is None:
        return seen
    return mask & seen if mask.dtype is torch.bool else torch.where(seen, mask, float("-inf"))


@torch.no_grad()
def tiled_health(given: CallOptions) -> Tensor:
    """The sums of `Health`, (..., Hq, len(Health.COLUMNS)), tile by tile."""
    sampled = _sample(given)
    parts = [
        row_statistics(
            *(tile.scores, tile.logits, tile.counted, _null(given), tile.distance),
            sampled.part(tile.rows),
        )
        for tile in tiles(given)
    ]
    return health_sums(parts, sampled)


@torch.no_grad()
def tiled_gradients(given: CallOptions, grad: Tensor) -> Tensor:
    """The sums of `GradHealth`, (..., Hq, 2), from the gradient of the output.

    Dropout's mask is PyTorch's and not known here: the gradient is that of the call without it.
    """
    squares = []
    value = given.value.unsqueeze(-3)
    for tile in tiles(given):
        joined = tile.logits
        if given.sinks is not None:
            joined = _with_sinks(given.sinks, joined)
        empty = (joined == float("-inf")).all(-1, keepdim=True)
        p = torch.where(empty, 0, joined.softmax(-1)).narrow(-1, 0, tile.logits.shape[-1])
        rows = part_of(grad, tile.rows).unflatten(-3, (given.key.shape[-3], -1))
        dp = (rows.to(p.dtype) @ value.to(p.dtype).transpose(-1, -2)).flatten(-4, -3)
        dp = torch.where(tile.logits == float("-inf"), 0, dp)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        sums = {
            name: torch.where(tile.counted, x, 0).square().sum((-2, -1))
            for name, x in (("weight_grad_sq", dp), ("score_grad_sq", ds))
        }
        squares.append(torch.stack([sums[name] for name in GradHealth.COLUMNS], -1))
    total = torch.stack(squares).sum(0)
    return widened(total)


@torch.no_grad()
def _tiled_lse(given: CallOptions) -> Tensor:
    return torch.cat([tile.logits.logsumexp(-1) for tile in tiles(given)], -1)


def tiles(given: CallOptions) -> Iterator[Tile]:
    """The scores of a call, a few rows at a time."""
    *lead, rows, _ = given.query.shape
    for some in row_slices(math.prod(lead), rows, given.key.shape[-2]):
        yield tile_of(given, some)


def row_slices(matrices: int, rows: int, keys: int) -> list[slice]:
    """The rows of each tile of so many matrices; no rows are one empty tile."""
    step = max(1, TILE // max(matrices * keys, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, max(rows, 1), step)]


def tile_of(given: CallOptions, rows: slice | None = None) -> Tile:
    """Scores and logits of some rows of queries, or of all."""
    rows = rows or slice(0, given.query.shape[-2])
    given = rows_of(given, rows)
    query, key = given.query, given.key
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    grouped = query.to(dtype).unflatten(-3, (key.shape[-3], -1))
    scores = (grouped @ key.to(dtype).unsqueeze(-3).transpose(-1, -2)).flatten(-4, -3)
    scores = scores * (given.scale if given.scales is None else _per_head(given.scales.to(dtype)))
    logits = scores
    if given.softcap:
        logits = given.softcap * torch.tanh(scores / given.softcap)
    visible, counted = visibility(given)
    if given.mask is not None and given.mask.dtype is not torch.bool:
        logits = logits + given.mask.to(dtype)
    logits = torch.where(visible, logits, float("-inf"))
    return Tile(rows, scores, logits, counted, _distance(given))


def rows_of(given: CallOptions, rows: slice) -> CallOptions:
    """The call that some of its queries would be."""
    mask, several = given.mask, given.offsets is not None
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = part_of(mask, rows)
    return given._replace(
        query=part_of(given.query, rows),
        mask=mask,
        offset=given.offset + (0 if several else rows.start),
        offsets=given.offsets + rows.start if several else None,
    )


def visibility(given: CallOptions) -> tuple[Tensor, Tensor]:
    """Which pairs have a weight, and which the statistics count: broadcastable to (..., L, S)."""
    visible, mask = _visible(given), given.mask
    if mask is None:
        return visible, visible
    if mask.dtype is torch.bool:
        return visible & mask, visible & mask
    # -inf hides a pair, even if its score is NaN.
    return visible & (mask != float("-inf")), visible & hidden_bias(mask).logical_not()


def head_of(given: CallOptions, entry: int, head: int) -> CallOptions:
    """The call that one head of one batch entry would be."""
    heads, group = given.query.shape[-3], given.query.shape[-3] // given.key.shape[-3]

    def pick(x: Tensor, head: int) -> Tensor:
        return (
            x.flatten(0, -4)[entry : entry + 1, head : head + 1] if x.dim() > 3 else x[head, None]
        )

    mask = given.mask
    if mask is not None:
        mask = pick(mask.expand(*given.query.shape[:-1], given.key.shape[-2]), head)
    one = slice(head, head + 1)
    return given._replace(
        query=pick(given.query, head),
        key=pick(given.key, head // group),
        value=pick(given.value, head // group),
        mask=mask,
        sinks=None if given.sinks is None else given.sinks[one],
        scales=None if given.scales is None else given.scales.expand(heads)[one],
        offsets=None if given.offsets is None else given.offsets[entry : entry + 1],
        lengths=None if given.lengths is None else given.lengths[entry : entry + 1],
    )


def _sample(given: CallOptions) -> Sample:
    """The rows that patterns are taken from, known before any device has computed."""
    (*batch, _, rows, _), keys = given.query.shape, given.key.shape[-2]

    def per_entry(x: Tensor | None, otherwise: int) -> int | NDArray[np.int64]:
        return otherwise if x is None or not x.is_cpu else x.reshape(*batch, 1).numpy()

    # To read offsets and lengths waits for their device. There, rows are chosen as if every entry
    # had all keys; those that turn out to see few are not taken.
    offset = given.offset if given.offsets is None else keys - rows
    chosen = sample(
        *(rows, keys, given.left, given.right),
        *(per_entry(given.offsets, offset), per_entry(given.lengths, keys)),
    )
    if given.offsets is None or given.offsets.is_cpu:
        return chosen
    return chosen._replace(offset=given.offsets.reshape(*batch, 1))


def _positions(given: CallOptions) -> Tensor:
    """Of the queries among the keys: (l, 1), or (..., 1, l, 1) with one offset per batch entry."""
    at = torch.arange(given.query.shape[-2], device=given.query.device).unsqueeze(-1)
    if given.offsets is None:
        return at + given.offset
    return at + given.offsets.reshape(*given.query.shape[:-3], 1, 1, 1)


def _distance(given: CallOptions) -> Tensor:
    keys = torch.arange(given.key.shape[-2], device=given.query.device)
    return (_positions(given) - keys).abs()


def _visible(given: CallOptions) -> Tensor:
    keys = torch.arange(given.key.shape[-2], device=given.query.device)
    at = _positions(given)
    seen = (keys >= at - given.left) & (keys <= at + given.right)
    if given.lengths is not None:
        seen = seen & (keys < given.lengths.reshape(*given.query.shape[:-3], 1, 1, 1))
    return seen
