"""How trainings ended, by outcome and intervention, and what raised an alarm on the way."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._health import Evidence, GradHealth, Health, History, Thresholds
from .._health.judge import Heads
from .._health.verdicts import LOUD
from ..scaling import ScaleInUse, in_use, scale_rule
from ._figures import Array
from ._sweep import REFERENCES, USUAL, Setting, Trace, mended, train
from ._transformer import Shape

WINDOW = 20  # steps over which a loss is averaged
HEALTHY, FAILED = 0.05, 0.2  # behind the healthy path, as a share of what it gains
OUT = 0.15  # above every sound run by so much, a loss has left the healthy path
PATIENCE = 2  # a run that is behind may go on for so many times its steps

Kept = Mapping[str, Any]
Ending = tuple[str, str]  # "healthy", "between", "slow" or "failed"; and the cause of a failure


# ---------------------------------------------------------------- traces, as kept in a file


def keep(trace: Trace) -> dict[str, Any]:
    """A trace as JSON takes it."""

    def packed(array: Array) -> str:
        return base64.b85encode(zlib.compress(array.astype(np.float32).tobytes())).decode()

    return {
        "loss": np.nan_to_num(trace.loss, nan=np.inf).clip(-1e6, 1e6).tolist(),
        "grad_norm": np.nan_to_num(trace.grad_norm, nan=1e6, posinf=1e6).tolist(),
        "layers": [list(layer) for layer in trace.layers],
        "sums": packed(trace.sums),
        "grad_sums": packed(trace.grad_sums),
    }


def trained(setting: Setting, recorded: bool) -> dict[str, Any]:
    """What is kept of a training: its trace, or without a record its loss alone."""
    kept = keep(train(setting, recorded))
    return kept if recorded else {"loss": kept["loss"]}


def scale_of(setting: Setting) -> ScaleInUse:
    """The scale of a run's layers."""
    shape = Shape(**USUAL | dict(setting.shape))
    d_model = shape.heads * shape.d_k
    scale = shape.factor * scale_rule(shape.rule)(shape.d_k, d_model)
    return in_use(scale, shape.d_k, d_model)


def moments(kept: Kept, every: int) -> Iterator[tuple[int, Evidence, float]]:
    """Step, statistics and mean loss since the last one, for every so many steps."""
    heads = sum(many for _, many in kept["layers"])

    def unpacked(name: str) -> Array:
        raw = np.frombuffer(zlib.decompress(base64.b85decode(kept[name])), np.float32)
        return raw.reshape(len(kept["loss"]), heads, -1).astype(np.float64)

    sums, grad_sums, loss = unpacked("sums"), unpacked("grad_sums"), np.array(kept["loss"])
    for step in range(0, len(loss), every):
        health, gradients, first = {}, {}, 0
        for layer, many in kept["layers"]:
            part = slice(first, first + many)
            health[layer], gradients[layer] = (
                Health(sums[step, part]),
                GradHealth(grad_sums[step, part]),
            )
            first += many
        mean = float(loss[max(0, step - every + 1) : step + 1].mean())
        yield step, Evidence(health, gradients, ()), mean


# ---------------------------------------------------------------- how it ended


@dataclass(frozen=True)
class HealthyPath:
    """The course of the sound runs of a task: their median, their worst, and what they gain."""

    median: Array
    worst: Array
    gain: float

    @classmethod
    def of(cls, losses: Sequence[Sequence[float]]) -> HealthyPath:
        smooth = np.array([smoothed(loss) for loss in losses])
        median = np.median(smooth, axis=0)
        start = float(np.median([loss[0] for loss in losses]))
        # Where nothing can be learned, a twentieth of the loss still is a difference.
        return cls(median, smooth.max(axis=0), max(start - float(median[-1]), 0.05 * start))

    def behind(self, loss: Sequence[float]) -> float:
        """How far a run ended above the median, as a share of what the median gained."""
        return float((smoothed(loss)[-1] - self.median[-1]) / self.gain)

    def left_at(self, loss: Sequence[float]) -> int | None:
        """The step at which a loss left the healthy path for good."""
        out = smoothed(loss) > self.worst + OUT * self.gain
        stays = np.array([out[step:].mean() > 0.9 for step in range(len(out))])
        steps = np.flatnonzero(out & stays)
        steps = steps[steps >= WINDOW]
        return int(steps[0]) if steps.size else None


