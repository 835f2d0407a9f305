"""Places that keep what a watch sees: SQLite, JSON lines, TensorBoard."""

from .._records import Alert, StepRecord
from ._open import StoreError
from ._run import Run, read_run
from ._runs import RunEntry, list_runs
from ._sinks import JsonLines, TensorBoard
from ._store import Store

__all__ = [
    "Alert",
    "JsonLines",
    "Run",
    "RunEntry",
    "StepRecord",
    "Store",
    "StoreError",
    "TensorBoard",
    "list_runs",
    "read_run",
]
