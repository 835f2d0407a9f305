"""Tensors on another device than the CPU: PyTorch computes, health comes from tiles of scores.

Health and gradient health are taken from a few rows of queries at a time, in plain torch: the
matrix of all queries and keys is never there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._attention import OPEN
from ._ops import listeners
from ._rows import health_sums, hidden_bias, row_statistics

if TYPE_CHECKING:
    from ._attention import Given

TILE = 1 << 22  # scores in a tile


class Tile(NamedTuple):
    """Some rows of the scores: (..., Hq, l, S)."""

    rows: slice
    scores: Tensor
    logits: Tensor
    counted: Tensor  # visible to the statistics
    distance: Tensor


def attention(
    given: Given, health: bool, weights: bool, listener: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, weights and health sums, as `_ops.attention_op` gives them."""
    output, lse, matrix = _compute(given, weights)
    sums = torch.empty(0, dtype=torch.float64)
    if health:
        sums = tiled_health(given)
    if listener in listeners and output.requires_grad:
        output.register_hook(lambda grad: listeners[listener](tiled_gradients(given, grad)))
    return output, lse, matrix, sums


def _compute(given: Given, weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given.query, given.key, given.value
    plain = given.scales is None and given.sinks is None and not given.softcap
    if plain and not weights and query.dim() > 3:
        hides = given.left < OPEN or given.right < OPEN or given.lengths is not None
        mask = given.mask
        if hides:
            seen = _visible(given, slice(0, query.shape[-2]))
            mask = seen if mask is None else _merged(mask, seen)
        output = F.scaled_dot_product_attention(
            query, key, value, mask, given.dropout, False, scale=given.scale,
            enable_gqa=query.shape[-3] != key.shape[-3],
        )  # fmt: skip
        return output, _tiled_lse(given), query.new_empty(0)
    tile = _tile(given, slice(0, query.shape[-2]))
    joined, logits = tile.logits, tile.logits
    if given.sinks is not None:
        null = given.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        joined = torch.cat([logits, null], -1)
    lse = joined.logsumexp(-1)
    matrix = torch.where(lse[..., None] == float("-inf"), 0, (logits - lse[..., None]).exp())
    kept = F.dropout(matrix, given.dropout)
    grouped = kept.unflatten(-3, (key.shape[-3], -1))
    output = (grouped @ value.to(kept.dtype).unsqueeze(-3)).flatten(-4, -3)
    return output.to(query.dtype), lse.detach(), matrix.detach().to(query.dtype)


def _merged(mask: Tensor, seen: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return mask & seen
    return torch.where(seen, mask, float("-inf"))


@torch.no_grad()
def tiled_health(given: Given) -> Tensor:
    """The sums of `Health`, (..., Hq, len(HEALTH_SUMS)), tile by tile."""
    parts = [
        row_statistics(tile.scores, tile.logits, tile.counted, given.sinks, tile.distance)
        for tile in tiles(given)
    ]
    return health_sums(parts)


@torch.no_grad()
def tiled_gradients(given: Given, grad: Tensor) -> Tensor:
    """The sums of `GradHealth`, (..., Hq, 2), from the gradient of the output.

    Dropout's mask is PyTorch's and not known here: the gradient is that of the call without it.
    """
    squares = []
    value = given.value.unsqueeze(-3)
    for tile in tiles(given):
        joined = tile.logits
        if given.sinks is not None:
            null = given.sinks.to(joined.dtype)[:, None, None].expand(*joined.shape[:-1], 1)
            joined = torch.cat([joined, null], -1)
        p = torch.nan_to_num(joined.softmax(-1), nan=0.0)[..., : tile.logits.shape[-1]]
        rows = grad[..., tile.rows, :].unflatten(-3, (given.key.shape[-3], -1))
        dp = (rows.to(p.dtype) @ value.to(p.dtype).transpose(-1, -2)).flatten(-4, -3)
        dp = torch.where(tile.logits == float("-inf"), 0, dp)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        squares.append(
            torch.stack(
                [torch.where(tile.counted, x, 0).square().sum((-2, -1)) for x in (dp, ds)], -1
            )
        )
    total = (
        torch.stack(squares).sum(0)
        if squares
        else given.query.new_zeros(*given.query.shape[:-2], 2)
    )
    return total if total.is_meta else total.cpu().double()


@torch.no_grad()
def _tiled_lse(given: Given) -> Tensor:
    parts = [tile.logits.logsumexp(-1) for tile in tiles(given)]
    return torch.cat(parts, -1) if parts else given.query.new_empty(given.query.shape[:-1])


def tiles(given: Given) -> Iterator[Tile]:
    """The scores of a call, a few rows at a time."""
    rows = given.query.shape[-2]
    row = given.query[..., 0, 0].numel() * given.key.shape[-2] if rows else 1
    step = max(1, TILE // max(row, 1))
    for first in range(0, rows, step):
        yield _tile(given, slice(first, min(first + step, rows)))


def _tile(given: Given, rows: slice) -> Tile:
    query, key = given.query, given.key
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    grouped = query[..., rows, :].to(dtype).unflatten(-3, (key.shape[-3], -1))
    scores = (grouped @ key.to(dtype).unsqueeze(-3).transpose(-1, -2)).flatten(-4, -3)
    scores = scores * (
        given.scale if given.scales is None else given.scales.to(dtype)[:, None, None]
    )
    logits = scores
    if given.softcap:
        logits = given.softcap * torch.tanh(scores / given.softcap)
    visible = _visible(given, rows)
    counted = visible
    if given.mask is not None:
        mask = (
            given.mask
            if given.mask.dim() < 2 or given.mask.shape[-2] == 1
            else given.mask[..., rows, :]
        )
        if mask.dtype is torch.bool:
            visible = counted = visible & mask
        else:
            counted = visible & ~hidden_bias(mask)
            logits = logits + mask.to(dtype)
    logits = torch.where(visible, logits, float("-inf"))
    return Tile(rows, scores, logits, counted, _distance(given, rows))


def _positions(given: Given, rows: slice) -> Tensor:
    """Of the queries among the keys: (l, 1), or (..., 1, l, 1) with one offset per batch entry."""
    at = torch.arange(rows.start, rows.stop, device=given.query.device)[:, None]
    if given.offsets is None:
        return at + given.offset
    return at + given.offsets.reshape(*given.query.shape[:-3], 1, 1, 1)


def _distance(given: Given, rows: slice) -> Tensor:
    keys = torch.arange(given.key.shape[-2], device=given.query.device)
    return (_positions(given, rows) - keys).abs()


def _visible(given: Given, rows: slice) -> Tensor:
    keys = torch.arange(given.key.shape[-2], device=given.query.device)
    at = _positions(given, rows)
    seen = (keys >= at - given.left) & (keys <= at + given.right)
    if given.lengths is not None:
        seen = seen & (keys < given.lengths.reshape(*given.query.shape[:-3], 1, 1, 1))
    return seen
