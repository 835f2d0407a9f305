"""What a watch found in one phase of a run: in training, in inference, or before training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ..._health import Finding, GradHealth, Health, Thresholds
from ..._records import Alert, StepRecord
from ...scaling import ScaleInUse
from ._accumulator import Accumulator, Statistics
from ._alerts import Alerts
from ._scalars import Scalars


class Phase:
    """The steps of one phase, with a count of their own.

    health, gradients: per layer (dotted module name), over all recorded steps
    calls, alerts: how many calls were counted; the heads that turned worse
    """

    def __init__(self, name: str, thresholds: Mapping[str, float], step: int = 0) -> None:
        self.name, self.step = name, step
        self.alerts: list[Alert] = []
        self._thresholds = thresholds
        self._alerts = Alerts(name, Thresholds().changed(thresholds))
        self._scales: dict[str, ScaleInUse] = {}
        self._step_health, self._step_gradients = (
            Accumulator[Health](),
            Accumulator[GradHealth](),
        )  # in this step
        self._health, self._gradients = (
            Accumulator[Health](),
            Accumulator[GradHealth](),
        )  # before it
        self._calls = [0, 0]  # before this step, in it
        self._recorded = (0, -1)  # the first and the last step that were

    @property
    def health(self) -> dict[str, Health]:
        return together(self._health.merged(), self._step_health.merged())

    @property
    def gradients(self) -> dict[str, GradHealth]:
        gradients = together(self._gradients.merged(), self._step_gradients.merged())
        return in_order_of(self.health, gradients)

    @property
    def calls(self) -> int:
        return sum(self._calls)

    def __bool__(self) -> bool:
        """Whether the current step has seen a call."""
        return bool(self._step_health)

    @property
    def course(self) -> tuple[Finding, ...]:
        """What the course of the phase says now."""
        return self._alerts.course

    def add_call(self, layer: str, health: Health, scale: ScaleInUse) -> None:
        self._calls[1] += 1
        self._step_health.add(layer, health)
        self._scales[layer] = scale

    def add_gradients(self, layer: str, gradients: GradHealth) -> None:
        self._step_gradients.add(layer, gradients)

    def record(self, *joined: Phase, scalars: Scalars) -> StepRecord:
        """What is known of the current step, and of that of other phases, without alerts."""
        health = together(*(phase._step_health.merged() for phase in (self, *joined)))
        gradients = together(*(phase._step_gradients.merged() for phase in (self, *joined)))
        return StepRecord(
            *(self.step, time.time(), health, in_order_of(health, gradients)),
            thresholds=self._thresholds,
            phase=self.name,
            course=self.course,
            scales={layer: each for layer, each in self._scales.items() if layer in health},
            scalars=scalars.numbers(),
            means=scalars.means(),
        )

    def end_step(self, *joined: Phase, scalars: Scalars) -> StepRecord | None:
        """The record of the current step, if it has seen any call; another begins."""
        record = None
        if any((self, *joined)):
            record = self.record(*joined, scalars=scalars)
            self._health.add_all(record.health)
            self._gradients.add_all(record.gradients)
            record = self._alerts.judge(record, record.means.get("loss"))
            self.alerts += record.alerts
            first, last = self._recorded
            self._recorded = (self.step if last < first else first, self.step)
        self._calls[0] += sum(phase.forget_step() for phase in (self, *joined))
        self.step += 1
        scalars.end_step(recorded=record is not None)
        return record

    def forget_step(self) -> int:
        """Begin the current step anew; how many calls it had seen."""
        calls, self._calls[1] = self._calls[1], 0
        self._step_health.clear()
        self._step_gradients.clear()
        return calls

    def take_over(self, phase: Phase) -> None:
        """Add what another phase recorded; its steps are numbered back from the first here."""
        before, (first, last) = self._recorded[0], phase._recorded
        if last < first:
            return
        back = last + 1 - before
        self._recorded = (first - back, -1)
        self._calls[0] += phase.calls
        self._health.add_all(phase.health)
        self._gradients.add_all(phase.gradients)
        self.alerts += (
            replace(
                alert,
                step=alert.step - back,
                since=None if alert.since is None else alert.since - back,
                phase=self.name,
            )
            for alert in phase.alerts
        )


def together(*parts: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """Per layer the statistics of all of them."""
    filled = [part for part in parts if part]
    if len(filled) == 1:
        return dict(filled[0])
    sums = Accumulator[Statistics]()
    for part in filled:
        sums.add_all(part)
    return sums.merged()


def in_order_of(
    health: Mapping[str, Health], gradients: Mapping[str, GradHealth]
) -> dict[str, GradHealth]:
    """Gradients arrive from the last layer to the first."""
    return {layer: gradients[layer] for layer in health if layer in gradients}
