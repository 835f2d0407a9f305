"""Attention as modules: multi-head with its options, and its rivals."""

from ._additive import AdditiveAttention
from ._cosine import CosineAttention
from ._multihead import MultiHeadAttention

__all__ = ["AdditiveAttention", "CosineAttention", "MultiHeadAttention"]
