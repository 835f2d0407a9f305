"""The specification: attention and its statistics in plain NumPy, dense, in float64."""

from .attention import dropout_keep, reference, reference_backward, softmax, weighted_sum

__all__ = ["dropout_keep", "reference", "reference_backward", "softmax", "weighted_sum"]
