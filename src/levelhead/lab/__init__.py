"""The lab: what people say about √d_k, measured. One module an experiment."""

from ._experiment import Experiment, LabError, UnknownExperiment, experiments
from ._progress import progress_bar
from ._run import LabRun, Progress, run

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
