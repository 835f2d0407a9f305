"""Levelhead for PyTorch: attention on tensors, modules, and watching models."""

try:
    from . import nn
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        'levelhead.torch needs PyTorch: pip install "levelhead[torch]"', name="torch"
    ) from error
from ._attention import attention, scaled_dot_product_attention
from .watching import Call, listen, watch

__all__ = ["Call", "attention", "listen", "nn", "scaled_dot_product_attention", "watch"]
