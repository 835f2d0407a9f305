"""From figures to files: results.json, timings.json and the tables as CSV.

results.json holds nothing that depends on the clock, so the same seeds give the same bytes. What
the clock said (figures named "timings") goes into timings.json. A verdict may depend on it only by
a comparison with a large margin, and no sentence in results.json quotes it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import write_whole
from ._experiment import NOT_RUN, VERDICTS, Experiment
from ._figures import TIMINGS, Figures, powers, summary


@dataclass(frozen=True)
class Outcome:
    """An experiment with the figures of all its seeds, or with the reason why it has none."""

    experiment: Experiment
    size: str
    seeds: Sequence[int] = ()
    runs: Sequence[Figures] = ()
    missing: str | None = None

    def texts(self) -> dict[str, str]:
        """The text in its parts, with the numbers filled in."""
        one, numbers = self.experiment, self.experiment.numbers(self.runs)
        parts = {"said": one.said, "done": one.done, "found": one.found, "limits": one.limits}
        return {part: powers(text.format(**numbers)) for part, text in parts.items()}

    def key_figures(self) -> dict[str, str]:
        """The few figures to remember, in words; empty if the experiment names none."""
        if not self.experiment.key or not self.runs:
            return {}
        numbers = self.experiment.numbers(self.runs)
        lines = self.experiment.key.items()
        return {label.format(**numbers): powers(value.format(**numbers)) for label, value in lines}

    def clock(self) -> str:
        """What the clock said, in words; empty for most."""
        one = self.experiment
        return powers(one.clock.format(**one.numbers(self.runs))) if one.clock and self.runs else ""

    def verdict(self) -> tuple[str, str]:
        """The verdict and why; "not run" and what to install."""
        if self.missing:
            return NOT_RUN, self.missing
        verdict, why = self.experiment.verdict(self.runs)
        if verdict not in VERDICTS:
            raise ValueError(f"{self.experiment.name}: no such verdict: {verdict!r}")
        return verdict, powers(why)

    def result(self) -> dict[str, Any]:
        """The entry in results.json."""
        verdict, why = self.verdict()
        figures = summary(self.runs) if self.runs else {}
        figures.pop(TIMINGS, None)
        return {
            "claim": self.experiment.claim,
            "experiment": self.experiment.name,
            "title": self.experiment.title,
            "claim_text": self.experiment.said,
            "verdict": verdict,
            "why": why,
            **({"key_figures": key} if (key := self.key_figures()) else {}),
            "text": " ".join(self.texts().values()) if self.runs else "",
            "size": self.size,
            "seeds": list(self.seeds),
            "figures": figures,
        }


def paragraphs(text: str, most: int = 320) -> list[str]:
    """A long text as short paragraphs: whole sentences, as many as fit.

    >>> paragraphs("One is odd. Two is even. Is three odd? It is.", most=26)
    ['One is odd. Two is even.', 'Is three odd? It is.']
    """
    found = [""]
    for sentence in re.split(r"(?<=[.?!]) (?=[A-Z“\[\d])", text):
        if found[-1] and len(found[-1]) + len(sentence) > most:
            found.append("")
        found[-1] = f"{found[-1]} {sentence}".strip()
    return found


def write_results(out: Path, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Write results.json, timings.json and data/*.csv; returns what is in results.json."""
    results = [outcome.result() for outcome in outcomes]
    write_json(out / "results.json", results)
    timed = [one for one in outcomes if one.runs and TIMINGS in one.runs[0]]
    write_json(
        out / "timings.json",
        [
            {
                "experiment": one.experiment.name,
                "text": one.clock(),
                "timings": summary([run[TIMINGS] for run in one.runs]),
            }
            for one in timed
        ],
    )
    (out / "data").mkdir(exist_ok=True)
    for outcome in outcomes:
        for table, text in _tables(outcome).items():
            write_whole(out / "data" / f"{outcome.experiment.name}-{table}.csv", text)
    return results


def _tables(outcome: Outcome) -> dict[str, str]:
    """Each table as CSV, with the seed as the first column; single numbers make a table, too."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for seed, run in zip(outcome.seeds, outcome.runs, strict=True):
        for name, value in _flat(run):
            if isinstance(value, dict):
                columns = {"seed": [seed] * len(next(iter(value.values()))), **value}
                rows = zip(*columns.values(), strict=True)
                tables.setdefault(name, []).extend(
                    dict(zip(columns, row, strict=True)) for row in rows
                )
        single = {name: value for name, value in run.items() if not isinstance(value, dict)}
        if single:
            tables.setdefault("numbers", []).append({"seed": seed, **single})
    return {name: _csv(rows) for name, rows in tables.items()}


def _flat(run: Figures) -> list[tuple[str, Any]]:
    timings = run.get(TIMINGS, {})
    return [item for item in run.items() if item[0] != TIMINGS] + [
        (f"{TIMINGS}-{name}", table) for name, table in timings.items()
    ]


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_json(path: Path, value: Any) -> None:
    """Write it readably, and refuse NaN and infinity, which JSON does not have."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
