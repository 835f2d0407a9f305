"""Every statistic by its name for readers, in the order they are shown."""

from __future__ import annotations

from typing import NamedTuple


class Field(NamedTuple):
    """A statistic's label and its meaning in a few words."""

    label: str
    meaning: str


FIELDS: dict[str, Field] = {
    "score_max": Field("largest score", "scale·q·k, before softmax"),
    "score_min": Field("smallest score", "scale·q·k, before softmax"),
    "score_mean": Field("mean score", "over all visible pairs"),
    "score_var": Field("score variance", "1 is what 1/√d_k aims at"),
    "large_scores": Field("large scores", "share of pairs with |score| > 100"),
    "entropy": Field("entropy", "mean over rows, in nats"),
    "entropy_ratio": Field("entropy ratio", "of its maximum; 1 is uniform, 0 one-hot"),
    "effective_keys": Field("effective keys", "how many keys a row really looks at"),
    "top_weight": Field("top weight", "mean of each row's largest weight"),
    "saturated": Field("saturated rows", "share of rows with a weight over 0.99"),
    "signal": Field("signal", "trace of the softmax's Jacobian; 0 passes no gradient"),
    "jacobian_norm": Field("Jacobian norm", "Frobenius norm of the softmax's Jacobian"),
    "first_key": Field("first key", "mean weight on key 0"),
    "distance": Field("distance", "mean distance to what is attended, in positions"),
    "null_mass": Field("null mass", "weight taken by a learned sink"),
    "rows": Field("rows", "query rows"),
    "pairs": Field("pairs", "visible pairs of query and key"),
    "empty_rows": Field("empty rows", "rows that see no key"),
    "nonfinite_rows": Field("nonfinite rows", "rows with a NaN or infinite score"),
    "widest_row": Field("widest row", "the most keys that any row sees"),
}
GRADIENT_FIELDS: dict[str, Field] = {
    "survival": Field("gradient survival", "share of gradient that gets through the softmax"),
    "weight_grad_norm": Field("weight gradient", "norm of the loss's gradient by the weights"),
    "score_grad_norm": Field("score gradient", "norm of the loss's gradient by the scores"),
}
