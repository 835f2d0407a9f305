"""Levelhead for PyTorch: attention on tensors, modules, and watching models."""

from . import nn
from ._attention import attention, scaled_dot_product_attention
from ._calls import Call
from ._listen import listen
from ._watch import watch

__all__ = ["Call", "attention", "listen", "nn", "scaled_dot_product_attention", "watch"]
