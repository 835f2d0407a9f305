"""What a watch hands to the places that keep it: one record per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ._health import Evidence, GradHealth, Health, Judgement, Thresholds, judge
from ._health.describe import place

# What a step belongs to. Nobody knows of a step without gradients whether training will follow: it
# is "inference" at first, and "before training" from the first training step on.
TRAINING, INFERENCE, BEFORE_TRAINING = PHASES = ("training", "inference", "before training")


@dataclass(frozen=True)
class Alert:
    """A head whose verdict has turned worse; phase: of its step, one of PHASES."""

    step: int
    layer: str
    head: int
    verdict: str
    level: str
    previous: str
    value: float  # of the statistic that the verdict rests on
    reason: str
    hint: str
    phase: str = TRAINING

    def __str__(self) -> str:
        phase = "" if self.phase == TRAINING else f"{self.phase}, "
        return (
            f"{phase}step {self.step}, {place(self.layer)}, head {self.head}: "
            f"{self.verdict} (was {self.previous}); {self.reason}. What to do: {self.hint}"
        )


@dataclass(frozen=True)
class StepRecord:
    """One recorded step: per layer (dotted module name) the statistics of its heads.

    health:    layer → Health of shape (Hq,), merged over the batch and all calls of the step
    gradients: layer → GradHealth of shape (Hq,), for layers whose backward ran
    alerts: heads that turned worse in this step
    thresholds: those that were changed, by name
    phase: "training"; or "inference", a step without gradients that no training came before
    scalars: by name what was logged at this very step, such as the loss
    means: of what was logged since the previous recorded step, up to this one; less noisy
    evidence, judged: the same as the judge sees it, and its verdicts on each layer's heads
    """

    step: int
    time: float  # seconds since 1970
    health: Mapping[str, Health]
    gradients: Mapping[str, GradHealth] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    phase: str = TRAINING
    scalars: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def evidence(self) -> Evidence:
        return Evidence(self.health, self.gradients)

    @cached_property
    def judged(self) -> dict[str, Judgement]:
        return judge(self.evidence, Thresholds().changed(self.thresholds))
