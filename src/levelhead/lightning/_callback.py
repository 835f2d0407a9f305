"""Watching a model that Lightning's Trainer trains."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._records import StepRecord
from ..store._trackers import trainer_metrics
from ..torch.watching import DrivenWatch, watch

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Of the Trainer's arguments what says how it trains.
_ARGUMENTS = (
    *("accumulate_grad_batches", "gradient_clip_val", "max_steps", "max_epochs", "precision"),
)


def _callback_class() -> type[Any]:
    """`Callback` of the package that is imported already, or else of one that is installed.

    Their classes are the same, line by line, and each trainer takes the other's callbacks.
    """
    missing = None
    for package in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            found: type[Any] = importlib.import_module(package).Callback
        except ImportError as error:
            missing = error
        else:
            return found
    raise ImportError(
        "levelhead.lightning needs Lightning: pip install lightning", name="lightning"
    ) from missing


class WatchCallback(_callback_class()):  # type: ignore[misc]
    """Watch the attention of the module that a Lightning Trainer fits.

    >>> from levelhead.lightning import WatchCallback
    >>> def fit(Trainer, module, data):
    ...     Trainer(callbacks=[WatchCallback(every=50, store="run.db")]).fit(module, data)

    every: record each so many steps; steps have the Trainer's global_step at their beginning
    store: a file for `levelhead report`; None keeps none. A fit that goes on from a checkpoint
        goes on in the latest run of that name (without a name: of that class of module).
    name, meta: of the run in the store; its arguments are those of the Trainer that say how it
        trains, and the module's hyperparameters that are plain values
    options: the others of `levelhead.torch.watch`

    Each step's loss, as training_step returns it, is kept with it. All loggers of the module get
    every recorded step in at most 12 scalars, attention/…, whatever log_every_n_steps is. The
    sanity check and validation are in no step.

    watch: the `levelhead.torch.watch` of the fit, for its summary(), report() and findings()
    """

    def __init__(
        self,
        every: int = 50,
        store: str | os.PathLike[str] | Any | None = "run.db",
        *,
        name: str | None = None,
        meta: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        options |= {"every": every, "store": store, "name": name, "meta": meta}
        self._driven = DrivenWatch(options, self._log)
        self._loggers: list[Any] = []
        self._batch: tuple[int, int] | None = None

    @property
    def watch(self) -> watch | None:
        return self._driven.watch

    # ------------------------------------------------------------ Lightning's events

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch, after the sanity check."""
        self._loggers, self._batch = pl_module.loggers, None
        self._driven.begin(
            pl_module,
            trainer.global_step,
            training=trainer,
            arguments={
                **{name: _plain(getattr(trainer, name, None)) for name in _ARGUMENTS},
                **{name: value for name, value in pl_module.hparams.items() if _is_plain(value)},
            },
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the loss; end the step if the optimizer has stepped."""
        batch_id = trainer.current_epoch, batch_idx
        if batch_id == self._batch:  # this callback stands in the list twice
            return
        self._batch = batch_id
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
        self._driven.take_loss(loss)
        self._driven.end_step(trainer.global_step, mean=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the watch and its run."""
        self._driven.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, and quietly: the error is what there is to tell."""
        self._driven.close(broken_off=True)

    def _log(self, record: StepRecord) -> None:
        for logger in self._loggers:
            logger.log_metrics(trainer_metrics(record), step=record.step)


def _plain(value: Any) -> Any:
    return value if _is_plain(value) else str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
