"""Watching a model while it trains or serves: health per head, step by step."""

from __future__ import annotations

import functools
import logging
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._health import GradHealth, Health
from .._records import Alert, StepRecord
from ._alerts import Judge
from ._calls import Call
from ._forwards import Hook, in_backward, in_function
from ._intercept import Listener
from ._listen import Ear
from ._makers import module_names
from ._summary import missing_calls, summarise
from ._tally import Statistics, Tally

if TYPE_CHECKING:
    from os import PathLike
    from typing import Self

_log = logging.getLogger("levelhead")
_HISTORY = 400_000  # heads' statistics kept for a report: some 80 MB

_NOTHING_SEEN = """\
levelhead.torch.watch saw no attention call, so it knows nothing of this model. Check that
  - the model ran inside the `with` block, on the thread that opened it,
  - it computes attention in PyTorch: F.scaled_dot_product_attention, levelhead.torch.attention,
    nn.MultiheadAttention, or a product and a softmax written in Python,
  - it is not a scripted or exported module, or a kernel of its own: those cannot be looked into,
  - with every > 1, that the first step or a multiple of `every` was reached."""


class watch:
    """Watch the attention of a model, head by head.

    >>> import torch, levelhead.torch
    >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> with levelhead.torch.watch(model) as seen:
    ...     _ = model(torch.randn(2, 16, 64))
    >>> {name: health.entropy.shape for name, health in seen.health.items()}
    {'self_attn': (4,)}

    model: any module; its names are those of the layers. Calls from outside are seen too, as "".
    every: record each so many steps; in between, watching costs nothing. A step ends when an
        optimizer that holds the model's parameters steps, or by `watch.step()`. Without one, each
        call of the model without gradients is a step.
    store: a file for `levelhead report`, or a `levelhead.store.Store`
    sinks: further callables that get each `StepRecord`: levelhead.store.TensorBoard, JsonLines, ...
    on_alert: called with an `Alert` when a head's verdict turns worse; it is logged either way
    gradients: also measure, in backward, how much gradient gets through the softmax
    thresholds: of the verdicts, by name, as for `Health.verdicts`

    Results stay what they are, within rounding: calls of PyTorch's attention are computed by
    Levelhead, which reports health from the same pass. Compiled parts run eagerly on recorded
    steps. Once an optimizer has stepped, calls of the model without gradients (evaluation) are
    left out.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        store: str | PathLike[str] | Callable[[StepRecord], Any] | None = None,
        sinks: Iterable[Callable[[StepRecord], Any]] = (),
        on_alert: Callable[[Alert], Any] | None = None,
        gradients: bool = True,
        thresholds: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every: expected an integer of at least 1, got {every!r}")
        self.model, self.every, self.calls = model, every, 0
        self.alerts: list[Alert] = []
        self.not_understood: dict[str, int] = {}
        self._path = None if callable(store) else store
        self._sinks = [*sinks, store] if callable(store) else [*sinks]
        self._own: list[Any] = []  # sinks that are ours to close
        self._failed: set[int] = set()
        self._on_alert, self._gradients_wanted = on_alert, gradients
        self._thresholds = dict(thresholds or {})
        self._judge = Judge(self._thresholds)
        self._seen, self._heard = Tally[Health](), Tally[GradHealth]()  # in this step
        self._health, self._gradients = Tally[Health](), Tally[GradHealth]()  # before it
        self._step = 0
        self._entered = self._listening = self._trains = self._evaluating = False
        self._by_hand = self._ran = self._over = False
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._last_optimizer = 0  # by id
        self._history: list[StepRecord] = []
        self._stride = 1  # of the history, which thins out as it grows
        self._undo: list[Callable[[], Any]] = []

    # ------------------------------------------------------------ what it found

    @property
    def health(self) -> dict[str, Health]:
        """Per layer (dotted module name) the health of its heads, over all recorded steps."""
        return _together(self._health, self._seen)

    @property
    def gradients(self) -> dict[str, GradHealth]:
        """Per layer how much gradient got through the softmax, where a backward ran."""
        return _in_order_of(self.health, _together(self._gradients, self._heard))

    def summary(self) -> str:
        """What to know, in words: a line per layer with its worst head, then the worst heads."""
        return summarise(
            self.health, self.gradients, self.calls, self._thresholds, self.not_understood
        )

    def report(self, path: str | PathLike[str]) -> None:
        """Write the page of what was watched so far: one HTML file that needs no network."""
        from ..report import write_run_page  # noqa: PLC0415
        from ..store import Store, read_run  # noqa: PLC0415

        with tempfile.TemporaryDirectory() as folder:
            with Store(Path(folder) / "run.db", model=type(self.model).__name__) as store:
                for record in self._history:
                    store(record)
                if self._seen:  # a step that is not over
                    store(self._record())
            write_run_page(path, read_run(store.path))

    # ------------------------------------------------------------ from beginning to end

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("this watch is already on; make a new one to watch twice at once")
        if self._path is not None:
            from ..store import Store  # noqa: PLC0415

            self._own = [Store(self._path, model=type(self.model).__name__)]
        self._entered, self._trains = True, False
        self._optimizers.clear()
        self._ear = Ear.of_this_thread()
        self._listener = Listener(self._see, module_names(self.model), self._miss, looks=False)
        stepped = register_optimizer_step_post_hook(lambda given, *_: self._stepped(given))
        self._undo = [stepped.remove]
        if not isinstance(self.model, torch.jit.ScriptModule):  # has no hooks, and shows nothing
            begin, end = Hook(self._begin_forward), Hook(self._end_forward)
            self._undo += [
                self.model.register_forward_pre_hook(begin).remove,
                self.model.register_forward_hook(end, always_call=True).remove,
            ]
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self._listen()
        for undo in self._undo:
            undo()
        try:
            if self._seen:
                self._end_step()
        finally:
            for sink in self._own:
                sink.close()
            self._own.clear()
        if self.calls == 0 and error[0] is None:
            said = "\n".join([_NOTHING_SEEN, *missing_calls(self.not_understood)])
            warnings.warn(said, RuntimeWarning, stacklevel=2)

    def step(self) -> None:
        """End the current step; once it was called, nothing else ends steps."""
        self._by_hand = True
        self._end_step()

    # ------------------------------------------------------------ steps

    def _begin_forward(self) -> None:
        if not self._ear.is_here():
            return
        if self._over:
            self._end_step()
        self._ear.settle()
        self._ran = True
        self._evaluating = self._trains and self._without_gradients()

    def _end_forward(self) -> None:
        evaluated, self._evaluating = self._evaluating, False
        if not (evaluated or self._by_hand) and self._ear.is_here() and self._without_gradients():
            self._end_step()

    def _without_gradients(self) -> bool:
        """Whether a forward of the model is none of training."""
        if torch.is_grad_enabled() or in_backward():
            return False
        return not (self.model.training and in_function())

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not any(id(p) in held for p in self.model.parameters()):
                return
            self._optimizers.add(optimizer)
            self._trains = True
        # Of several optimizers that step one after the other, the first ends the step.
        if self._by_hand or not (self._ran or self._last_optimizer in (0, id(optimizer))):
            return
        self._last_optimizer, self._ran = id(optimizer), False
        if in_backward():  # one that steps as gradients arrive: more of them will
            self._over = True
        else:
            self._end_step()

    def _end_step(self) -> None:
        self._over = False
        try:
            if self._seen:
                self._hand_on(self._record())
        finally:
            self._seen.clear()
            self._heard.clear()
            self._step += 1
            self._listen()

    def _listen(self) -> None:
        """Hear of calls on steps that are recorded, and only then."""
        recorded = self._entered and self._step % self.every == 0
        if recorded != self._listening:
            self._listening = recorded
            (self._ear.add if recorded else self._ear.remove)(self._listener)

    def _record(self) -> StepRecord:
        """What is known of the current step, without alerts."""
        health = self._seen.merged()
        gradients = _in_order_of(health, self._heard.merged())
        return StepRecord(self._step, time.time(), health, gradients, (), self._thresholds)

    def _hand_on(self, record: StepRecord) -> None:
        self._health.add_all(record.health)
        self._gradients.add_all(record.gradients)
        alerts = self._judge.judge(record.step, record.health)
        if alerts:
            record = replace(record, alerts=alerts)
            self.alerts += alerts
        self._remember(record)
        for sink in (*self._own, *self._sinks):
            try:
                sink(record)
            except Exception:  # told once; it must not stop the training
                if id(sink) not in self._failed:
                    _log.exception(
                        "the sink %r failed at step %d; the watch goes on", sink, record.step
                    )
                self._failed.add(id(sink))
        for alert in alerts:
            _log.warning("%s", alert)
            if self._on_alert is not None:
                self._on_alert(alert)

    def _remember(self, record: StepRecord) -> None:
        if record.step // self.every % self._stride == 0:
            self._history.append(record)
        heads = sum(part.shape[-1] for part in record.health.values())
        if len(self._history) > max(2, _HISTORY // max(heads, 1)):
            self._stride *= 2
            self._history = self._history[::2]

    # ------------------------------------------------------------ calls

    def _see(self, call: Call) -> None:
        again = in_backward()  # a checkpoint's second forward, counted before
        if self._over and not again:
            self._end_step()
        if self._evaluating or self._step % self.every:
            return
        layer = self._place(call)
        if self._gradients_wanted:
            call.on_gradients = functools.partial(self._heard.add, layer)
        if not again:
            self.calls += 1
            self._seen.add(layer, call.health)

    def _miss(self, module: str) -> None:
        """Count attention that was not understood."""
        if not (in_backward() or self._evaluating or self._step % self.every):
            self.not_understood[module] = self.not_understood.get(module, 0) + 1

    def _place(self, call: Call) -> str:
        """The layer that a call belongs to. Calls of one module with other heads are kept apart."""
        heads = call.health.shape[-1]
        known = self._seen.heads(call.module) or self._health.heads(call.module) or heads
        return call.module if known == heads else f"{call.module} ({heads} heads)".strip()


def _together(before: Tally[Statistics], new: Tally[Statistics]) -> dict[str, Statistics]:
    together = Tally[Statistics]()
    together.add_all(before.merged())
    together.add_all(new.merged())
    return together.merged()


def _in_order_of(
    health: Mapping[str, Health], gradients: Mapping[str, GradHealth]
) -> dict[str, GradHealth]:
    """Gradients arrive from the last layer to the first."""
    return {layer: gradients[layer] for layer in health if layer in gradients}
