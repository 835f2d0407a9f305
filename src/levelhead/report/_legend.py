"""The verdicts as a reader meets them: a letter, a meaning, and an order from worst to best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._verdicts import LEVELS

Head = Mapping[str, Any]


class Mark(NamedTuple):
    """How a verdict is shown. The letter carries it where colour cannot."""

    letter: str
    meaning: str
    style: str  # on a terminal, as rich writes it


# Worst first, as levelhead judges; "short" is no verdict of its own but the lack of one.
LEGEND: dict[str, Mark] = {
    "nonfinite": Mark("N", "NaN or infinite scores", "bold white on magenta"),
    "exploding": Mark("X", "scores so large that training tends to break", "bold white on red"),
    "saturated": Mark("S", "one key takes all; hardly any gradient", "bold black on dark_orange"),
    "collapsed": Mark("C", "almost no choice is left", "bold black on yellow"),
    "uniform": Mark("u", "every key gets the same; normal in a new model", "black on grey78"),
    "sink": Mark("k", "parks its weight on the first key; benign", "black on sky_blue2"),
    "sharp": Mark("p", "looks at few keys; copying heads do", "black on light_cyan3"),
    "healthy": Mark("·", "spread enough to choose and to learn", "black on dark_sea_green2"),
    "short": Mark("–", "not judged: rows too short to say anything", "dim"),
}
ORDER = {verdict: place for place, verdict in enumerate(LEGEND)}


def largest_score(head: Head) -> float:
    """max |score|; 0 where no score is finite."""
    return float(max(abs(head["score_max"] or 0.0), abs(head["score_min"] or 0.0)))


# By what heads with the same verdict and level are ordered; larger is worse.
_BADNESS: dict[str, Callable[[Head], Any]] = {
    "nonfinite": lambda head: head["nonfinite_rows"],
    "exploding": largest_score,
    "saturated": lambda head: head["saturated"],
    "collapsed": lambda head: -head["entropy_ratio"],
    "uniform": lambda head: head["entropy_ratio"],
    "sink": lambda head: head["first_key"],
    "sharp": lambda head: -head["entropy_ratio"],
}


def severity(head: Head) -> tuple[int, int, float]:
    """Sorts the worst heads to the front."""
    badness = _BADNESS[head["verdict"]](head) if head["verdict"] in _BADNESS else 0.0
    return LEVELS.index(head["level"]), ORDER[head["verdict"]], -(badness or 0.0)


def needs_attention(head: Head) -> bool:
    """Whether a person should act: a warning or worse."""
    return head["level"] in ("critical", "error", "warning")
