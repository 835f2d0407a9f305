"""What an experiment is, and which there are: every module here whose name has no underscore.

A module is an experiment by its attributes:

    CLAIM    the claim's number
    TITLE    a line for the table of contents
    SAID     the claim, in our own words
    DONE, FOUND, LIMITS   what was done, what came out, where it stops being true, with format
             fields that `numbers` fills: no measured number is typed in
    measure(size, seed)   figures (see _figures.py); the same seed gives the same
    numbers(runs)         the figures of all seeds → the numbers that the text quotes
    verdict(runs)         the figures of all seeds → one of VERDICTS, and why
    plot(runs)            the figures of all seeds → pictures: Plotly figures as plain data
    CLOCK    optional: what the clock said, with format fields; kept out of results.json
    SHOW     optional: the tables that the page prints; by default the first one
    NEEDS    optional: what of _needs.py must be installed
    SEEDS    optional: how many seeds a size takes
    SECONDS  optional: what one seed takes about, so that the time left can be told
    PIECES   optional: how many calls of its `train` a seed makes; each is kept as it is done
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from .. import __version__
from .._hints import nearest
from ._figures import Figures

SIZES = ("tiny", "quick", "full")
VERDICTS = ("holds", "holds partly", "does not hold")
Runs = Sequence[Figures]


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
    title: str
    said: str
    done: str
    found: str
    limits: str
    measure: Callable[[str, int], Figures]
    numbers: Callable[[Runs], dict[str, Any]]
    verdict: Callable[[Runs], tuple[str, str]]
    plot: Callable[[Runs], list[dict[str, Any]]]
    clock: str
    show: tuple[str, ...]
    needs: tuple[str, ...]
    seeds: Mapping[str, int]
    seconds: Mapping[str, float]
    pieces: Mapping[str, int]
    module: ModuleType

    @classmethod
    def of(cls, module: ModuleType) -> Experiment:
        """The experiment that a module describes."""
        return cls(
            name=module.__name__.rpartition(".")[2],
            claim=module.CLAIM,
            title=module.TITLE,
            said=_flow(module.SAID),
            done=_flow(module.DONE),
            found=_flow(module.FOUND),
            limits=_flow(module.LIMITS),
            measure=module.measure,
            numbers=module.numbers,
            verdict=module.verdict,
            plot=module.plot,
            clock=_flow(getattr(module, "CLOCK", "")),
            show=getattr(module, "SHOW", ()),
            needs=getattr(module, "NEEDS", ()),
            seeds={"tiny": 2, "quick": 5, "full": 10} | getattr(module, "SEEDS", {}),
            seconds={"tiny": 0.2, "quick": 1.0, "full": 5.0} | getattr(module, "SECONDS", {}),
            pieces=getattr(module, "PIECES", {}),
            module=module,
        )


def _flow(text: str) -> str:
    """Wrapped lines as one."""
    return " ".join(text.split())


@cache
def experiments() -> Mapping[str, Experiment]:
    """All experiments by name, in the order of their claims.

    >>> from levelhead import lab
    >>> lab.experiments()["variance"].claim
    2
    """
    package = importlib.import_module(__package__)
    modules = [
        importlib.import_module(f"{__package__}.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
        if not info.name.startswith("_")
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


# These look at figures or describe; a change of theirs leaves what was measured as it is.
_READERS = {"numbers", "verdict", "plot"}
_DESCRIBING = {"CLAIM", "NEEDS", "PIECES", "SECONDS", "SEEDS", "SHOW"}
_FRAMEWORK = {"_experiment", "_figures", "_plot"}


def fingerprint(experiment: Experiment) -> str:
    """A name for the code that measures, so that figures of other code are not taken for its own.

    Texts, plots and verdicts do not count: a better sentence needs no second run.
    """
    sources, queue = [f"levelhead {__version__}"], [experiment.module.__name__]
    seen = set(queue)
    while queue:
        tree = ast.parse(_source(queue.pop()))
        sources.extend(ast.dump(node) for node in tree.body if not _is_presentation(node))
        for node in ast.walk(tree):  # also what is imported only where it is needed
            near = isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
            name = f"{__package__}.{near}"
            if near and near not in _FRAMEWORK and name not in seen:
                seen.add(name)
                queue.append(name)
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]


def _source(name: str) -> str:
    """The text of a module, which is not run: it may need what is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{name} has no file to read")
    return Path(found.origin).read_text(encoding="utf-8")


def _is_presentation(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in _READERS
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name, value = node.targets[0].id, node.value
        return name in _DESCRIBING or (isinstance(value, ast.Constant) and type(value.value) is str)
    return isinstance(node, ast.Expr)  # a docstring
