"""What a step is: which calls belong to it, and when it ends."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._health.describe import plural
from ..._records import BEFORE_TRAINING, INFERENCE, TRAINING, StepRecord
from ._attribution import ModuleNames
from ._calls import Call
from ._forwards import Hook, after_backward, entry_modules, in_backward, without_gradients
from ._intercept import Listener
from ._listen import ThreadInterceptor
from ._phase import Phase
from ._ranks import Ranks
from ._scalars import Scalars
from ._unended import Unended


class Steps:
    """Sorts the calls of a model into the steps of its phases, and hands on each step's record.

    Calls with gradients are training's, and an optimizer ends its steps. Calls without are
    evaluation once training has begun, and left out. Before, nobody knows whether it will: each
    call of the model without gradients is a step of inference, and what there was of that when
    the first optimizer steps was before training.

    left_out: how many calls were seen and not counted, by their kind
    not_understood: how many could not be measured, by module
    by_hand: whether steps end by `end_by_hand` alone
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        gradients: bool,
        thresholds: Mapping[str, float],
        hand_on: Callable[[StepRecord], None],
        add: Callable[[Mapping[str, float]], None],
        ranks: Ranks,
    ) -> None:
        self._model, self._every, self._thresholds = model, every, thresholds
        self._ranks = ranks
        self._gradients_wanted, self._hand_on, self._add = gradients, hand_on, add
        self.scalars = Scalars()
        self._recorded = False  # the step that ended last
        self.training, self.inference, self.before_training = (
            Phase(name, thresholds, ranks) for name in (TRAINING, INFERENCE, BEFORE_TRAINING)
        )
        self.left_out: Counter[str] = Counter()
        self.not_understood: Counter[str] = Counter()
        self.trains = self.is_on = False
        self._unended: Unended | None = None
        self.by_hand = self._listening = self._seeing = False
        self._awaited = False  # training: the latest forward was one with gradients
        self._infers = False  # all of the model runs, without gradients
        self._ran = False  # the model, with gradients, since an optimizer ended a step
        self._over = False  # an optimizer stepped in backward: the step ends after it
        self._new = False  # the step: an optimizer ended the last one, and nothing ran since
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._round: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._heads: dict[str, int] = {}  # of the modules that made calls
        self._entries: list[Any] | None = None  # hooks on them, while they are watched
        self._undo: list[Callable[[], Any]] = []

    @property
    def shown(self) -> tuple[Phase, ...]:
        """The phases that the watch speaks of now."""
        return (self.training,) if self.trains else (self.training, self.inference)

    # ------------------------------------------------------------ from beginning to end

    def start(self) -> None:
        self.is_on, self.trains, self._awaited = True, False, False
        self.scalars.restart()
        self.inference.step = max(self.inference.step, self.training.step)
        self._optimizers.clear()
        self._unended = None if self.by_hand else Unended(self._model)
        self._interceptor = ThreadInterceptor.current()
        self._names = ModuleNames(self._model)
        self._listener = Listener(self._see, self._names, self._miss, matrices=False)
        stepped = register_optimizer_step_post_hook(lambda given, *_: self._stepped(given))
        self._undo = [stepped.remove]
        if not isinstance(self._model, torch.jit.ScriptModule):  # has no hooks, and shows nothing
            begin, end = Hook(self._begin_forward), Hook(self._end_forward)
            self._undo += [
                self._model.register_forward_pre_hook(begin).remove,
                self._model.register_forward_hook(end, always_call=True).remove,
            ]
        self._listen()

    def stop(self) -> str | None:
        """Record what is open; what to say of steps that could not end."""
        self.is_on = False
        self._listen()
        for undo in self._undo:
            undo()
        if self.training.is_merged:  # of what only some ranks may have, nothing is kept
            self.left_out["unended step"] += self.training.forget_step()
        elif any(self.shown):
            self._end_step()
        return self._unended.message() if self._unended else None

    def end_by_hand(self, number: int | None = None) -> None:
        ended = self._new and not self.by_hand  # by an optimizer: whoever calls this means that
        self.by_hand, self._unended = True, None
        if not ended:
            if self.training and not self.trains:
                self._begin_training()
            self._end_step()
        if number is not None and number != self.training.step:
            self.training.step = number
            self._listen()

    def merge(self) -> None:
        """Record what all ranks have seen and not merged so far."""
        phase, *joined = self.shown[::-1]
        self._hand_on_end(phase.merge(*joined, scalars=self.scalars))

    def open_record(self) -> StepRecord | None:
        """What is known of the step that is not over; nothing where ranks have merged theirs."""
        phase, *joined = self.shown[::-1]
        if phase.is_merged:
            return None
        return phase.record(*joined, scalars=self.scalars) if any(self.shown) else None

    # ------------------------------------------------------------ forwards

    def _begin_forward(self) -> None:
        if not self._interceptor.is_current() or in_backward():  # there a checkpoint runs, again
            return
        self._end_if_over()
        self._new = False
        self._interceptor.update()
        self._infers = without_gradients()
        if not (self._infers and self.trains):  # which is evaluation, and in no step
            self._add_late(self.scalars.begin_step())
        if not self._infers:
            self._ran = True
            self._await_training()
        elif self._awaited and not self.trains:
            self._awaited = False
            self._listen()

    def _begin_part(self) -> None:
        if (
            not self._infers
            and self._interceptor.is_current()
            and not (in_backward() or without_gradients())
        ):
            self._await_training()

    def _end_forward(self) -> None:
        if self._infers and self._interceptor.is_current():
            self._infers = False
            if not (self.trains or self.by_hand):
                self._end(self.inference)

    def _await_training(self) -> None:
        """A forward with gradients may be the first of training."""
        if not (self._awaited or self.trains):
            self._awaited = True
            if self.inference:
                self._end(self.inference)
            self._listen()

    # ------------------------------------------------------------ optimizers

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            if not self._is_ours(optimizer):
                message = self._unended and self._unended.step_of_another(optimizer)
                if message:
                    self._unended = None
                    warnings.warn(message, RuntimeWarning, stacklevel=4)
                return
            self._optimizers.add(optimizer)
        if not self.trains:
            self._begin_training()
        if self.by_hand:
            return
        # Of several optimizers that step one after the other, the first ends the step. The next
        # step begins with a forward of the model, or when one that took part steps again.
        first = self._ran or not self._round or optimizer in self._round
        if first:
            self._round.clear()
            self._ran = False
        self._round.add(optimizer)
        if in_backward():  # one that steps as gradients arrive: more of them will
            self._over = self._over or first
            after_backward(self._end_if_over)
        elif first:
            self._end_step()
            self._new = True

    def _end_if_over(self) -> None:
        if self._over:
            self._end_step()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it ends the model's steps: it holds parameters of it.

        Of a model with nothing to train nobody can hold any. If it takes part in training all the
        same, between an optimizer's parameters and its loss, then any optimizer does.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = list(self._model.parameters())
        if any(id(p) in held for p in parameters):
            return True
        return bool(self.training) and not any(p.requires_grad for p in parameters)

    def _begin_training(self) -> None:
        self.trains, self._unended = True, None
        # Calls without gradients amid the forwards of the first step.
        self.left_out["evaluation"] += self.inference.forget_step()
        self.before_training.take_over(self.inference)
        self.inference = Phase(INFERENCE, self._thresholds, self._ranks)
        self.scalars.forget_means()

    # ------------------------------------------------------------ steps

    def log(self, scalars: Mapping[str, Any]) -> None:
        self._add_late(self.scalars.log(scalars))

    def _add_late(self, values: Mapping[str, Any]) -> None:
        """Hand on what was logged for a step that has ended."""
        if values and self._recorded:
            self._add(self.scalars.read(values))

    def _end_step(self) -> None:
        phase, *joined = self.shown[::-1]
        self._end(phase, *joined)

    def _end(self, phase: Phase, *joined: Phase) -> None:
        self._over = False
        # The other ranks are here too when training ends a step that is recorded; else they may
        # not be, and would be waited for in vain.
        merge = self.is_on and phase is self.training and phase.step % self._every == 0
        self._hand_on_end(phase.end_step(*joined, scalars=self.scalars, merge=merge))

    def _hand_on_end(self, record: StepRecord | None) -> None:
        """Of a step that has just ended, if it was recorded."""
        self._recorded = record is not None
        try:
            if record is not None:
                self._hand_on(record)
        finally:
            self._listen()

    def _listen(self) -> None:
        """Intercept calls on steps that are recorded, and only then."""
        if self._seeing:  # amid a forward: a checkpoint in it must compute the same way again
            return
        training = self.trains or self._awaited
        phase = self.training if training else self.inference
        wanted = self.is_on and phase.step % self._every == 0
        if wanted != self._listening:
            self._listening = wanted
            (self._interceptor.add if wanted else self._interceptor.remove)(self._listener)
        self._interceptor.update()
        # Between steps of inference the first step of training must not go unnoticed.
        watched, self._entries = self._entries, None
        if self.is_on and not (wanted or training):
            self._entries = self._watch_entries() if watched is None else watched
        else:
            for hook in watched or ():
                hook.remove()

    def _watch_entries(self) -> list[Any]:
        hook = Hook(self._begin_part)
        modules = entry_modules(self._model, self._names, self._heads)
        return [module.register_forward_pre_hook(hook) for module in modules]

    # ------------------------------------------------------------ calls

    def _see(self, call: Call) -> None:
        self._seeing = True
        try:
            self._count(call, in_backward())
        finally:
            self._seeing = False

    def _count(self, call: Call, again: bool) -> None:
        """Add a call to its step; again: by a checkpoint's second forward, so it is there."""
        if not again:
            self._end_if_over()
            self._new = False
        if call.other:
            self.left_out["other models"] += not again
            return
        evaluates = not again and without_gradients()
        if evaluates and self.trains:
            self.left_out["evaluation"] += 1
            return
        if not again:
            self._add_late(self.scalars.begin_step())
        if not (evaluates or again):
            self._await_training()
        phase = self.inference if evaluates else self.training
        if phase.step % self._every:
            return
        layer = self._layer_of(call)
        if not again:
            phase.add_call(layer, call, self._width(call))
        if evaluates:
            return
        if self._unended and not again:
            self._unended.forward()
        if self._gradients_wanted:
            call.on_gradient_sums = functools.partial(self._add_gradients, layer)

    def _width(self, call: Call) -> int:
        """Of the model: as its configuration says, else as wide as all heads of the call."""
        width = getattr(getattr(self._model, "config", None), "hidden_size", None)
        return width if isinstance(width, int) else call.shape[1] * call.dk

    def _miss(self, module: str) -> None:
        if not (in_backward() or (self.trains and without_gradients())):
            self.not_understood[module] += 1

    def _add_gradients(self, layer: str, sums: Tensor) -> None:
        self.training.add_gradients(layer, sums)
        if self._unended:
            self._unended.backward()

    def _layer_of(self, call: Call) -> str:
        """The layer that a call belongs to. Calls of one module with other heads are kept apart."""
        heads = call.shape[1]
        known = self._heads.setdefault(call.module, heads)
        return call.module if known == heads else f"{call.module} ({plural(heads, 'head')})".strip()
