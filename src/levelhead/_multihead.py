"""Multi-head attention for NumPy arrays: project in, attend in heads, project out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ._attention import attention
from ._result import AttentionResult
from .scaling import ScaleRule
from .scaling import scale_rule as rule_of_name

Array = NDArray[Any]


class MultiHeadAttention:
    """Multi-head attention: self, cross (with a context) and grouped (num_kv_heads).

    >>> import numpy as np, levelhead as lh
    >>> layer = lh.MultiHeadAttention(d_model=64, num_heads=4, num_kv_heads=2)
    >>> x = np.random.default_rng(0).standard_normal((2, 10, 64)).astype(np.float32)
    >>> layer(x, causal=True).shape
    (2, 10, 64)
    >>> layer(x, return_health=True).health.shape
    (2, 4)

    d_model:      width of the input and of the output
    num_heads:    query heads; must divide d_model
    num_kv_heads: key and value heads, shared by groups of query heads; None is num_heads
    d_key:        width of the context; None is d_model
    scale_rule:   the name of a rule in `levelhead.scaling`, or a function of (d_k, d_model)
    bias:         whether the projections have one (it starts at 0)
    seed:         of the weights, which are Xavier-uniform
    dtype:        of the weights, and so of the inputs

    The weights are plain attributes, used as x @ w + b: w_query (d_model, heads·d_k),
    w_key and w_value (d_key, kv_heads·d_k), w_output (heads·d_k, d_model), and b_query, b_key,
    b_value, b_output (None without bias).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        d_key: int | None = None,
        scale_rule: str | ScaleRule = "sqrt_dk",
        bias: bool = True,
        seed: int = 0,
        dtype: DTypeLike = np.float32,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or d_model < 1 or d_model % num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads, got {d_model} and {num_heads}"
            )
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {kv_heads}"
            )
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, kv_heads
        self.d_key = d_model if d_key is None else d_key
        self.d_k = d_model // num_heads
        rule = rule_of_name(scale_rule) if isinstance(scale_rule, str) else scale_rule
        self.scale = rule(self.d_k, d_model)
        self.dtype = np.dtype(dtype)

        rng = np.random.default_rng(seed)
        shared = kv_heads * self.d_k
        self.w_query = _xavier_uniform(rng, d_model, d_model, self.dtype)
        self.w_key = _xavier_uniform(rng, self.d_key, shared, self.dtype)
        self.w_value = _xavier_uniform(rng, self.d_key, shared, self.dtype)
        self.w_output = _xavier_uniform(rng, d_model, d_model, self.dtype)
        self.b_query = np.zeros(d_model, self.dtype) if bias else None
        self.b_key = np.zeros(shared, self.dtype) if bias else None
        self.b_value = np.zeros(shared, self.dtype) if bias else None
        self.b_output = np.zeros(d_model, self.dtype) if bias else None

    def __call__(self, x: Array, context: Array | None = None, **options: Any) -> Any:
        """Attend from x to the context, or to x itself.

        >>> import numpy as np, levelhead as lh
        >>> layer = lh.MultiHeadAttention(d_model=8, num_heads=2, d_key=6)
        >>> layer(np.ones((5, 8), np.float32), np.ones((3, 6), np.float32)).shape
        (5, 8)

        x:       (..., L, d_model)
        context: (..., S, d_key); None is x
        options: those of `attention`; a scale given here replaces the rule's

        Returns the projected output (..., L, d_model), or an AttentionResult around it.
        """
        source = x if context is None else context
        self._check("x", x, self.d_model)
        self._check("context" if context is not None else "x", source, self.d_key)
        query = _split(_linear(x, self.w_query, self.b_query), self.num_heads)
        key = _split(_linear(source, self.w_key, self.b_key), self.num_kv_heads)
        value = _split(_linear(source, self.w_value, self.b_value), self.num_kv_heads)

        result = attention(query, key, value, **{"scale": self.scale, **options})
        if isinstance(result, AttentionResult):
            return result._replace(output=self._join(result.output))
        return self._join(result)

    def _join(self, heads: Array) -> Array:
        """(..., heads, L, d_k) side by side again, and projected."""
        side_by_side = heads.swapaxes(-3, -2)
        joined = side_by_side.reshape(*side_by_side.shape[:-2], self.d_model)
        return _linear(joined, self.w_output, self.b_output)

    def _check(self, name: str, array: Array, width: int) -> None:
        if array.ndim < 2 or array.shape[-1] != width:
            raise ValueError(f"{name} must have shape (..., length, {width}), got {array.shape}")
        if array.dtype != self.dtype:
            raise TypeError(f"{name} must be {self.dtype} like the weights, got {array.dtype}")


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    projected: Array = x @ weight
    if bias is not None:
        projected += bias
    return projected


def _split(projected: Array, heads: int) -> Array:
    """(..., L, heads·d_k) as (..., heads, L, d_k): a view, for the engine takes any strides."""
    d_k = projected.shape[-1] // heads
    return projected.reshape(*projected.shape[:-1], heads, d_k).swapaxes(-3, -2)


def _xavier_uniform(
    rng: np.random.Generator, inputs: int, outputs: int, dtype: np.dtype[Any]
) -> Array:
    limit = math.sqrt(6.0 / (inputs + outputs))
    return rng.uniform(-limit, limit, (inputs, outputs)).astype(dtype)
