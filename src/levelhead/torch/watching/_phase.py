"""What a watch found in one phase of a run: in training, in inference, or before training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..._health import Finding, GradHealth, Health, Thresholds
from ..._health.trends import Loss
from ..._records import Alert, StepRecord
from ...scaling import ScaleInUse, in_use
from ._accumulator import Accumulator, Statistics
from ._alerts import Alerts
from ._calls import Call, entries
from ._ranks import Ranks
from ._scalars import Scalars
from ._transfers import Transfers


class Sums:
    """Health and gradients by layer."""

    def __init__(self) -> None:
        self.health, self.gradients = Accumulator[Health](), Accumulator[GradHealth]()

    def add(self, other: Phase | StepRecord) -> None:
        self.health.add_all(other.health)
        self.gradients.add_all(other.gradients)

    def clear(self) -> None:
        self.health.clear()
        self.gradients.clear()


class Phase:
    """The steps of one phase, with a count of their own.

    health, gradients: per layer (dotted module name), over all recorded steps; once ranks have
        merged theirs, of what was merged
    calls, alerts: how many calls were counted; the heads that turned worse
    is_merged: whether several ranks have merged something
    """

    def __init__(
        self, name: str, thresholds: Mapping[str, float], ranks: Ranks, step: int = 0
    ) -> None:
        self.name, self.step, self.is_merged = name, step, False
        self.alerts: list[Alert] = []
        self._thresholds, self._ranks = thresholds, ranks
        self._alerts = self._new_alerts()
        self._scales: dict[str, ScaleInUse] = {}
        # In this step; recorded before it; recorded on this rank, and not merged with others.
        self._now, self._before, self._alone = Sums(), Sums(), Sums()
        self._transfers = Transfers()  # of sums of this step
        self._calls = [0, 0]  # before this step, in it
        self._recorded = (0, -1)  # the first and the last step that were

    def _new_alerts(self) -> Alerts:
        return Alerts(self.name, Thresholds().changed(self._thresholds))

    @property
    def _shown(self) -> tuple[Sums, ...]:
        self._transfers.fetch()
        return (self._before,) if self.is_merged else (self._before, self._alone, self._now)

    @property
    def health(self) -> dict[str, Health]:
        return together(*(sums.health.merged() for sums in self._shown))

    @property
    def gradients(self) -> dict[str, GradHealth]:
        gradients = together(*(sums.gradients.merged() for sums in self._shown))
        return in_order_of(self.health, gradients)

    @property
    def calls(self) -> int:
        return sum(self._calls)

    def __bool__(self) -> bool:
        """Whether the current step has seen a call."""
        return self._calls[1] > 0

    @property
    def course(self) -> tuple[Finding, ...]:
        """What the course of the phase says now."""
        return self._alerts.course

    @property
    def loss(self) -> Loss:
        """The course of the loss."""
        return self._alerts.loss

    def add_call(self, layer: str, call: Call, width: int) -> None:
        """width: of the model."""
        self._calls[1] += 1
        health, dk = self._now.health, call.dk  # the call itself must not be held

        def keep_scale(scale: float) -> None:
            self._scales[layer] = in_use(scale, dk, width)

        self._transfers.add(call.sums, lambda sums: health.add(layer, Health(entries(sums))))
        if call.scales is None:
            keep_scale(call.scale)
        else:
            self._transfers.add(call.scales, lambda scales: keep_scale(float(scales.mean())))

    def add_gradients(self, layer: str, sums: Tensor) -> None:
        gradients = self._now.gradients
        self._transfers.add(sums, lambda sums: gradients.add(layer, GradHealth(entries(sums))))

    def record(self, *joined: Phase, scalars: Scalars) -> StepRecord:
        """What is known of the current step, and of that of other phases, without alerts."""
        return self._record([phase._now for phase in (self, *joined)], joined, scalars)

    def _record(self, parts: list[Sums], joined: tuple[Phase, ...], scalars: Scalars) -> StepRecord:
        scalars.send(self._transfers)
        for phase in (self, *joined):
            phase._transfers.fetch()
        health = together(*(sums.health.merged() for sums in parts))
        gradients = together(*(sums.gradients.merged() for sums in parts))
        return StepRecord(
            *(self.step, time.time(), health, in_order_of(health, gradients)),
            thresholds=self._thresholds,
            phase=self.name,
            course=self.course,
            scales={layer: each for layer, each in self._scales.items() if layer in health},
            scalars=scalars.numbers(),
            means=scalars.means(),
        )

    def end_step(self, *joined: Phase, scalars: Scalars, merge: bool) -> StepRecord | None:
        """The record of the current step, if it has seen any call; another begins.

        merge: with the other ranks, if there are any; a call that one of them has seen counts
        """
        record, several = None, self._ranks.several
        if any((self, *joined)) or (merge and several):
            record = self.record(*joined, scalars=scalars)
        if record is not None and merge and several:
            record, self.is_merged = self._ranks.merge(record), True
        if record is not None and record.health:
            kept = self._alone if several and not merge else self._before
            record = self._keep(record, kept, self._alerts)
        return self._begin_step(record, joined, scalars)

    def merge(self, *joined: Phase, scalars: Scalars) -> StepRecord | None:
        """What all ranks have seen and not merged so far, as one step; another begins."""
        phases = (self, *joined)
        parts = [sums for phase in phases for sums in (phase._alone, phase._now)]
        record = self._ranks.merge(self._record(parts, joined, scalars), asked=True)
        self.is_merged = True
        if not record.health:
            return None
        for phase in phases:
            phase._alone.clear()
        self.step = record.step
        # By itself: what the ranks were told before is not the same.
        self._alerts = self._new_alerts()
        return self._begin_step(self._keep(record, self._before, self._alerts), joined, scalars)

    def _keep(self, record: StepRecord, kept: Sums, alerts: Alerts) -> StepRecord:
        """Judge a record and add it to what is known."""
        kept.add(record)
        record = alerts.judge(record, record.means.get("loss"))
        self.alerts += record.alerts
        first, last = self._recorded
        self._recorded = (self.step if last < first else first, self.step)
        return record

    def _begin_step(
        self, record: StepRecord | None, joined: tuple[Phase, ...], scalars: Scalars
    ) -> StepRecord | None:
        """Whose record is of the step that ends; it is returned if it has any health."""
        record = record if record is not None and record.health else None
        self._calls[0] += sum(phase.forget_step() for phase in (self, *joined))
        self.step += 1
        scalars.end_step(recorded=record is not None)
        return record

    def forget_step(self) -> int:
        """Begin the current step anew; how many calls it had seen."""
        calls, self._calls[1] = self._calls[1], 0
        self._now.clear()
        self._transfers.clear()
        return calls

    def take_over(self, phase: Phase) -> None:
        """Add what another phase recorded; its steps are numbered back from the first here."""
        before, (first, last) = self._recorded[0], phase._recorded
        if last < first:
            return
        back = last + 1 - before
        self._recorded = (first - back, -1)
        self._calls[0] += phase.calls
        self._before.add(phase)
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
