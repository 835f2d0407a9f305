"""Additive attention: a small network scores each pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..._options import OPEN
from ..._result import AttentionResult
from .._attention import compute, health_of, normalise
from .._patterns import Sample, sample
from .._row_statistics import health_sums, row_statistics
from .._tiled_health import tile_of
from ._masks import without_padding

BLOCK = 1 << 20  # numbers of the hidden layer held at a time


class AdditiveAttention(nn.Module):
    """softmax(v·tanh(W_q q + W_k k))V: Bahdanau's score, a small network instead of a product.

    >>> import torch, levelhead.torch as lt
    >>> layer = lt.nn.AdditiveAttention(query_dim=16, key_dim=32, hidden_dim=24)
    >>> decoder, encoder = torch.randn(2, 5, 16), torch.randn(2, 9, 32)
    >>> layer(decoder, encoder).shape
    torch.Size([2, 5, 32])
    >>> layer(decoder, encoder, return_weights=True).weights.shape
    torch.Size([2, 5, 9])

    query_dim, key_dim: widths of queries and keys; key_dim None is query_dim
    hidden_dim: width A of the hidden layer; None is query_dim
    bias:       whether the hidden layer has one
    dropout:    on the weights, in training

    The hidden layer has A numbers per pair. It is made for a few queries at a time, and again in
    the backward pass: L·S·A numbers are never there at once.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        hidden_dim: int | None = None,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected a number in [0, 1), got {dropout}")
        hidden_dim = query_dim if hidden_dim is None else hidden_dim
        key_dim = query_dim if key_dim is None else key_dim
        self.w_query = nn.Linear(query_dim, hidden_dim, bias, device, dtype)
        self.w_key = nn.Linear(key_dim, hidden_dim, False, device, dtype)
        self.v_score = nn.Linear(hidden_dim, 1, False, device, dtype)
        self.dropout = dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        causal: bool = False,
        return_weights: bool = False,
        return_health: bool = False,
    ) -> Tensor | AttentionResult:
        """Attend from queries (..., L, query_dim) to keys (..., S, key_dim).

        value: (..., S, Dv); None is key
        mask:  broadcastable to (..., L, S); True may attend, a float is added to the scores
        key_padding_mask: (..., S); True is ignored
        causal: a query sees the keys at or before its own position; the queries are the last L
        return_weights, return_health: any of them makes the result an AttentionResult
        """
        value = key if value is None else value
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                f"value: expected shape {(*key.shape[:-1], 'Dv')}, got {tuple(value.shape)}"
            )
        hidden_query, hidden_key = self.w_query(query), self.w_key(key)
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        length, size = query.shape[-2], key.shape[-2]
        padding = None if key_padding_mask is None else key_padding_mask[..., None, :]
        mask = without_padding(mask, padding)
        if mask is not None:
            mask = mask.expand(*batch, length, size)
        value = value.expand(*batch, *value.shape[-2:])
        hidden_query = hidden_query.expand(*batch, *hidden_query.shape[-2:])

        sampled = None
        if return_health:
            sampled = sample(length, size, OPEN, 0 if causal else OPEN, size - length)
        parts = []
        per_row = max(1, batch.numel() * size * hidden_key.shape[-1])
        step = max(1, BLOCK // per_row)
        for first in range(0, max(length, 1), step):
            rows = slice(first, first + step)
            some = (
                hidden_query[..., rows, :], hidden_key, value,
                None if mask is None else mask[..., rows, :], causal, size - length + first,
                return_weights, sampled and sampled.part(rows),
            )  # fmt: skip
            if torch.is_grad_enabled():
                kept = bool(self.dropout) and self.training
                parts.append(
                    checkpoint(self._rows, *some, use_reentrant=False, preserve_rng_state=kept)
                )
            else:
                parts.append(self._rows(*some))
        outputs, weights, statistics = zip(*parts, strict=True)
        output = torch.cat(outputs, -2)
        if not (return_weights or return_health):
            return output
        return AttentionResult(
            output,
            weights=torch.cat(weights, -2) if return_weights else None,
            health=health_of(health_sums(list(statistics), sampled)) if sampled else None,
        )

    def _rows(
        self,
        hidden_query: Tensor,
        hidden_key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        offset: int,
        return_weights: bool,
        sampled: Sample | None,
    ) -> tuple[Tensor, Tensor, Any]:
        """Output, weights and statistics of some rows; sampled: None is without statistics.

        The operator does all but the scores: they enter as the mask of queries and keys of zeros.
        """
        hidden = torch.tanh(hidden_query[..., :, None, :] + hidden_key[..., None, :, :])
        scores = self.v_score(hidden).squeeze(-1).unsqueeze(-3)
        logits = scores
        if mask is not None:
            mask = mask.unsqueeze(-3)
            hides = mask.dtype is torch.bool
            logits = torch.where(mask, scores, float("-inf")) if hides else scores + mask
        zeros = value.new_zeros(1).expand(*logits.shape[:-2], max(logits.shape[-2:]), 1)
        given = normalise(
            zeros[..., : logits.shape[-2], :], zeros[..., : logits.shape[-1], :],
            value.unsqueeze(-3), logits, causal, query_offset=offset,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        output, _, weights, _ = compute(given, weights=return_weights)
        statistics = None
        if sampled is not None:
            with torch.no_grad():
                tile = tile_of(given)
                statistics = row_statistics(
                    *(scores.to(tile.logits.dtype), tile.logits, tile.counted, None),
                    *(tile.distance, sampled),
                )
        weights = weights.squeeze(-3) if return_weights else weights
        return output.squeeze(-3), weights, statistics
