"""Watching a model that transformers' Trainer trains."""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._hints import shown
from .._records import Alert, StepRecord
from ..store._trackers import trainer_metrics
from ..torch.watching import DrivenWatch, watch
from ..torch.watching._forwards import Hook, in_backward

ALERTS = "attention_alerts"  # in the log; no scalar, so not among them
# Of the Trainer's arguments what says how it trains; no paths, names or tokens.
_ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("optim", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"),
    *("num_train_epochs", "seed", "bf16", "fp16", "gradient_checkpointing"),
)


class WatchCallback(TrainerCallback):
    """Watch the attention of the model that a Trainer trains.

    >>> from levelhead.hf import WatchCallback
    >>> def train(model, args, data):
    ...     Trainer(model, args, train_dataset=data, callbacks=[WatchCallback(every=50)]).train()

    every: record each so many steps; steps have the Trainer's global_step at their beginning
    store: a file for `levelhead report`; None keeps none. A run that is resumed from a checkpoint
        goes on in it.
    name:  of the run in the store; by default the Trainer's run_name, or its output folder's name
    meta:  anything else to remember of the run
    options: the others of `levelhead.torch.watch`

    Each step's loss is kept with it. When the Trainer logs, `state.log_history` gets the newest
    recorded step in at most 12 scalars, attention/…, and new alerts once as a text,
    "attention_alerts". The Trainer's trackers are called before its callbacks: for them there is
    `levelhead.hf.watch_trainer`.

    watch: the `levelhead.torch.watch` of the training, for its summary(), report() and findings()
    """

    def __init__(
        self,
        every: int = 50,
        store: str | os.PathLike[str] | Any | None = "run.db",
        *,
        name: str | None = None,
        meta: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _need_accelerate()
        options |= {"every": every, "store": store, "name": name, "meta": meta}
        self._driven = DrivenWatch(options, self._take)
        self._record: StepRecord | None = None  # that is not in the log yet
        self._alerts: list[Alert] = []
        self._shares = False  # the losses of a step's batches are its parts, not each a loss
        self._is_first = False  # before all trackers, and told of the losses by the Trainer

    @property
    def watch(self) -> watch | None:
        return self._driven.watch

    def close(self) -> None:
        """Stop watching; needed only after a training that an error or Ctrl-C broke off."""
        self._driven.close(broken_off=True)

    # ------------------------------------------------------------ the Trainer's events

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Forget a training that was broken off. Evaluation before the first step is in none."""
        self.close()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begin to watch at the first step."""
        before, model = self._driven.is_on, kwargs["model"]
        on = self._driven.begin(
            model,
            state.global_step,
            training=state,
            name=args.run_name or PurePath(args.output_dir or "").name or None,
            arguments={name: _plain(args, name) for name in _ARGUMENTS if hasattr(args, name)},
        )
        if on and not before and not self._is_first:
            self._read_losses(model, args)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the step that the Trainer ends."""
        self._driven.end_step(state.global_step, mean=not self._shares)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add what is new to what the Trainer logs of its training."""
        if not logs or not logs.keys() & {"loss", "train_loss"} or not state.log_history:
            return
        entry: dict[str, Any] = state.log_history[-1]
        if self._record is not None:
            scalars = trainer_metrics(self._record)
            entry.update(scalars)
            if self._is_first:
                logs.update(scalars)
        if self._alerts:
            entry[ALERTS] = "\n".join(map(str, self._alerts))
        self._record, self._alerts = None, []

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the watch and its run."""
        self._driven.close()

    # ------------------------------------------------------------ records, losses

    def _take(self, record: StepRecord) -> None:
        self._record = record
        self._alerts += record.alerts

    def lead(self, trainer: Trainer) -> None:
        """Come before the Trainer's trackers, and take the losses as the Trainer has them."""
        self._is_first = self._shares = True
        trainer.callback_handler.callbacks.insert(0, self)
        step = trainer.training_step

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = step(*args, **kwargs)
            self._driven.take_loss(loss)
            return loss

        vars(trainer)["training_step"] = training_step

    def _read_losses(self, model: nn.Module, args: TrainingArguments) -> None:
        """Take the loss from what the model returns: a callback does not learn it otherwise."""

        def read(kwargs: dict[str, Any], output: Any) -> None:
            if not self._driven.is_on or not torch.is_grad_enabled() or in_backward():
                return
            is_tuple = isinstance(output, tuple) and len(output) > 0
            loss = output.get("loss") if isinstance(output, dict) else is_tuple and output[0]
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                # With the number of items it is a part of the step's loss, of all processes' even.
                self._shares = kwargs.get("num_items_in_batch") is not None
                across = self._shares and args.average_tokens_across_devices
                self._driven.take_loss(loss.detach() * (args.world_size if across else 1))

        hook = _OutputHook(read)
        self._driven.undo.append(model.register_forward_hook(hook, with_kwargs=True).remove)


class _OutputHook(Hook):
    """A hook on what a module returns, and by what keywords."""

    def __init__(self, read: Any) -> None:
        super().__init__(lambda: None)
        self._read = read

    def __call__(self, *given: Any) -> None:
        if not torch.compiler.is_compiling():
            _, _, kwargs, output = given
            self._read(kwargs, output)


def watch_trainer(trainer: Trainer, every: int = 50, **options: Any) -> WatchCallback:
    """Watch what a Trainer trains, and show it in all its trackers, W&B and the others.

    >>> import levelhead.hf
    >>> def train(trainer):
    ...     seen = levelhead.hf.watch_trainer(trainer, every=50, store="run.db")
    ...     trainer.train()
    ...     print(seen.watch.summary())

    every, options: as for `WatchCallback`, which it adds to the Trainer, before the trackers. The
        loss is the one that the Trainer computes, label smoothing or a loss of yours included.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer: expected a transformers.Trainer, got {shown(trainer)}")
    if any(isinstance(each, WatchCallback) for each in trainer.callback_handler.callbacks):
        raise ValueError(
            "trainer: it has a WatchCallback already; give it that or watch_trainer, not both"
        )
    callback = WatchCallback(every, **options)
    callback.lead(trainer)
    return callback


def _plain(args: TrainingArguments, name: str) -> Any:
    value = getattr(args, name)
    return getattr(value, "value", value)  # of an enumeration


def _need_accelerate() -> None:
    try:
        importlib.import_module("accelerate")
    except ImportError as error:
        raise ImportError(
            "levelhead.hf.WatchCallback needs accelerate, as the Trainer does: "
            "pip install accelerate",
            name="accelerate",
        ) from error
