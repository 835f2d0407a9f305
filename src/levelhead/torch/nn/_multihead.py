"""Multi-head attention: project in, attend in heads, project out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._result import AttentionResult
from ...scaling import ScaleRule, scale_rule
from .._attention import attention
from ._masks import without_padding


class MultiHeadAttention(nn.Module):
    """Multi-head attention: self, cross and grouped, with all that keeps scores in bounds.

    >>> import torch, levelhead.torch as lt
    >>> layer = lt.nn.MultiHeadAttention(64, 8, num_kv_heads=2, qk_norm=True)
    >>> x, context = torch.randn(2, 10, 64), torch.randn(2, 12, 64)
    >>> output, _ = layer(x, causal=True)
    >>> output, _, health = layer(x, context, return_health=True)
    >>> output.shape, health.shape
    (torch.Size([2, 10, 64]), (2, 8))

    embed_dim:    width of the queries' input and of the output
    num_heads:    query heads; must divide embed_dim
    num_kv_heads: key and value heads, shared by groups of query heads; None is num_heads
    kdim, vdim:   widths of the inputs of keys and values; None is embed_dim
    bias:         whether the projections have one
    scale:        of the scores: a name of SCALE_RULES, a function of (d_k, d_model), or a number
    qk_norm:      RMSNorm, with a learned weight, over each head's queries and keys: without the
                  weights no score exceeds √d_k, however the projections grow
    softcap:      c·tanh(score/c) before the mask
    dropout:      on the weights, in training
    batch_first:  whether inputs are (batch, length, width) or (length, batch, width)

    A state dict of torch.nn.MultiheadAttention fits, and the other way, unless num_kv_heads or
    qk_norm add or change parameters; initialisation is the same. It also takes that module's place
    in nn.TransformerEncoderLayer and nn.TransformerDecoderLayer. What differs: batch_first is True
    and need_weights False unless said otherwise; weights are those before dropout and carry no
    gradient; a query that sees no key gets zeros, not NaN; there is no add_bias_kv and no
    add_zero_attn.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        scale: str | float | ScaleRule = "sqrt_dk",
        qk_norm: bool = False,
        softcap: float | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a number that divides num_heads, got {kv_heads} and "
                f"{num_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected a number in [0, 1), got {dropout}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap: expected a number above 0, got {softcap}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.scale = _number(scale, self.head_dim, embed_dim)
        self.softcap, self.dropout, self.batch_first = softcap, dropout, batch_first

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self._sizes = [embed_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = parameter(sum(self._sizes), embed_dim) if packed else None
        names, widths = ("q", "k", "v"), (embed_dim, self.kdim, self.vdim)
        for name, size, width in zip(names, self._sizes, widths, strict=True):
            own = None if packed else parameter(size, width)
            self.register_parameter(f"{name}_proj_weight", own)
        self.in_proj_bias = parameter(sum(self._sizes)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
            for _ in range(2)
        )
        self._reset_in_proj()

    # nn.TransformerEncoderLayer asks for it and would otherwise, in eval, compute from the weights
    # by itself: without the options of this module.
    _qkv_same_embed_dim = False

    def reset_parameters(self) -> None:
        """Start anew, as torch.nn.MultiheadAttention does: Xavier-uniform, biases 0."""
        for module in (self.out_proj, self.q_norm, self.k_norm):
            if module is not None:
                module.reset_parameters()
        self._reset_in_proj()

    def _reset_in_proj(self) -> None:
        for weight in self._weights() if self.in_proj_weight is None else [self.in_proj_weight]:
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def _weights(self) -> list[Tensor]:
        if self.in_proj_weight is not None:
            return list(self.in_proj_weight.split(self._sizes))
        return [self.get_parameter(f"{name}_proj_weight") for name in ("q", "k", "v")]

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        causal: bool = False,
        is_causal: bool = False,
        need_weights: bool = False,
        average_attn_weights: bool = True,
        return_health: bool = False,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Attend from the query's input to the key's and value's.

        query: (batch, L, embed_dim), or (L, batch, embed_dim) without batch_first, or without batch
        key:   (batch, S, kdim); None is query: self attention
        value: (batch, S, vdim); None is key
        key_padding_mask: (batch, S), as in PyTorch: True is ignored; a float is added
        mask:      broadcastable to (batch, num_heads, L, S): True may attend; a float is added
        attn_mask: the same as PyTorch means it: True may not attend; (L, S) or
                   (batch·num_heads, L, S)
        causal:    a query sees the keys at or before its own position; the queries are the last L
        is_causal: PyTorch's hint that attn_mask is causal; nothing without one
        need_weights, average_attn_weights: also the weights, (batch, L, S), the heads' average, or
                   (batch, num_heads, L, S)
        return_health: also the Health of every head
        options:   more of `levelhead.torch.attention`'s: window, query_offset, key_lengths, ...

        Returns output and weights (None unless asked for), and health if asked for.
        """
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal: expected attn_mask with it, for it is only PyTorch's hint about one, "
                "got None; causal=True needs no mask"
            )
        query_heads, key_heads, value_heads = self._project(query, key, value)
        result = attention(
            query_heads, key_heads, value_heads,
            mask=self._mask(mask, attn_mask, key_padding_mask), causal=causal, softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
            return_weights=need_weights, return_health=return_health,
            **{"scale": self.scale, **options},
        )  # fmt: skip
        if not isinstance(result, AttentionResult):
            result = AttentionResult(result)
        length_at = -3 if self.batch_first else 0
        output = self.out_proj(result.output.movedim(-2, length_at).flatten(-2))
        weights = result.weights
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return (output, weights, result.health) if return_health else (output, weights)

    def _project(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> list[Tensor]:
        """Queries, keys and values as (..., heads, length, head_dim), views of the projections."""
        if key is None and value is not None:
            raise ValueError("key: expected a tensor together with value, got None")
        key = query if key is None else key
        value = key if value is None else value
        widths = (self.embed_dim, self.kdim, self.vdim)
        for name, x, width in zip(
            ("query", "key", "value"), (query, key, value), widths, strict=True
        ):
            if x.dim() < 2 or x.shape[-1] != width or (x.dim() > 3 and not self.batch_first):
                lead = "..., length" if self.batch_first else "length, batch"
                raise ValueError(f"{name}: expected shape ({lead}, {width}), got {tuple(x.shape)}")
        if query is key is value and self.in_proj_weight is not None:
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            projected = list(packed.split(self._sizes, -1))
        else:
            bias = self.in_proj_bias
            biases = [None] * 3 if bias is None else bias.split(self._sizes)
            projected = list(map(F.linear, (query, key, value), self._weights(), biases))
        length_at = -3 if self.batch_first else 0
        heads = [x.unflatten(-1, (-1, self.head_dim)).movedim(length_at, -2) for x in projected]
        if self.q_norm is not None and self.k_norm is not None:
            heads[:2] = _normed(self.q_norm, heads[0]), _normed(self.k_norm, heads[1])
        return heads

    def _mask(
        self, mask: Tensor | None, attn_mask: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        if attn_mask is not None:
            if mask is not None:
                raise ValueError(
                    "attn_mask: expected None together with mask, got both; mask is True where "
                    "attention is allowed, attn_mask, as in PyTorch, where it is not"
                )
            mask = ~attn_mask if attn_mask.dtype is torch.bool else attn_mask
            if mask.dim() == 3:
                mask = mask.unflatten(0, (-1, self.num_heads))
        return without_padding(mask, None if padding is None else padding[..., None, None, :])

    def extra_repr(self) -> str:
        """The options, as print shows them."""
        return (
            f"{self.embed_dim}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"scale={self.scale:.4g}, softcap={self.softcap}, dropout={self.dropout}"
        )


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """In the weight's precision: under autocast x has less, which PyTorch warns of."""
    normed: Tensor = norm(x.to(norm.weight.dtype))
    return normed.to(x.dtype)


def _number(scale: str | float | ScaleRule, d_k: int, d_model: int) -> float:
    if isinstance(scale, str):
        scale = scale_rule(scale)
    return scale(d_k, d_model) if callable(scale) else float(scale)
