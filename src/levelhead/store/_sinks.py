"""The other sinks: JSON lines for programs, TensorBoard for eyes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from .._health import LOUD, GradHealth, Health
from .._health.describe import describe
from .._health.numbers import plain
from .._health.statistics import Statistic, statistics_of
from .._health.verdicts import SHORT
from .._hints import shown
from .._records import TRAINING, StepRecord
from ._check import check_record, check_scalars, check_step, file_path
from ._open import FilePath, StoreError
from ._outage import Outage
from ._run import known
from ._sink import Sink
from ._trackers import attention_scalars


class JsonLines(Sink):
    """One JSON object per step, one line each, appended to a file.

    >>> import json, tempfile, numpy as np, levelhead as lh
    >>> from pathlib import Path
    >>> from levelhead.store import JsonLines, StepRecord
    >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 32, 64))
    >>> with JsonLines(path) as sink:
    ...     sink(StepRecord(7, 0.0, {"attn": lh.attention(q, k, v, return_health=True).health}))
    >>> line = json.loads(path.read_text())
    >>> line["step"], line["layers"][0]["name"], line["layers"][0]["heads"][1]["verdict"]
    (7, 'attn', 'healthy')

    path: the file; what it holds already stays

    A line has step, phase, time, scalars, layers and alerts. A layer has its name and its heads; a
    head has its index, verdict, level, reason, every field of Health and, after a backward pass, of
    GradHealth. null is a number that is not finite, or the verdict of a head with too few keys.
    Scalars that were logged after their step had ended have a line of their own, without layers.
    A full disk is logged once and loses whole lines; training goes on.
    """

    def __init__(self, path: FilePath) -> None:
        self.path = file_path(path)
        self._outage = Outage(str(self.path))
        try:
            # Unbuffered: a line is in the file when the call returns, or it is not at all.
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror or error}): "
                "make its folder, or choose another file"
            ) from error
        if self._ends_amid_a_line():
            self._file.write(b"\n")

    def __call__(self, record: StepRecord) -> None:
        """Append one line."""
        self._check_open()
        check_record(record)
        self._append(_plain(record))

    def log(self, step: int, scalars: Mapping[str, float], phase: str = TRAINING) -> None:
        """Append a line with nothing but scalars."""
        self._check_open()
        check_step(step)
        check_scalars(scalars)
        self._append({"step": int(step), "phase": phase, "scalars": _numbers(scalars)})

    def _check_open(self) -> None:
        if self._file.closed:
            raise StoreError(f"{self.path} is closed: open it anew")

    def _append(self, line: dict[str, Any]) -> None:
        rest = json.dumps(line, allow_nan=False).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # no half lines
            self._outage.failed(line["step"], error, "free space on its disk")
        else:
            self._outage.worked(line["step"])

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()
        self._outage.closed()

    def _ends_amid_a_line(self) -> bool:
        """As after a crash of the machine."""
        if self._file.seek(0, os.SEEK_END) == 0:
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


def _plain(record: StepRecord) -> dict[str, Any]:
    layers = [
        {"name": name, "heads": [_head(head) for head in heads]}
        for name, heads in describe(record.evidence, record.judged).items()
    ]
    alerts = [plain(asdict(alert)) for alert in record.alerts]
    when = {"step": int(record.step), "phase": record.phase, "time": float(record.time)}
    return {**when, "scalars": _numbers(record.scalars), "layers": layers, "alerts": alerts}


def _numbers(scalars: Mapping[str, float]) -> dict[str, float | None]:
    return {name: plain(float(value)) for name, value in scalars.items()}


def _head(head: dict[str, Any]) -> dict[str, Any]:
    """Without what the verdict's name already says; none for a head that could not be judged."""
    del head["hint"], head["also"]
    if head["verdict"] == SHORT:
        head |= dict.fromkeys(("verdict", "level", "reason"))
    return head


def _statistics() -> dict[str, Statistic]:
    """All that can be tracked."""
    table = statistics_of(Health) | statistics_of(GradHealth)
    return {name: each for name, each in table.items() if each.is_field}


