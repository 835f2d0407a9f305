"""Scalars for the trackers of experiments: few numbers that say how a whole model is."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .._health import Floats, GradHealth
from .._health.verdicts import LOUD, ranked
from .._hints import shown
from .._records import TRAINING, StepRecord
from ._check import check_record
from ._sink import Sink

PREFIX = "attention/"
_LARGEST = "largest_score"
_MEDIANS = (_LARGEST, "entropy_ratio", "signal", "survival")


def attention_scalars(record: StepRecord, *, heads: bool = False) -> dict[str, float]:
    """A step in at most eleven numbers, however many layers and heads there are.

    >>> import numpy as np, levelhead as lh
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 32, 64))
    >>> health = lh.attention(30 * q, k, v, return_health=True).health
    >>> scalars = attention_scalars(StepRecord(0, 0.0, {"attn": health}))
    >>> scalars["attention/largest_score_head"], scalars["attention/heads_saturated"]
    (0, 1)

    heads: also the same statistics of every head, as attention/LAYER/HEAD/entropy_ratio

    The largest |score| with the layer (counted from 0 in the order of the record) and the head that
    has it, medians over all heads, and how many heads have each verdict that may call for action.
    What is not known, such as the survival of gradients without a backward pass, is left out.
    """
    found: dict[str, float] = {}
    largest = _by_layer(record, _LARGEST)
    known = [
        (float(np.nanmax(values)), place, int(np.nanargmax(values)))
        for place, values in enumerate(largest.values())
        if not np.isnan(values).all()
    ]
    if known:
        worst = max(known, key=lambda each: each[0])
        found |= dict(zip((_LARGEST, f"{_LARGEST}_layer", f"{_LARGEST}_head"), worst, strict=True))
    for statistic in _MEDIANS:
        values = np.concatenate([np.empty(0), *_by_layer(record, statistic).values()])
        if not np.isnan(values).all():
            found[f"{statistic}_median"] = float(np.nanmedian(values))
    verdicts = Counter(name for judged in record.judged.values() for name in judged.names)
    found |= {
        f"heads_{name}": verdicts[name]
        for name, rule in ranked().items()
        if any(case.level in LOUD for case in rule.cases)
    }
    if heads:
        found |= _all_heads(record)
    before = "" if record.phase == TRAINING else f"{record.phase}/"
    return {f"{before}{PREFIX}{name}": value for name, value in found.items()}


def trainer_metrics(record: StepRecord) -> dict[str, float]:
    """What a trainer logs of a step: twelve scalars at most, which step it was among them."""
    return {f"{PREFIX}step": int(record.step), **attention_scalars(record)}


def _by_layer(record: StepRecord, statistic: str) -> dict[str, Floats]:
    layers = record.gradients if statistic in GradHealth.FIELDS else record.health
    return {name: np.asarray(getattr(part, statistic)) for name, part in layers.items()}


def _all_heads(record: StepRecord) -> Iterator[tuple[str, float]]:
    for statistic in _MEDIANS:
        for layer, values in _by_layer(record, statistic).items():
            for head, value in enumerate(values.tolist()):
                if not np.isnan(value):
                    yield f"{layer or 'outside_any_module'}/{head}/{statistic}", value


class Scalars(Sink):
    """A sink for any tracker: calls `log(scalars, step)` with a dict of few numbers.

    >>> import numpy as np, levelhead as lh
    >>> from levelhead.store import Scalars, StepRecord
    >>> def log(scalars, step):
    ...     print(step, sorted(scalars)[:2])
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 32, 64))
    >>> health = lh.attention(q, k, v, return_health=True).health
    >>> Scalars(log)(StepRecord(7, 0.0, {"attn": health}))
    7 ['attention/entropy_ratio_median', 'attention/heads_collapsed']

    log:   wandb.log, mlflow.log_metrics, trackio.log, accelerator.log, or a function of yours
    heads: also the statistics of every head, which are layers × heads × 4 numbers a step

    The names begin with "attention/"; those of steps of inference with "inference/attention/". What
    was logged by `watch.log` is left out: whoever has a tracker has it there.
    """

    def __init__(self, log: Callable[..., Any], *, heads: bool = False) -> None:
        if not callable(log):
            raise TypeError(
                f"log: expected a function log(scalars, step) such as wandb.log, got {shown(log)}"
            )
        self._log, self.heads = log, heads

    def __call__(self, record: StepRecord) -> None:
        """Log one step."""
        check_record(record)
        self._log(attention_scalars(record, heads=self.heads), int(record.step))

    def log(self, step: int, scalars: Mapping[str, float], phase: str = TRAINING) -> None:
        """Does nothing: see the class."""

    def close(self) -> None:
        """Does nothing: the tracker belongs to whoever made it."""


class WandB(Scalars):
    """Scalars for Weights & Biases, beside what the training logs there by itself.

    run: what `wandb.init()` returned; by default the run that is active when a step comes
    heads: as for `Scalars`

    Charts have the step of the watch as their axis, attention/step: W&B's own step grows with
    every call of `wandb.log`, and takes none that is smaller.
    """

    def __init__(self, run: Any = None, *, heads: bool = False) -> None:
        self._wandb = _needed("wandb", "the W&B sink")
        if run is not None and not hasattr(run, "define_metric"):
            raise TypeError(f"run: expected what wandb.init() returns, got {shown(run)}")
        self._run, self._defined = run, None
        super().__init__(self._send, heads=heads)

    def _send(self, scalars: Mapping[str, float], step: int) -> None:
        run = self._wandb.run if self._run is None else self._run
        if run is None:
            raise RuntimeError("WandB: there is no active run: call wandb.init() before training")
        axis = f"{PREFIX}step"
        if run is not self._defined:
            run.define_metric(axis, hidden=True)
            for name in (f"{PREFIX}*", f"inference/{PREFIX}*"):
                run.define_metric(name, step_metric=axis)
            self._defined = run
        run.log({**scalars, axis: step})


class MLflow(Scalars):
    """Scalars for MLflow.

    run_id: of the run; by default the active one, which MLflow begins if there is none
    heads: as for `Scalars`
    """

    def __init__(self, run_id: str | None = None, *, heads: bool = False) -> None:
        mlflow = _needed("mlflow", "the MLflow sink")

        def send(scalars: Mapping[str, float], step: int) -> None:
            mlflow.log_metrics(dict(scalars), step=step, run_id=run_id)

        super().__init__(send, heads=heads)


def _needed(package: str, who: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{who} needs {package}: pip install {package}", name=package) from error
