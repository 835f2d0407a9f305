"""Watching a model while it trains or serves: health per head, step by step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..._health import Finding, GradHealth, Health, Thresholds
from ..._health.describe import missing_calls, plural
from ..._health.verdicts import LOUD
from ..._records import TRAINING, Alert, StepRecord
from ._phase import Phase, together
from ._ranks import Ranks
from ._steps import Steps
from ._summary import summarise

if TYPE_CHECKING:
    from os import PathLike
    from typing import Self

    from ...store import Run

_log = logging.getLogger("levelhead")
_HISTORY = 400_000  # heads' statistics kept for a report: some 80 MB
_PATIENCE = 20  # recorded steps of training before it is said that nothing was logged
_NO_LOSS = "No loss was logged: alarms are surer with watch.log(loss=loss) at every step."
_NO_NUMBER = "The loss that was logged was never a finite number: alarms are less sure without it."
_SILENT = "No loss was logged lately: alarms are surer with watch.log(loss=loss) at every step."

_NOTHING_SEEN = """\
levelhead.torch.watch saw no attention call, so it knows nothing of this model. Check that
  - the model ran inside the `with` block, on the thread that opened it,
  - it computes attention in PyTorch: F.scaled_dot_product_attention, levelhead.torch.attention,
    nn.MultiheadAttention, or a product and a softmax written in Python,
  - it is not a scripted or exported module, or a kernel of its own: those cannot be looked into,
  - with every > 1, that the first step or a multiple of `every` was reached."""
_OTHERS_SEEN = """
Other models made {} calls meanwhile. If one of them is the one you mean, give the watch that very
object: a copy of a model is another model."""


class watch:
    """Watch the attention of a model, head by head.

    >>> import torch, levelhead.torch
    >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> with levelhead.torch.watch(model) as seen:
    ...     _ = model(torch.randn(2, 16, 64))
    >>> {name: health.entropy.shape for name, health in seen.health.items()}
    {'self_attn': (4,)}

    model: any module; its names are those of the layers. Calls from outside any module are seen
        too, as ""; those of other models are not.
    every: record each so many steps; in between, watching costs nothing. A step ends when an
        optimizer that holds the model's parameters steps, or by `watch.step()`. Without one, each
        call of the model without gradients is a step.
    store: a file for `levelhead report`, or a `levelhead.store.Store`
    sinks: further callables that get each `StepRecord`: levelhead.store.TensorBoard, JsonLines, ...
    on_alert: called with an `Alert` when something turns bad, gets worse or, at level "ok", is
        over; it is logged either way
    gradients: also measure, in backward, how much gradient gets through the softmax
    thresholds: of the verdicts, by name, as for `Health.verdicts`
    group: processes that see other data, and whose statistics are merged with those of this one:
        the default group of torch.distributed, if it is initialised; a process group of yours;
        or False for this process alone
    head_group: processes that hold other heads of the same layers (tensor parallel); their heads
        stand one after the other, in the order of their ranks
    timeout: how many seconds to wait for the other processes, at most
    run: what a store that is made from a path keeps of the run, as `Store` takes it:
        {"name": ..., "meta": ..., "arguments": ...}
    start_step: the number of the first step; of a training that goes on from a checkpoint, the
        step it goes on at: its run in the store goes on, too

    Results stay what they are, within rounding: calls of PyTorch's attention are computed by
    Levelhead, which reports health from the same pass. Compiled parts run eagerly on recorded
    steps. Once an optimizer has stepped, calls without gradients (evaluation) are left out, and
    `before_training` has those that came earlier.
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
        group: Any = None,
        head_group: Any = None,
        timeout: float = 30.0,
        run: Mapping[str, Any] | None = None,
        start_step: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every: expected an integer of at least 1, got {every!r}")
        if not isinstance(start_step, int) or isinstance(start_step, bool) or start_step < 0:
            raise ValueError(f"start_step: expected a step, 0 or more, got {start_step!r}")
        self.model, self.every = model, every
        self._path = None if callable(store) else store
        self._run_options = _run_options(run, every=every, gradients=gradients)
        self._resumes = start_step > 0
        self._sinks = [*sinks, store] if callable(store) else [*sinks]
        self._own: list[Any] = []  # sinks that are ours to close
        self._failed: set[int] = set()
        self._on_alert, self._thresholds = on_alert, dict(thresholds or {})
        Thresholds().changed(self._thresholds)  # says at once what is unknown
        self._ranks = Ranks(group, head_group, timeout)
        self._steps = Steps(
            *(model, every, gradients, self._thresholds, self._hand_on, self._add, self._ranks)
        )
        self._steps.training.step = start_step
        self._history: list[StepRecord] = []
        self._newest: StepRecord | None = None
        self._stride = 1  # of the history, which thins out as it grows
        self._trained = 0  # recorded steps
        self._lacked = ""  # of the loss, when it was last looked at
        self._told_off = False
        self._shown: tuple[Any, Any] | None = None  # the cell of a notebook, and what it shows

    # ------------------------------------------------------------ what it found

    @property
    def health(self) -> dict[str, Health]:
        """Per layer (dotted module name) the health of its heads, over all recorded steps."""
        return together(*(phase.health for phase in self._steps.shown))

    @property
    def gradients(self) -> dict[str, GradHealth]:
        """Per layer how much gradient got through the softmax, where a backward ran."""
        return together(*(phase.gradients for phase in self._steps.shown))

    @property
    def calls(self) -> int:
        """How many calls were counted."""
        return sum(phase.calls for phase in self._steps.shown)

    @property
    def alerts(self) -> list[Alert]:
        """What turned bad, got worse, or recovered."""
        return [alert for phase in self._steps.shown for alert in phase.alerts]

    def findings(self) -> list[Finding]:
        """What there is to say now, the worst first: of the model, of layers, of heads.

        Like `summary` it speaks of the last recorded step of each layer.

        >>> import torch, levelhead.torch
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> with levelhead.torch.watch(model) as seen:
        ...     _ = model(torch.randn(2, 16, 64))
        >>> [finding.scope for finding in seen.findings() if finding.is_loud]
        []
        """
        return self._run().findings()

    @property
    def before_training(self) -> Phase:
        """Health, calls and alerts of what ran without gradients before the first training step."""
        return self._steps.before_training

    @property
    def left_out(self) -> dict[str, int]:
        """How many calls were seen but not counted: of "evaluation", of "other models"."""
        return dict(+self._steps.left_out)

    @property
    def not_understood(self) -> dict[str, int]:
        """Per module how many calls were seen that could not be followed back to scores."""
        return dict(self._steps.not_understood)

    def summary(self) -> str:
        """How the model is, in words: a line per layer with its worst head, then the worst heads.

        It speaks of the last recorded step of each layer; `health` has all steps together.
        """
        return "\n".join([summarise(self._run(), self.calls), *self._notes()])

    def _notes(self) -> list[str]:
        """What its numbers do not say: which attention is missing, and whether the loss is."""
        lacking = self._lacks()
        return [*missing_calls(self.not_understood), *([lacking] if lacking else [])]

    def _lacks(self) -> str:
        """What is amiss with the loss that is logged, in words; "" if nothing is."""
        loss = self._steps.training.loss
        if self._trained < _PATIENCE or loss.is_known:
            return ""
        if not loss.was_logged:
            return _NO_LOSS
        return _SILENT if loss.is_silent else _NO_NUMBER

    def show(self) -> None:
        """Show how the model is: drawn in a notebook, printed anywhere else.

        Called again in the same cell, in the loop of a training for example, it draws anew in the
        same place.
        """
        from ...report._notebook import show  # noqa: PLC0415

        self._shown = show(self, self._shown)

    def _repr_html_(self) -> str:
        from ...report._notebook import watch_html  # noqa: PLC0415

        return watch_html(self._run(), self.calls, self._steps.is_on, self._notes())

    def report(self, path: str | PathLike[str]) -> None:
        """Write the page of what was watched so far: one HTML file that needs no network."""
        from ...report import write_run_page  # noqa: PLC0415

        write_run_page(path, self._run())

    def _run(self) -> Run:
        """What was recorded so far, a step that is not over included."""
        from ...store import Run  # noqa: PLC0415

        records = [record for record in self._history if record is not self._newest]
        records += [] if self._newest is None else [self._newest]  # it may have been thinned out
        unended = self._steps.open_record()
        records += [] if unended is None else [unended]
        ended = None if self._steps.is_on or not records else records[-1].time
        model = type(self.model).__name__
        return Run.from_records(records, model=model, alerts=self.alerts, ended=ended)

    def __repr__(self) -> str:
        health = self.health
        counts = {
            "call": self.calls,
            "layer": len(health),
            "head": sum(part.shape[-1] for part in health.values()),
            "alert": len(self.alerts),
        }
        seen = ", ".join(plural(many, noun) for noun, many in counts.items())
        state, step = "on" if self._steps.is_on else "off", self._steps.shown[-1].step
        return f"<watch of {type(self.model).__name__}: {state}, step {step}, {seen}>"

    # ------------------------------------------------------------ from beginning to end

    def __enter__(self) -> Self:
        if self._steps.is_on:
            raise RuntimeError("this watch is already on; make a new one to watch twice at once")
        self._ranks.open()
        self._open_store()
        self._steps.start()
        return self

    def _open_store(self) -> None:
        error, path = None, self._path
        if path is not None and self._ranks.is_first:
            from ...store import Store  # noqa: PLC0415

            try:
                self._own = [Store(path, **self._about_run())]
            except Exception as found:
                error = found
        self._ranks.agree(self.every, error)

    def _about_run(self) -> dict[str, Any]:
        start = self._steps.training.step if self._resumes else 0
        known = {"model": type(self.model).__name__, "ranks": self._ranks.count}
        return {**known, **self._run_options, "start_step": start}

    def __exit__(self, *error: object) -> None:
        try:
            unended = self._steps.stop()
        finally:
            self._ranks.close()
            for sink in self._own:
                sink.close()
            self._own.clear()
        if error[0] is not None:
            return
        if self.calls == 0 == self.before_training.calls and not self.health:
            others = self.left_out.get("other models")
            message = _NOTHING_SEEN + (_OTHERS_SEEN.format(others) if others else "")
            said = "\n".join([message, *missing_calls(self.not_understood)])
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        elif unended:
            warnings.warn(unended, RuntimeWarning, stacklevel=2)

    def step(self, number: int | None = None) -> None:
        """End the current step; once it was called, nothing else ends steps.

        number: of the step that begins, if it is not the next
        """
        self._steps.end_by_hand(number)

    def merge(self) -> None:
        """Merge what the processes of the group have seen and not merged, as one step.

        Training needs no call: its recorded steps are merged as they end. In inference nobody
        knows when all processes are at the same place, so that each has its own health until all
        of them call this. In a single process it does nothing.
        """
        if self._ranks.several:
            self._steps.merge()

    def log(self, /, **scalars: Any) -> None:
        """Keep scalars with the step: `watch.log(loss=loss)`, once per step.

        Numbers, or tensors with one element on any device, which are not waited for unless the
        step is recorded. After the step has ended and before the next forward they belong to the
        one that ended. Of several values in a step the last counts. What is no number is told of
        once and left out: nothing here stops the training.
        """
        if self._steps.is_on:
            self._steps.log(scalars)
        elif not self._told_off:
            self._told_off = True
            _log.warning("watch.log: called while the watch is off; it is left out")

    # ------------------------------------------------------------ where it goes

    def _hand_on(self, record: StepRecord) -> None:
        self._remember(record)
        self._trained += record.phase == TRAINING
        if not self._ranks.is_first:
            return
        before, self._lacked = self._lacked, self._lacks()
        if self._lacked and self._lacked != before:
            _log.info("%s", self._lacked)
        for sink in (*self._own, *self._sinks):
            self._call(sink, sink, record.step, record)
        for alert in record.alerts:
            _log.log(logging.WARNING if alert.level in LOUD else logging.INFO, "%s", alert)
            if self._on_alert is not None and alert.level in LOUD:
                self._on_alert(alert)

    def _add(self, scalars: Mapping[str, float]) -> None:
        """Add what was logged after the newest record was handed on."""
        before = self._newest
        assert before is not None
        after = replace(before, scalars={**before.scalars, **scalars})
        self._newest = after
        if self._history and self._history[-1] is before:
            self._history[-1] = after
        for sink in (*self._own, *self._sinks) if self._ranks.is_first else ():
            log = getattr(sink, "log", None)
            if callable(log):
                self._call(sink, log, after.step, after.step, scalars, after.phase)

    def _call(self, sink: Any, method: Callable[..., Any], step: int, *given: Any) -> None:
        try:
            method(*given)
        except Exception:  # told once; it must not stop the training
            if id(sink) not in self._failed:
                _log.exception("the sink %r failed at step %d; the watch goes on", sink, step)
            self._failed.add(id(sink))

    def _remember(self, record: StepRecord) -> None:
        record = replace(record)  # without what was worked out to judge it, as large again
        self._newest = record
        if record.phase == TRAINING and self._history and self._history[-1].phase != TRAINING:
            self._history = [past for past in self._history if past.phase == TRAINING]
        if record.step // self.every % self._stride == 0:
            self._history.append(record)
        heads = sum(part.shape[-1] for part in record.health.values())
        if len(self._history) > max(2, _HISTORY // max(heads, 1)):
            self._stride *= 2
            self._history = self._history[::2]


def _run_options(run: Mapping[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """What `Store` is told; beside the arguments of the training, those of the watch."""
    given = dict(run or {})
    unknown = given.keys() - {"name", "meta", "arguments"}
    if unknown:
        raise ValueError(
            f"run: expected name, meta and arguments, got {', '.join(sorted(unknown))}"
        )
    return given | {"arguments": {**arguments, **given.get("arguments", {})}}
