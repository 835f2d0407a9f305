"""The middle of the house: one table of statistics, one of verdicts, one judge.

statistics.py  what is measured: every statistic, as a table
verdicts.py    what it can mean: every verdict and its thresholds, as a table
judge.py       the only place that judges: heads, layers, the model, at one moment
history.py     its memory: what the course of a run says
findings.py    what it has to say
health.py      Health and GradHealth: sums per head, and their exact merging
describe.py    words and numbers for people
"""

from .findings import Fact, Finding
from .health import GRAD_SUMS, HEALTH_SUMS, GradHealth, Health, PerHead
from .history import History
from .judge import Evidence, Judgement, findings, judge
from .statistics import LARGE_SCORE, SATURATED_WEIGHT, Floats
from .verdicts import LEVELS, LOUD, VERDICTS, Thresholds, Verdict

__all__ = [
    "GRAD_SUMS",
    "HEALTH_SUMS",
    "LARGE_SCORE",
    "LEVELS",
    "LOUD",
    "SATURATED_WEIGHT",
    "VERDICTS",
    "Evidence",
    "Fact",
    "Finding",
    "Floats",
    "GradHealth",
    "Health",
    "History",
    "Judgement",
    "PerHead",
    "Thresholds",
    "Verdict",
    "findings",
    "judge",
]
