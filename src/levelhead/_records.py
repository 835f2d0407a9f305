"""What a watch hands to the places that keep it: one record per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ._health import Evidence, Finding, GradHealth, Health, Judgement, Thresholds, judge
from ._health.findings import HEAD, LAYER
from ._health.judge import Heads
from ._health.numbers import place
from .scaling import ScaleInUse

# What a step belongs to. Nobody knows of a step without gradients whether training will follow: it
# is "inference" at first, and "before training" from the first training step on.
TRAINING, INFERENCE, BEFORE_TRAINING = PHASES = ("training", "inference", "before training")


@dataclass(frozen=True)
class Alert:
    """Something turned bad, got worse, or (level "ok") is over.

    step:    when it was raised
    layer, head: the worst head, where several are concerned
    verdict: the finding's name
    previous: the level that was told of before; "" for nothing
    value:   the first number that it rests on
    hint:    what to do; "" where it was said before
    phase:   of its step, one of PHASES
    scope:   "head", "layer" or "model"
    heads:   how many are concerned
    since:   the first step at which it was so
    """

    step: int
    layer: str
    head: int
    verdict: str
    level: str
    previous: str
    value: float
    reason: str
    hint: str
    phase: str = TRAINING
    scope: str = HEAD
    heads: int = 1
    since: int | None = None

    def __str__(self) -> str:
        phase = "" if self.phase == TRAINING else f"{self.phase}, "
        began = self.step if self.since is None else self.since
        steps = f"step {self.step}" if began >= self.step else f"steps {began} to {self.step}"
        where = f"{place(self.layer)}, head {self.head}"
        if self.scope != HEAD:
            where = place(self.layer) if self.scope == LAYER else "the model"
        elif self.heads > 1:
            where = f"{self.heads} heads, the worst {where}"
        said = f"{phase}{steps}, {where}: {self.verdict} ({self.level}); {self.reason}."
        return f"{said} What to do: {self.hint}" if self.hint else said


@dataclass(frozen=True)
class StepRecord:
    """One recorded step: per layer (dotted module name) the statistics of its heads.

    health:    layer → Health of shape (Hq,), merged over the batch and all calls of the step
    gradients: layer → GradHealth of shape (Hq,), for layers whose backward ran
    alerts: what turned bad, got worse, or recovered in this step
    thresholds: those that were changed, by name
    phase: "training"; or "inference", a step without gradients that no training came before
    course: what the course of the run says at this step; None if it is not known
    scales: layer → the scale rule in use
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
    course: tuple[Finding, ...] | None = None
    scales: Mapping[str, ScaleInUse] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def evidence(self) -> Evidence:
        trains = self.phase == TRAINING
        return Evidence(self.health, self.gradients, self.course, self.scales, trains)

    @cached_property
    def judged(self) -> dict[str, Judgement]:
        return judge(self.evidence, Thresholds().changed(self.thresholds))

    def judged_by(self, heads: Heads) -> StepRecord:
        """The same; whoever judged it already has worked out much of the rest."""
        verdicts = {layer: Judgement(heads, place) for layer, place in heads.places.items()}
        self.__dict__.update(evidence=heads.evidence, judged=verdicts)
        return self
