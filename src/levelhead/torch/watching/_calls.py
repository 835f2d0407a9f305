"""One attention call as it was seen: its health at once, its matrices on request."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._health import GradHealth, Health
from ..._moved import Moved
from .._attention import CallOptions, compute
from .._row_statistics import hidden_bias, matrix_health
from .._tiled_health import head_of, row_slices, rows_of, tile_of, visibility
from ._layout import Layout

Floats = NDArray[np.float64]
_FEW_PAIRS = 1 << 24  # 64 MB of scores
_TINY = 1 << 15  # pairs that one thread has attended to before it has woken a second


class GradientCallbacks(list[Callable[[Tensor], None]]):
    """Who wants the sums of a call's GradHealth when its backward runs; holds nothing of the call.

    counted: pairs, if the sums are taken from gradients of them
    """

    counted: Tensor | None = None

    def __call__(self, sums: Tensor) -> None:
        for callback in self:
            callback(sums)


class Call:
    """What `listen` and `watch` know of one call of attention.

    module: dotted name of the module that made the call, "" outside any
    other:  made inside another model than the one that names the modules
    kind:   "fused" (one function computed all of it) or "eager" (products and a softmax)
    health: Health of shape (batch, heads)
    shape:  (batch, heads, queries, keys)
    dk:     the dimension of queries and keys
    scale:  what the products of queries and keys were multiplied with (a mean over heads)
    on_gradients: set it to be called with the call's GradHealth when backward runs
    sums, on_gradient_sums: the same as tensors, (..., heads, columns), wherever they are
    scales: what `scale` is the mean of, if that is a tensor
    """

    kind: str
    module: str = ""
    other: bool = False
    shape: tuple[int, int, int, int]
    dk: int
    sums: Tensor
    on_gradients: Callable[[GradHealth], None] | None = None
    on_gradient_sums: Callable[[Tensor], None] | None = None

    _scale: float | Tensor

    @functools.cached_property
    def scale(self) -> float:
        scale = self._scale
        return float(numbers(scale).mean()) if isinstance(scale, Tensor) else scale

    @property
    def scales(self) -> Tensor | None:
        return self._scale if isinstance(self._scale, Tensor) else None

    @functools.cached_property
    def health(self) -> Health:
        return Health(entries(numbers(self.sums)))

    @property
    def gradient_callbacks(self) -> list[Callable[[Tensor], None]]:
        """Who wants to know of the gradients, from their sums."""
        wanted, found = self.on_gradients, [self.on_gradient_sums]
        if wanted is not None:
            found.append(lambda sums: wanted(GradHealth(entries(numbers(sums)))))
        return [callback for callback in found if callback is not None]

    def scores(self, entry: int, head: int) -> Floats:
        """Scaled scores of one head, (queries, keys), NaN where a pair is hidden."""
        raise NotImplementedError

    def weights(self, entry: int, head: int) -> Floats:
        """Weights of one head, (queries, keys), before dropout."""
        raise NotImplementedError

    def rescaled(self, factor: float) -> Health:
        """Health of the same queries and keys under the same mask, with scores times `factor`."""
        raise NotImplementedError

    def moved(self, factor: float) -> Moved:
        """The same with how far it moves weights and outputs from what they were."""
        raise NotImplementedError

    def _tiles(self) -> list[slice]:
        batch, heads, rows, keys = self.shape
        return row_slices(batch * heads, rows, keys)


class FusedCall(Call):
    """A call of one function that gets queries, keys and values."""

    kind = "fused"

    def __init__(self, given: CallOptions, sums: Tensor, query_scale: float | Tensor) -> None:
        self._given, self.sums = given, sums
        *batch, heads, _ = sums.shape
        self.shape = (math.prod(batch), heads, given.query.shape[-2], given.key.shape[-2])
        self.dk = given.query.shape[-1]
        scale = given.scale if given.scales is None else given.scales.detach()
        self._scale = scale * query_scale

    def scores(self, entry: int, head: int) -> Floats:
        if self._is_small:
            return _matrix(self._all_scores[entry, head])
        return _matrix(_scores(head_of(self._given, entry, head)))

    def weights(self, entry: int, head: int) -> Floats:
        if self._is_small:
            return _matrix(self._all_weights[entry, head])
        return _matrix(_attend(head_of(self._given, entry, head))[1])

    @property
    def _is_small(self) -> bool:
        """Whether the matrices of all heads may be made, and kept, when one is asked for."""
        return math.prod(self.shape) <= _FEW_PAIRS

    @functools.cached_property
    def _all_scores(self) -> Tensor:
        return _scores(self._given).expand(self._pairs).reshape(self.shape)

    @functools.cached_property
    def _as_it_was(self) -> tuple[Tensor, Tensor]:
        return _attend(self._given)

    @property
    def _all_weights(self) -> Tensor:
        return self._as_it_was[1].reshape(self.shape)

    @property
    def _pairs(self) -> tuple[int, ...]:
        return (*self._given.query.shape[:-1], self.shape[-1])

    @torch.no_grad()
    def rescaled(self, factor: float) -> Health:
        *_, sums = compute(_times(_wide(self._given), factor), health=True)
        return Health(entries(numbers(sums)))

    @torch.no_grad()
    def moved(self, factor: float) -> Moved:
        sums, tiles = [], self._tiles()
        for rows in tiles:
            given = rows_of(self._given, rows)
            before = (
                (x[..., rows, :] for x in self._as_it_was) if self._is_small else _attend(given)
            )
            scaled = _times(_wide(given), factor)
            if math.prod(self.shape) <= _TINY:
                scaled = scaled._replace(threads=1)  # waiting for another would take longer
            output, _, weights, health = compute(scaled, health=len(tiles) == 1, weights=True)
            sums.append(_moved_sums(visibility(given)[1], before, (output, weights)))
        # Patterns are those of a whole sequence, so health cannot come from several tiles.
        whole = Health(entries(numbers(health))) if len(tiles) == 1 else self.rescaled(factor)
        return Moved(whole, np.sum([entries(numbers(some)) for some in sums], axis=0))


class EagerCall(Call):
    """Products, whatever was done to them, and a softmax: all matrices are there."""

    kind = "eager"

    def __init__(
        self,
        layout: Layout,
        scores: Tensor,
        logits: Tensor,
        hidden: Tensor | None,
        dk: int,
        scale: float | Tensor,
        cap: float | Tensor = 0.0,
    ) -> None:
        """Tensors as they entered the softmax; hidden: pairs that do not count."""
        self.dk, self._scale, self._cap = dk, scale, cap
        self.layout, self.shape = layout, layout.shape
        self._scores, self._logits = layout.keys(scores), layout.keys(logits)
        self._null = layout.others(logits)
        self._values: Tensor | None = None
        self.counted = ~hidden_bias(self._logits)
        if hidden is not None:
            self.counted = self.counted & ~layout.keys(hidden)
        self.sums = self._measure(self._scores, self._logits)

    def drop_matrices(self) -> None:
        """Keep nothing but the statistics, and which pairs count."""
        del self._scores, self._logits, self._null

    def keep_values(self, weights: Tensor, values: Tensor) -> None:
        """Keep what the weights are multiplied with, if it stands as they do: heads, keys last."""
        (_, _, *pairs), lead, order = self.shape, self.layout.lead, self.layout.order
        if (
            weights.shape[:-2] == values.shape[:-2]
            and weights.shape[:-2] in (lead, (math.prod(lead),))
            and [*weights.shape[-2:]] == pairs
            and order == tuple(range(len(order)))
        ):
            self._values = values.detach().reshape(*lead, *values.shape[-2:])

    def _measure(self, scores: Tensor, logits: Tensor) -> Tensor:
        sums = matrix_health(scores, logits, self.counted, self._null)
        return sums.reshape(*self.shape[:2], sums.shape[-1])

    def _matrix_of(self, matrices: Tensor, entry: int, head: int) -> Tensor:
        lead, flat = self.layout.lead, entry * self.shape[1] + head
        return matrices[tuple(int(at) for at in np.unravel_index(flat, lead))] if lead else matrices

    def scores(self, entry: int, head: int) -> Floats:
        counted, scores = (self._matrix_of(x, entry, head) for x in (self.counted, self._scores))
        return _matrix(torch.where(counted, scores, torch.nan))

    def weights(self, entry: int, head: int) -> Floats:
        logits = self._matrix_of(self._logits, entry, head)
        if self._null is not None:
            logits = torch.cat([logits, self._matrix_of(self._null, entry, head)], -1)
        return _matrix(logits.double().softmax(-1)[..., : self.shape[-1]])

    def rescaled(self, factor: float) -> Health:
        return Health(entries(numbers(self._measure(*self._times(factor)))))

    @torch.no_grad()
    def moved(self, factor: float) -> Moved:
        scores, logits = self._times(factor)
        parts = []
        for rows in self._tiles():
            both = [self._attend(x, rows) for x in (self._logits, logits)]
            parts.append(_moved_sums(self.counted[..., rows, :], *both))
        sums = torch.stack(parts).sum(0).reshape(*self.shape[:2], -1)
        return Moved(
            Health(entries(numbers(self._measure(scores, logits)))), entries(numbers(sums))
        )

    def _times(self, factor: float) -> tuple[Tensor, Tensor]:
        """Scores, and the logits made of them, with a factor that 16 bits may not hold."""
        scores, logits = (_widened(x) for x in (self._scores, self._logits))
        more = self._capped(scores * factor) - self._capped(scores)
        return scores * factor, logits + torch.where(self.counted, more, 0)

    def _attend(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Output and weights of some rows; an output of NaN if the values are not known."""
        joined = _widened(logits[..., rows, :])
        if self._null is not None:
            joined = torch.cat([joined, self._null[..., rows, :]], -1)
        weights = joined.softmax(-1)[..., : self.shape[-1]]
        if self._values is None:
            return weights.new_full((*weights.shape[:-1], 1), torch.nan), weights
        return weights @ self._values.to(weights.dtype), weights

    def _capped(self, scores: Tensor) -> Tensor:
        return self._cap * torch.tanh(scores / self._cap) if self._cap else scores


