"""The lab: what people say about √d_k, measured. One module an experiment."""

from ._experiment import Experiment, LabError, UnknownExperiment, experiments
from ._pace import Progress
from ._progress import progress_bar
from ._run import LabRun, run

__all__ = [
    "Experiment",
    "LabError",
    "LabRun",
    "Progress",
    "UnknownExperiment",
    "experiments",
    "progress_bar",
    "run",
]
