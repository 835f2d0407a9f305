"""The lab: what people say about √d_k, measured. One module per claim, in claims/."""

from ._experiment import Experiment, LabError, UnknownExperiment, experiments, reason, verdict_words
from ._progress import Finished, Progress, progress_bar
from ._run import LabRun, run

__all__ = [
    "Experiment",
    "Finished",
    "LabError",
    "LabRun",
    "Progress",
    "UnknownExperiment",
    "experiments",
    "progress_bar",
    "reason",
    "run",
    "verdict_words",
]