class Pending:
    """A softmax: attention if its weights are multiplied with values.

    modules:     that were running then, by id
    call:        None if it was not understood, or was reported
    is_reported: also as not understood
    """

    def __init__(self, modules: set[int]) -> None:
        self.modules, self.callbacks, self.is_reported = modules, GradientCallbacks(), False
        self.call: EagerCall | None = None

    def is_understood(self, columns: int) -> bool:
        """Whether it can be reported, if its weights have so many columns at the values.

        A single column beside the keys is a sink, cut off or not. Several at the values are
        keys whose scores were not followed.
        """
        if self.call is None:
            return False
        return not self.call.layout.known or columns <= self.call.shape[-1] + 1


@torch.no_grad()
def _scores(given: CallOptions) -> Tensor:
    tile = tile_of(given)
    return torch.where(tile.counted, tile.scores, torch.nan)


@torch.no_grad()
def _attend(given: CallOptions) -> tuple[Tensor, Tensor]:
    """Output and weights, without dropout."""
    output, _, weights, _ = compute(_wide(given), weights=True)
    return output, weights


def _wide(given: CallOptions) -> CallOptions:
    """The call without dropout, in 32 bits at least: what it gives is compared with others."""
    mask = given.mask
    if mask is not None and mask.dtype in (torch.float16, torch.bfloat16):
        low = hidden_bias(mask) & mask.isfinite()  # what hides in 16 bits must hide in 32
        mask = _widened(mask)
        mask = mask.masked_fill(low, torch.finfo(mask.dtype).min)
    query, key, value = (_widened(x) for x in given[:3])
    return given._replace(query=query, key=key, value=value, mask=mask, dropout=0.0, matrix=False)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _times(given: CallOptions, factor: float) -> CallOptions:
    if given.scales is None:
        return given._replace(scale=given.scale * factor)
    return given._replace(scales=given.scales * factor)


