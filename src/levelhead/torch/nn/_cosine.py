"""Cosine attention: directions alone decide."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._attention import attention


class CosineAttention(nn.Module):
    """softmax(cos(q, k)/temperature)V: lengths play no part, so scores cannot explode.

    >>> import torch, levelhead.torch as lt
    >>> q, k, v = torch.randn(3, 2, 8, 10, 64)
    >>> layer = lt.nn.CosineAttention(num_heads=8)
    >>> near, far = layer(q, k, v, causal=True), layer(1000 * q, k, v, causal=True)
    >>> torch.allclose(near, far, atol=1e-5)
    True

    num_heads:   how many temperatures to learn, one per head; None is one for all
    temperature: what the cosines are divided by, at first: scores lie within ±1/temperature
    learned:     whether it is learned, as `log_scale`, the logarithm of 1/temperature
    min_temperature: the least that a learned one may become; 0.01 keeps scores within ±100
    """

    log_scale: Tensor | None

    def __init__(
        self,
        num_heads: int | None = None,
        *,
        temperature: float = 0.1,
        learned: bool = True,
        min_temperature: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < min_temperature <= temperature < math.inf:
            raise ValueError(
                "temperature: expected a number above 0 and at least min_temperature, got "
                f"{temperature} and {min_temperature}"
            )
        self.num_heads, self.temperature = num_heads, temperature
        self.min_temperature = min_temperature
        self.log_scale = None
        if learned:
            shape = () if num_heads is None else (num_heads,)
            self.log_scale = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return to the temperature of the beginning."""
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, -math.log(self.temperature))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Attend by direction.

        query, key, value: those of `levelhead.torch.attention`; zeros have a cosine of 0
        options: those of `levelhead.torch.attention`, except scale

        Returns what it returns: the output, or an AttentionResult around it.
        """
        unit_query, unit_key = _unit(query), _unit(key).to(key.dtype)
        scale = 1 / self.temperature
        if self.log_scale is not None:  # its gradient comes only by way of the queries
            learned = self.log_scale.clamp(max=-math.log(self.min_temperature)).exp()
            unit_query = unit_query * (learned[:, None, None] if learned.dim() else learned)
            scale = 1.0
        return attention(unit_query.to(query.dtype), unit_key, value, scale=scale, **options)

    def extra_repr(self) -> str:
        """The options, as print shows them."""
        learned = self.log_scale is not None
        return f"{self.num_heads}, temperature={self.temperature}, learned={learned}"


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in float32 at least; shorter than eps, where gradients explode, less."""
    wide = x if x.dtype is torch.float64 else x.float()
    return F.normalize(wide, dim=-1, eps=1e-6)
