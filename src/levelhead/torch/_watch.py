"""Watching a model while it trains or serves: health per head, step by step."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._health import GradHealth, Health
from .._records import Alert, StepRecord
from ._alerts import Judge
from ._calls import Call
from ._intercept import Interceptor, module_names
from ._summary import summarise

if TYPE_CHECKING:
    from os import PathLike
    from typing import Self

Statistics = TypeVar("Statistics", Health, GradHealth)
_log = logging.getLogger("levelhead")
_HISTORY = 2_000  # records kept for a report without a store

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
        self.model, self.every, self.gradients_wanted = model, every, gradients
        self.calls = 0
        self.alerts: list[Alert] = []
        self._path = None if callable(store) else store
        self._sinks = [*sinks, store] if callable(store) else [*sinks]
        self._on_alert = on_alert
        self._own: list[Any] = []  # sinks that are ours to close
        self._failed: set[int] = set()
        self._thresholds = dict(thresholds or {})
        self._judge = Judge(self._thresholds)
        self._mode = Interceptor(self._see, module_names(model) or {})
        self._step = 0
        self._seen: dict[str, list[Health]] = defaultdict(list)
        self._heard: dict[str, list[GradHealth]] = defaultdict(list)
        self._health: dict[str, Health] = {}
        self._gradients: dict[str, GradHealth] = {}
        self._history: list[StepRecord] = []
        self._stride = 1  # of the history, which thins out as it grows
        self._undo: list[Callable[[], Any]] = []
        self._optimizer: int | None = None
        self._evaluating = self._active = self._entered = False
        self._stance: Any = None

    # ------------------------------------------------------------ what it found

    @property
    def health(self) -> dict[str, Health]:
        """Per layer (dotted module name) the health of its heads, over all recorded steps."""
        return _together(self._health, self._seen)

    @property
    def gradients(self) -> dict[str, GradHealth]:
        """Per layer how much gradient got through the softmax, where a backward ran."""
        return _together(self._gradients, self._heard)

    def summary(self) -> str:
        """What to know, in words: a line per layer with its worst head, then the worst heads."""
        return summarise(self.health, self.gradients, self.calls)

    def report(self, path: str | PathLike[str]) -> None:
        """Write the page of the steps that are finished: one HTML file that needs no network."""
        from ..report import write_run_page  # noqa: PLC0415
        from ..store import Store, read_run  # noqa: PLC0415

        if self._path is not None:
            write_run_page(path, read_run(self._path, self._run))
            return
        with tempfile.TemporaryDirectory() as folder:
            with Store(Path(folder) / "run.db", model=type(self.model).__name__) as store:
                for record in self._history:
                    store(record)
            write_run_page(path, read_run(store.path))

    # ------------------------------------------------------------ from beginning to end

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("this watch is already on; make a new one to watch twice at once")
        if self._path is not None:
            from ..store import Store  # noqa: PLC0415

            self._own = [Store(self._path, model=type(self.model).__name__)]
            self._run = self._own[0].run
        self._entered = True
        self._modes = _stacked_modes()
        before = self.model.register_forward_pre_hook(lambda *_: self._begin_forward())
        after = self.model.register_forward_hook(lambda *_: self._end_forward(), always_call=True)
        stepped = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        self._undo = [before.remove, after.remove, stepped.remove]
        self._activate(self._step % self.every == 0)
        return self

    def __exit__(self, *error: object) -> None:
        self._finish_step()
        self._activate(False)
        for undo in self._undo:
            undo()
        self._entered = False
        for sink in self._own:
            sink.close()
        self._own.clear()
        if self.calls == 0 and error[0] is None:
            warnings.warn(_NOTHING_SEEN, RuntimeWarning, stacklevel=2)

    def step(self) -> None:
        """End the current step; called by hand where no optimizer tells."""
        self._finish_step()
        self._step += 1
        self._activate(self._step % self.every == 0)

    # ------------------------------------------------------------ steps

    def _begin_forward(self) -> None:
        self._evaluating = self._optimizer is not None and not torch.is_grad_enabled()

    def _end_forward(self) -> None:
        evaluated, self._evaluating = self._evaluating, False
        if not evaluated and not torch.is_grad_enabled() and not _in_backward():
            self.step()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not any(id(p) in held for p in self.model.parameters()):
                return
            self._optimizer = id(optimizer)
        if self._optimizer == id(optimizer):
            self.step()

    def _finish_step(self) -> None:
        """Hand the step's record on, if anything was seen."""
        if not self._seen:
            self._heard.clear()
            return
        health, gradients = _together({}, self._seen), _together({}, self._heard)
        alerts = self._judge.judge(self._step, health)
        record = StepRecord(self._step, time.time(), health, gradients, alerts, self._thresholds)
        self._health, self._gradients = self.health, self.gradients
        self._seen.clear()
        self._heard.clear()
        self._remember(record)
        for sink in (*self._own, *self._sinks):
            self._hand_on(sink, record)
        self.alerts += alerts
        for alert in alerts:
            _log.warning("%s", alert)
            if self._on_alert is not None:
                self._on_alert(alert)

    def _hand_on(self, sink: Callable[[StepRecord], Any], record: StepRecord) -> None:
        """What goes wrong in a sink is told once; it must not stop the training."""
        try:
            sink(record)
        except Exception:
            if id(sink) not in self._failed:
                _log.exception(
                    "the sink %r failed at step %d; the watch goes on", sink, record.step
                )
            self._failed.add(id(sink))

    def _remember(self, record: StepRecord) -> None:
        if record.step // self.every % self._stride == 0:
            self._history.append(record)
        if len(self._history) > _HISTORY:
            self._stride *= 2
            self._history = self._history[::2]

    def _activate(self, on: bool) -> None:
        """Put the mode on or take it off: one that is not there costs nothing.

        Modes are a stack. Inside somebody else's mode ours must stay as it is.
        """
        if on == self._active or _stacked_modes() != self._modes + self._active:
            return
        self._active = on
        if on:
            if "torch._dynamo" in sys.modules:  # else nothing can be compiled
                self._stance = torch.compiler.set_stance("force_eager")
            self._mode.__enter__()
        else:
            self._mode.__exit__(None, None, None)
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    # ------------------------------------------------------------ calls

    def _see(self, call: Call) -> None:
        if self._evaluating or self._step % self.every:
            return
        name = self._place(call)
        if self.gradients_wanted:
            call.on_gradients = lambda part: self._heard[name].append(part.over_batch())
        if not _in_backward():  # else it is a checkpoint's second forward, counted before
            self.calls += 1
            self._seen[name].append(call.health.over_batch())

    def _place(self, call: Call) -> str:
        """The layer that a call belongs to. Calls of one module with other heads are kept apart."""
        heads = call.health.shape[-1:]
        known = next(iter(self._seen.get(call.module, ())), self._health.get(call.module))
        same = known is None or known.shape == heads
        return call.module if same else f"{call.module} ({heads[0]} heads)".strip()


def _together(
    before: Mapping[str, Statistics], new: Mapping[str, list[Statistics]]
) -> dict[str, Statistics]:
    """Per layer what was there and what has come since, merged."""
    together = dict(before)
    for name in new:
        parts: list[Statistics] = [before[name]] if name in before else []
        parts += new[name]
        together[name] = parts[0].merge(*parts[1:]) if len(parts) > 1 else parts[0]
    return together


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _stacked_modes() -> int:
    return torch._C._len_torch_function_stack()
