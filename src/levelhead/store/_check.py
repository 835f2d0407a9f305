"""What sinks are given, checked before anything is written: paths, names, records."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .._health import GradHealth, Health, PerHead
from .._hints import shown
from .._options import integer, number
from .._records import Alert, StepRecord
from ._open import StoreError


def file_path(path: Any) -> Path:
    """The path of a file that may exist; files are not looked for here."""
    try:
        found = Path(path)
    except TypeError:
        raise TypeError(f"path: expected the path of a file, got {shown(path)}") from None
    try:
        possible = b"\0" not in os.fsencode(found)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise StoreError(f"path: expected a name that a file can have, got {shown(str(path))}")
    return found


def text(name: str, value: Any) -> str:
    """A string that can be written."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected text that UTF-8 can hold, got {shown(value)}") from None
    return value


def count(name: str, value: Any, least: int = 0) -> int:
    """An integer of at least so much."""
    if not least <= integer(name, value) < 2**63:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {shown(value)}")
    return integer(name, value)


def check_scalars(scalars: Any) -> None:
    if not isinstance(scalars, Mapping):
        raise TypeError(f"scalars: expected a dict of numbers, got {shown(scalars)}")
    for name, value in scalars.items():
        number(f"scalars: {text('scalars', name)}", value)


def check_record(record: Any) -> None:
    """A record that every sink can write: names in UTF-8, ints of 64 bits, statistics per head."""
    if not isinstance(record, StepRecord):
        raise TypeError(f"record: expected a StepRecord, got {shown(record)}")
    check_step(record.step)
    if not math.isfinite(number("time", record.time)):
        raise ValueError(f"time: expected seconds since 1970, got {shown(record.time)}")
    _check_layers("health", record.health, Health)
    _check_layers("gradients", record.gradients, GradHealth)
    check_scalars(record.scalars)
    if not isinstance(record.alerts, list | tuple):
        raise TypeError(f"alerts: expected a tuple, got {shown(record.alerts)}")
    for alert in record.alerts:
        if not isinstance(alert, Alert):
            raise TypeError(f"alerts: expected objects of class Alert, got {shown(alert)}")
        for field in fields(alert):
            check = _FIELDS.get(str(field.type))
            if check is not None:
                check(f"alert.{field.name}", getattr(alert, field.name))


def _check_layers(name: str, layers: Any, kind: type[PerHead]) -> None:
    if not isinstance(layers, Mapping):
        raise TypeError(f"{name}: expected a dict of layers, got {shown(layers)}")
    for layer, statistics in layers.items():
        text("layer", layer)
        expected = f"{name}: expected {kind.__name__} of shape (heads,) for layer {layer!r}"
        if not isinstance(statistics, kind):
            other = isinstance(statistics, PerHead)
            came = type(statistics).__name__ if other else shown(statistics)
            raise TypeError(f"{expected}, got {came}")
        if len(statistics.shape) != 1:
            raise ValueError(f"{expected}, got shape {statistics.shape}")


def check_step(step: Any) -> None:
    _int64("step", step)


def _int64(name: str, value: Any) -> None:
    if not -(2**63) <= integer(name, value) < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {shown(value)}")


_FIELDS: dict[str, Callable[[str, Any], Any]] = {"int": _int64, "float": number, "str": text}
