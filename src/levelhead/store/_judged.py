"""The verdicts of a record, for every sink."""

from __future__ import annotations

import numpy as np

from .._health import Health, Verdict
from .._records import StepRecord


def judged(record: StepRecord) -> dict[str, dict[int, Verdict]]:
    """Per layer the verdict of each head, worst first; heads with too few keys have none."""
    verdicts: dict[str, dict[int, Verdict]] = {layer: {} for layer in record.health}
    if not verdicts:
        return verdicts
    # All layers at once as the heads of one: half the time of one call per layer.
    together = Health(np.concatenate([health.sums for health in record.health.values()]))
    places = [(layer, head) for layer, h in record.health.items() for head in range(h.shape[0])]
    for verdict in together.verdicts(**record.thresholds):
        layer, head = places[verdict.head]
        verdicts[layer][head] = verdict._replace(head=head)
    return verdicts
