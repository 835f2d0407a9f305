"""The engine, as levelhead/_attention.py calls it."""

from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray

OPEN: int = 2305843009213693951

def health_columns() -> tuple[str, ...]: ...
def grad_columns() -> tuple[str, ...]: ...
def forward(
    query: object | None,
    key: object | None,
    value: object | None,
    mask: object | None,
    left: int,
    right: int,
    query_offset: object | None,
    key_lengths: object | None,
    scale: object | None,
    softcap: float,
    sinks: object | None,
    dropout: float,
    seed: int,
    threads: int,
    lse: bool,
    health: bool,
    weights: bool,
) -> Any: ...
def backward(
    grad_output: object | None,
    query: object | None,
    key: object | None,
    value: object | None,
    output: object | None,
    lse: object | None,
    mask: object | None,
    left: int,
    right: int,
    query_offset: object | None,
    key_lengths: object | None,
    scale: object | None,
    softcap: float,
    sinks: object | None,
    dropout: float,
    seed: int,
    threads: int,
    health: bool,
    scores: bool,
) -> tuple[Any, ...]: ...
def cpu_info() -> dict[str, Any]: ...
@overload
def exp2(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", writable=False)],
    y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C")],
) -> None: ...
@overload
def exp2(
    x: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", writable=False)],
    y: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C")],
) -> None: ...
@overload
def log1p(
    x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", writable=False)],
    y: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C")],
) -> None: ...
@overload
def log1p(
    x: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", writable=False)],
    y: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C")],
) -> None: ...
def measure_fma_peak(threads: int) -> float: ...
def measure_read_bandwidth(threads: int) -> float: ...