class TensorBoard(Sink):
    """Scalars for TensorBoard: per layer the worst head and the mean of the heads.

    >>> import tempfile, numpy as np, levelhead as lh
    >>> from levelhead.store import StepRecord, TensorBoard
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 32, 64))
    >>> with TensorBoard(tempfile.mkdtemp()) as sink:
    ...     sink(StepRecord(7, 0.0, {"attn": lh.attention(q, k, v, return_health=True).health}))

    writer:     a SummaryWriter, which stays open, or the folder to make one for
    statistics: fields of Health and GradHealth; by default those that the table calls tracked

    entropy_ratio/LAYER is the value of the layer's worst head (the largest or the smallest,
    whichever is bad), entropy_ratio_mean/LAYER the mean over its heads, worst_head/LAYER the
    index of the head with the worst verdict. heads/critical, heads/error and heads/warning count
    the heads of all layers at that level. attention/… are the few numbers of `Scalars`, for the
    whole model. Alerts are texts. What was logged, such as the loss, goes by its own name. So a
    chart is a layer, a group of charts a statistic, and the file grows by layers, not by heads.
    Steps of inference have tags of their own, inference/entropy_ratio/LAYER: they have numbers of
    their own.
    """

    def __init__(
        self,
        writer: Any,
        *,
        statistics: Sequence[str] | None = None,
    ) -> None:
        table = _statistics()
        if statistics is None:
            statistics = [name for name, each in table.items() if each.tracked]
        for statistic in statistics:
            known(statistic, "statistic", list(table))
        self.statistics = tuple(statistics)
        self._owned = isinstance(writer, (str, os.PathLike))
        if not (self._owned or hasattr(writer, "add_scalar")):
            raise TypeError(f"writer: expected a SummaryWriter or a folder, got {shown(writer)}")
        self._writer = _summary_writer(writer) if self._owned else writer

    def __call__(self, record: StepRecord) -> None:
        """Write one step's scalars."""
        check_record(record)
        table = _statistics()
        for layer, health in record.health.items():
            where = layer or "outside_any_module"
            for statistic in self.statistics:
                source = record.gradients.get(layer) if statistic in GradHealth.FIELDS else health
                heads = np.array([]) if source is None else getattr(source, statistic)
                heads = heads[~np.isnan(heads)]
                if len(heads):
                    worst = heads.min() if table[statistic].bad == "low" else heads.max()
                    self._add(record, f"{statistic}/{where}", worst)
                    self._add(record, f"{statistic}_mean/{where}", heads.mean())
            judged = record.judged[layer]
            for head in judged.worst_first()[:1]:
                if judged.names[head] != SHORT:
                    self._add(record, f"worst_head/{where}", head)
        levels = Counter(level for judged in record.judged.values() for level in judged.levels)
        for level in LOUD:
            self._add(record, f"heads/{level}", levels[level])
        for name, value in record.scalars.items():
            self._add(record, name, value)
        for tag, value in attention_scalars(record).items():
            self._writer.add_scalar(tag, value, record.step, record.time)
        for alert in record.alerts:
            tag = _tag(record.phase, "alerts")
            self._writer.add_text(tag, str(alert), record.step, record.time)

    def log(self, step: int, scalars: Mapping[str, float], phase: str = TRAINING) -> None:
        """Write scalars of a step that was written already."""
        check_step(step)
        check_scalars(scalars)
        for name, value in scalars.items():
            self._writer.add_scalar(_tag(phase, name), float(value), step)

    def close(self) -> None:
        """Flush; close the writer that was made here, leave one that was given open."""
        self._writer.flush()
        if self._owned:
            self._writer.close()

    def _add(self, record: StepRecord, tag: str, value: float) -> None:
        self._writer.add_scalar(_tag(record.phase, tag), float(value), record.step, record.time)


def _tag(phase: str, tag: str) -> str:
    return tag if phase == TRAINING else f"{phase}/{tag}"


def _summary_writer(folder: FilePath) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise ImportError(
            "the TensorBoard sink needs PyTorch and TensorBoard: pip install torch tensorboard"
        ) from error
    try:
        return SummaryWriter(os.fspath(folder))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"writer: expected a folder that can be written, got {shown(str(folder))}: {error}"
        ) from None
