"""Levelhead: scaled dot-product attention that reports its own health."""

from . import scaling
from ._attention import attention, attention_backward, cpu_info
from ._health import GradHealth, Health, Thresholds, Verdict
from ._multihead import MultiHeadAttention
from ._records import Alert, StepRecord
from ._reference import reference, reference_backward
from ._result import AttentionGradients, AttentionResult
from ._rivals import additive_attention, cosine_attention, unscaled_attention

__all__ = [
    "Alert",
    "AttentionGradients",
    "AttentionResult",
    "GradHealth",
    "Health",
    "MultiHeadAttention",
    "StepRecord",
    "Thresholds",
    "Verdict",
    "additive_attention",
    "attention",
    "attention_backward",
    "cosine_attention",
    "cpu_info",
    "reference",
    "reference_backward",
    "scaling",
    "unscaled_attention",
]

__version__ = "0.1.0"
