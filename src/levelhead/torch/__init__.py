"""Levelhead for PyTorch: attention on tensors, modules, and watching models."""

from ._attention import attention, scaled_dot_product_attention

__all__ = ["attention", "scaled_dot_product_attention"]
