"""What the operators return when more than one array is asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._health import GradHealth, Health
from ._health.describe import in_brief


class AttentionResult(NamedTuple):
    """The output of attention with whatever else was asked for; the rest is None.

    >>> import numpy as np, levelhead as lh
    >>> x = np.ones((3, 4), np.float32)
    >>> output, lse, weights, health = lh.attention(x, x, x, return_lse=True)
    >>> output.shape, lse.shape, weights, health
    ((3, 4), (3,), None, None)

    output:  (..., Hq, L, Dv)
    lse:     (..., Hq, L), natural log of each row's softmax denominator; -inf for an empty row
    weights: (..., Hq, L, S), the probabilities before dropout
    health:  statistics per head, shape (..., Hq)
    """

    output: Any
    lse: Any = None
    weights: Any = None
    health: Health | Any = None  # Any: who has asked for it need not check for None

    def __repr__(self) -> str:
        return _brief(self)

    def _repr_html_(self) -> str:
        from .report._notebook import result_html  # noqa: PLC0415

        return result_html(self)


class AttentionGradients(NamedTuple):
    """The gradients of query, key and value, each shaped like its input.

    >>> import numpy as np, levelhead as lh
    >>> x = np.ones((3, 4), np.float32)
    >>> r = lh.attention(x, x, x, return_lse=True)
    >>> dq, dk, dv, health = lh.attention_backward(x, x, x, x, r.output, r.lse)
    >>> dq.shape, dk.shape, dv.shape, health
    ((3, 4), (3, 4), (3, 4), None)

    health: how much gradient got through the softmax, per head; None unless asked for
    """

    dq: Any
    dk: Any
    dv: Any
    health: GradHealth | None = None

    def __repr__(self) -> str:
        return _brief(self)


def _brief(result: AttentionResult | AttentionGradients) -> str:
    """What there is, without all the numbers."""
    there = {name: value for name, value in result._asdict().items() if value is not None}
    parts = [
        f"{name}: {in_brief(value)}"
        if name == "health"
        else f"{name}: {value.dtype} {tuple(value.shape)}"
        for name, value in there.items()
    ]
    return f"{type(result).__name__}({', '.join(parts)})"
