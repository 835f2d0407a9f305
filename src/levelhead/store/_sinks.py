"""The other sinks: JSON lines for programs, TensorBoard for eyes."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .._health import GradHealth, Health
from .._records import TRAINING, StepRecord
from ._judged import judged
from ._open import FilePath, StoreError
from ._outage import Outage
from ._run import known
from ._sink import Sink

SHOWN = ("score_max", "entropy_ratio", "saturated", "signal", "survival")
STATISTICS = (*Health.FIELDS, *GradHealth.FIELDS)


class JsonLines(Sink):
    """One JSON object a step, one line each, appended to a file.

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

    A line has step, phase, time, layers and alerts. A layer has its name and its heads; a head has
    its index, verdict, level, reason, every field of Health and, after a backward pass, of
    GradHealth. null is a number that is not finite, or the verdict of a head with too few keys. A
    full disk is logged once and loses whole lines; training goes on.
    """

    def __init__(self, path: FilePath) -> None:
        self.path = Path(path)
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
        rest = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # no half lines
            self._outage.failed(record.step, error, "free space on its disk")
        else:
            self._outage.worked(record.step)

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


_SAID = ("verdict", "level", "reason")


def _plain(record: StepRecord) -> dict[str, Any]:
    verdicts = judged(record)
    layers = []
    for name, health in record.health.items():
        fields = health.to_dict()
        if name in record.gradients:
            fields |= record.gradients[name].to_dict()
        heads = []
        for head in range(health.shape[0]):
            verdict = verdicts[name].get(head)
            said = {key: getattr(verdict, key, None) for key in _SAID}
            heads.append({"head": head, **said, **{key: fields[key][head] for key in fields}})
        layers.append({"name": name, "heads": heads})
    alerts = [asdict(alert) for alert in record.alerts]
    for alert in alerts:
        alert["value"] = alert["value"] if math.isfinite(alert["value"]) else None
    where = {"step": int(record.step), "phase": record.phase, "time": record.time}
    return where | {"layers": layers, "alerts": alerts}


# Of these a small value is the bad one; of all others a large one.
_LOW_IS_BAD = {
    *("score_min", "entropy", "entropy_ratio", "effective_keys", "signal", "jacobian_norm"),
    *("weight_grad_norm", "score_grad_norm", "survival"),
}


class TensorBoard(Sink):
    """Scalars for TensorBoard: per layer the worst head and the mean of the heads.

    >>> import tempfile, numpy as np, levelhead as lh
    >>> from levelhead.store import StepRecord, TensorBoard
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 32, 64))
    >>> with TensorBoard(tempfile.mkdtemp()) as sink:
    ...     sink(StepRecord(7, 0.0, {"attn": lh.attention(q, k, v, return_health=True).health}))

    writer:     a SummaryWriter, which stays open, or the folder to make one for
    statistics: fields of Health and GradHealth

    entropy_ratio/LAYER is the value of the layer's worst head (the largest or the smallest,
    whichever is bad), entropy_ratio_mean/LAYER the mean over its heads, worst_head/LAYER the
    index of the head with the worst verdict. heads/critical, heads/error and heads/warning count
    the heads of all layers at that level. Alerts are texts. So a chart is a layer, a group of
    charts a statistic, and the file grows by layers, not by heads. Steps of inference have tags of
    their own, inference/entropy_ratio/LAYER: they have numbers of their own.
    """

    def __init__(
        self,
        writer: Any,
        *,
        statistics: Sequence[str] = SHOWN,
    ) -> None:
        for statistic in statistics:
            known(statistic, "statistic", STATISTICS)
        self.statistics = tuple(statistics)
        self._owned = isinstance(writer, (str, os.PathLike))
        self._writer = _summary_writer(writer) if self._owned else writer

    def __call__(self, record: StepRecord) -> None:
        """Write one step's scalars."""
        verdicts = judged(record)
        for layer, health in record.health.items():
            where = layer or "outside_any_module"
            for statistic in self.statistics:
                source = record.gradients.get(layer) if statistic in GradHealth.FIELDS else health
                heads = np.array([]) if source is None else getattr(source, statistic)
                heads = heads[~np.isnan(heads)]
                if len(heads):
                    worst = heads.min() if statistic in _LOW_IS_BAD else heads.max()
                    self._add(record, f"{statistic}/{where}", worst)
                    self._add(record, f"{statistic}_mean/{where}", heads.mean())
            for head in list(verdicts[layer])[:1]:
                self._add(record, f"worst_head/{where}", head)
        levels = Counter(v.level for heads in verdicts.values() for v in heads.values())
        for level in ("critical", "error", "warning"):
            self._add(record, f"heads/{level}", levels[level])
        for alert in record.alerts:
            self._writer.add_text(_tag(record, "alerts"), str(alert), record.step, record.time)

    def close(self) -> None:
        """Flush; close the writer that was made here, leave one that was given open."""
        self._writer.flush()
        if self._owned:
            self._writer.close()

    def _add(self, record: StepRecord, tag: str, value: float) -> None:
        self._writer.add_scalar(_tag(record, tag), float(value), record.step, record.time)


def _tag(record: StepRecord, tag: str) -> str:
    return tag if record.phase == TRAINING else f"{record.phase}/{tag}"


def _summary_writer(folder: FilePath) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise ImportError(
            "the TensorBoard sink needs PyTorch and TensorBoard: pip install torch tensorboard"
        ) from error
    return SummaryWriter(os.fspath(folder))
