"""Levelhead: scaled dot-product attention that reports its own health."""

from ._attention import attention, attention_backward, cpu_info
from ._health import GradHealth, Health, Thresholds, Verdict
from ._multihead import MultiHeadAttention
from ._records import Alert, StepRecord
from ._reference import reference, reference_backward
from ._result import AttentionGradients, AttentionResult
from ._rivals import additive_attention, cosine_attention, unscaled_attention
from ._scaling import SCALE_RULES, dk, none, scale_rule, sqrt_dk, sqrt_dmodel

__all__ = [
    "SCALE_RULES",
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
    "dk",
    "none",
    "reference",
    "reference_backward",
    "scale_rule",
    "sqrt_dk",
    "sqrt_dmodel",
    "unscaled_attention",
]

__version__ = "0.1.0"