def smoothed(loss: Sequence[float]) -> Array:
    """The mean over the last steps."""
    sums = np.concatenate([[0.0], np.cumsum(np.clip(loss, -1e3, 1e3))])
    steps = np.arange(1, len(loss) + 1)
    first = np.maximum(steps - WINDOW, 0)
    means: Array = (sums[steps] - sums[first]) / (steps - first)
    return means


def ending(
    setting: Setting, loss: Sequence[float], path: HealthyPath, again: Callable[[Setting], Kept]
) -> Ending:
    """How a run ended ("healthy", "between", "slow" or "failed"), and the cause of a failure.

    again: trains a setting; a run that is behind goes on, and one that failed is tried with the
        cures of attention: if one of them ends well, attention was the cause
    """
    behind = path.behind(loss)
    if behind <= FAILED:
        return ("healthy" if behind <= HEALTHY else "between"), ""
    if not setting.fault:
        longer = again(replace(setting, more=PATIENCE * setting.steps))
        if path.behind(longer["loss"]) <= HEALTHY:
            return "slow", ""
    for cure in mended(setting):
        if path.behind(again(cure)["loss"]) <= 2 * HEALTHY:
            return "failed", "attention"
    return "failed", "other"


def path_of(losses: Sequence[Sequence[float]]) -> HealthyPath:
    """The healthy path of a task, from all its losses: the first are those of sound runs."""
    return HealthyPath.of(losses[:REFERENCES])


# ---------------------------------------------------------------- what raised an alarm

Alarm = tuple[int | None, str]
NO_ALARM: Alarm = (None, "")


def by_course(
    kept: Kept, scale: ScaleInUse, every: int, thresholds: Thresholds | None = None
) -> Alarm:
    """The first alarm of the judge, as a watch raises it, and its name."""
    at = thresholds or Thresholds()
    history = History(at)
    scales = {layer: scale for layer, _ in kept["layers"]}
    for step, seen, loss in moments(kept, every):
        evidence = replace(seen, scales=scales)
        history.observe(step, Heads(evidence, at), loss)
        loud = [finding for finding in history.findings if finding.level in LOUD]
        if loud:
            return step, loud[0].name
    return NO_ALARM


def by_head(kept: Kept, every: int) -> Alarm:
    """The first head that the fixed thresholds of a single moment call bad."""
    for step, evidence, _ in moments(kept, every):
        heads = Heads(replace(evidence, course=None), Thresholds())
        if (heads.worst < len(LOUD)).any():
            return step, "a head"
    return NO_ALARM


def by_statistic(kept: Kept, every: int, statistic: str, limits: Sequence[float]) -> list[Alarm]:
    """For each limit the first step at which a statistic of the whole model passes it."""
    found: list[Alarm] = [NO_ALARM for _ in limits]
    for step, evidence, _ in moments(kept, every):
        heads = Heads(evidence, Thresholds())
        if statistic == "largest_score":
            value = float(np.nanmax(heads.values(statistic), initial=0.0))
            passed = [value > limit for limit in limits]
        else:
            values = heads.values(statistic)
            value = float(np.nanmean(values)) if np.isfinite(values).any() else np.nan
            passed = [value < limit for limit in limits]
        found = [
            (step, statistic) if now and alarm is NO_ALARM else alarm
            for now, alarm in zip(passed, found, strict=True)
        ]
    return found


def by_gradient_norm(kept: Kept, limits: Sequence[float]) -> list[Alarm]:
    """For each limit the first step whose gradient is so many times as large as lately."""
    norms = np.array(kept["grad_norm"])
    lately = [np.median(norms[max(0, step - 50) : step]) for step in range(20, len(norms))]
    ratio = norms[20:] / np.maximum(lately, 1e-12)
    steps = (np.flatnonzero(ratio > limit) for limit in limits)
    return [(20 + int(each[0]), "gradient norm") if each.size else NO_ALARM for each in steps]


def described(setting: Setting) -> str:
    """A setting in short, for a table."""
    shape = dict(setting.shape)
    parts = [shape.get("rule", "sqrt_dk"), f"d_k {shape.get('d_k', 16)}", shape["norm"]]
    if shape.get("factor", 1.0) != 1.0:
        parts[0] = f"{shape['factor']:g}/√d_k"
    parts += ["QK-norm"] * bool(shape.get("qk_norm")) + [setting.optimiser, f"{setting.rate:g}"]
    parts += [f"{setting.fault} at {setting.fault_at}"] * bool(setting.fault)
    return ", ".join(parts)


def identity(setting: Setting) -> str:
    """A setting as text, the same for the same setting."""
    return json.dumps([getattr(setting, name) for name in setting.__dataclass_fields__])
