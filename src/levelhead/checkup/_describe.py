"""One head in plain numbers and words: its verdict, the reason, every statistic."""

from __future__ import annotations

from typing import Any

from .._health import Health, Thresholds

SHORT = {
    "verdict": "short",
    "level": "info",
    "reason": f"no row sees {Thresholds.min_keys} keys or more, which is too little to judge by",
    "hint": "check it on a longer input",
    "also": [],
}


def describe(health: Health) -> list[dict[str, Any]]:
    """The heads of a Health in order, each as a dict that JSON can hold.

    >>> import numpy as np, levelhead as lh
    >>> from levelhead.checkup._describe import describe
    >>> q = np.eye(4)[None]
    >>> head, = describe(lh.reference(q, q, q, return_health=True).health)
    >>> head["verdict"], head["rows"]
    ('short', 4)
    """
    merged = health.over_batch()
    fields = merged.to_dict()
    judged = {verdict.head: verdict for verdict in merged.verdicts()}
    return [
        {
            "head": head,
            **(SHORT if head not in judged else _words(judged[head])),
            **{name: values[head] for name, values in fields.items()},
        }
        for head in range(merged.shape[-1])
    ]


def _words(verdict: Any) -> dict[str, Any]:
    words: dict[str, Any] = verdict._asdict()
    return {**words, "also": list(verdict.also)}
