"""A watch that a trainer drives: transformers' or Lightning's says where steps begin and end."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..._records import StepRecord
from ._watch import watch

_log = logging.getLogger("levelhead")
_on: weakref.WeakValueDictionary[int, DrivenWatch] = weakref.WeakValueDictionary()  # by model


class DrivenWatch:
    """One watch per training, whose steps have the trainer's numbers.

    watch: that of the training that runs, or of the last one; None before the first
    undo:  what else is to be called when it is over

    options: those of `watch`, and name and meta of the run in the store
    on_record: called with every record
    """

    def __init__(
        self, options: Mapping[str, Any], on_record: Callable[[StepRecord], Any] | None = None
    ) -> None:
        self._options = dict(options)
        for given in self._options.keys() & {"run", "start_step"}:
            raise TypeError(f"{given}: the trainer says that; name and meta are yours to give")
        self._about = {name: self._options.pop(name, None) for name in ("name", "meta")}
        self._options["sinks"] = [*self._options.get("sinks", ()), on_record or (lambda _: None)]
        watch(nn.Identity(), **self._options)  # says now what is wrong, not when training begins
        self.watch: watch | None = None
        self.undo: list[Callable[[], Any]] = []
        self.is_on = False
        self._training: Any = None
        self._step = 0
        self._losses: list[Tensor | float] = []

    def begin(self, model: nn.Module, step: int, training: Any, **about: Any) -> bool:
        """Watch a training from this step on; whether it does: it is on, or begins now.

        training: an object that stands for it
        about: name (if none was given) and arguments, for the store
        """
        if self._training is training:
            return self.is_on
        self.close(broken_off=True)
        self._training = training
        other = _on.get(id(model))
        if other is not None and other.is_on:
            if other._training is training:
                _log.warning("WatchCallback: it was given twice; the second one does nothing")
                return False
            other.close(broken_off=True)
        run = {**about, **{name: given for name, given in self._about.items() if given is not None}}
        self.watch = watch(model, run=run, start_step=step, **self._options)
        self.watch._steps.by_hand = True
        self.watch.__enter__()
        self.is_on, self._step = True, step
        self._losses.clear()
        _on[id(model)] = self
        return True

    def take_loss(self, loss: Any) -> None:
        """Of one batch; several of them may make a step."""
        if self.is_on and loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def end_step(self, following: int, mean: bool) -> None:
        """The optimizer has stepped.

        following: the number of the next step; a second call with the same does nothing
        mean: whether the step's loss is the mean of those of its batches; else their sum
        """
        if not self.is_on or following == self._step:
            return
        if self.watch is not None:
            if self._losses:
                total = sum(self._losses[1:], self._losses[0])
                self.watch.log(loss=total / len(self._losses) if mean else total)
            self.watch.step(following)
        self._losses.clear()
        self._step = following

    def close(self, *, broken_off: bool = False) -> None:
        """The training is over; of one that was broken off, the watch has nothing to complain."""
        if self.is_on and self.watch is not None:
            self.is_on = False
            while self.undo:
                self.undo.pop()()
            self.watch.__exit__(RuntimeError if broken_off else None)
        self._training = None