def _moved_sums(counted: Tensor, before: Iterable[Tensor], after: Iterable[Tensor]) -> Tensor:
    """The sums of `Moved`, (..., heads, 4), from outputs and weights of the same rows."""
    (output, weights), (changed, other) = before, after
    gap = other - weights
    lost = gap.sum(-1).abs()  # by the keys, to a learned sink
    distance = (gap.abs_().sum(-1) + lost) / 2
    sound = weights.sum(-1).isfinite()
    choice = sound & (counted.sum(-1) > 1)
    rows = [
        choice,
        torch.where(choice, distance.nan_to_num(nan=1.0), 0),
        *(torch.where(sound, x.square().sum(-1), 0) for x in (changed - output, output)),
    ]
    # float64 off the device: not every device has it
    return torch.stack([row.cpu().double().sum(-1) for row in rows], -1)


def numbers(tensor: Tensor) -> Floats:
    """Its values, which waits for its device."""
    array: Floats = tensor.detach().cpu().double().numpy()
    return array


def entries(sums: Floats) -> Floats:
    """Sums as (batch, heads, columns), whatever the batch dimensions."""
    batch = math.prod(sums.shape[:-2])  # not -1: a size of 0 elsewhere leaves it undetermined
    return sums.reshape(batch, *sums.shape[-2:])


def _matrix(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    matrix: Floats = array.reshape(array.shape[-2:])
    return matrix
