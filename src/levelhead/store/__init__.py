"""Places that keep what a watch sees: SQLite, JSON lines, and the trackers of experiments."""

from .._records import Alert, StepRecord
from ._open import StoreError
from ._run import Run, read_run
from ._runs import RunEntry, list_runs
from ._sinks import JsonLines, TensorBoard
from ._store import Store
from ._trackers import MLflow, Scalars, WandB

__all__ = [
    "Alert",
    "JsonLines",
    "MLflow",
    "Run",
    "RunEntry",
    "Scalars",
    "StepRecord",
    "Store",
    "StoreError",
    "TensorBoard",
    "WandB",
    "list_runs",
    "read_run",
]
