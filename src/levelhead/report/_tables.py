"""What the pages take from the tables of statistics and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._health import GradHealth, Health, PerHead, Thresholds
from .._health.numbers import number
from .._health.statistics import Count, Statistic, statistics_of
from .._health.verdicts import LOUD, VERDICTS, ranked


def legend() -> dict[str, dict[str, str]]:
    """Letter and meaning of every verdict, worst first."""
    return {
        name: {"letter": rule.letter, "meaning": rule.meaning} for name, rule in ranked().items()
    }


def fields(*kinds: type[PerHead]) -> dict[str, dict[str, Any]]:
    """What is to be known of every field, in the order that readers like: counts come last."""
    found = [each for kind in kinds for each in statistics_of(kind).values() if each.is_field]
    return _explained(sorted(found, key=lambda each: isinstance(each, Count)))


def main_statistics() -> dict[str, dict[str, Any]]:
    """The same of the statistics that are printed with a Health."""
    return _explained([each for each in statistics_of(Health).values() if each.heading])


def _explained(found: list[Statistic]) -> dict[str, dict[str, Any]]:
    return {
        each.name: {
            **{"label": each.label, "meaning": each.meaning, "log": each.log},
            **{"share": each.form.endswith("%"), "bad": each.bad},
        }
        for each in found
    }


def explained() -> dict[str, dict[str, Any]]:
    """The same of the statistics that have a chart."""
    return _explained(charted())


def charted() -> list[Statistic]:
    """The statistics that have a chart: first what the worst verdicts rest on, counts last."""
    table: dict[str, Statistic] = statistics_of(Health) | statistics_of(GradHealth)
    limits = [limit for rule in ranked().values() for case in rule.cases for limit in case.limits]
    telling = list(dict.fromkeys(table[limit.statistic].chart for limit in limits))

    def rank(each: Statistic) -> tuple[bool, int, bool, bool]:
        place = telling.index(each.name) if each.name in telling else len(telling)
        return isinstance(each, Count), place, not each.heading, not each.tracked

    return sorted((each for each in table.values() if each.chart == each.name), key=rank)


def colours() -> str:
    """CSS: the colours of every verdict, and a class with its name that has them."""
    coloured = {name: rule.colour for name, rule in VERDICTS.items() if rule.colour is not None}
    light = "".join(_pair(name, colour.light) for name, colour in coloured.items())
    dark = "".join(_pair(name, colour.dark) for name, colour in coloured.items())
    plain = "".join(
        _pair(name, ("transparent", "var(--soft)")) for name in VERDICTS if name not in coloured
    )
    classes = "".join(
        f".{name} {{ --of: var(--{name}); --on: var(--on-{name}); }}\n" for name in VERDICTS
    )
    return (
        f":root {{\n{light}{plain}}}\n"
        f"@media (prefers-color-scheme: dark) {{\n:root {{\n{dark}}}\n}}\n{classes}"
    )


def _pair(name: str, pair: tuple[str, str]) -> str:
    fill, ink = pair
    return f"  --{name}: {fill};\n  --on-{name}: {ink};\n"


class Guide(NamedTuple):
    """Where a verdict begins: a labelled line in the chart of the statistic it rests on."""

    at: float
    label: str
    verdict: str


_SIDES = {">=": "from", ">": "above", "<": "below"}


def guides(thresholds: Thresholds) -> dict[str, list[dict[str, Any]]]:
    """By statistic, the worst verdict first."""
    table: dict[str, Statistic] = statistics_of(Health) | statistics_of(GradHealth)
    found: dict[str, list[dict[str, Any]]] = {}
    for verdict, rule in ranked().items():
        for case in rule.cases:
            level = f" ({case.level})" if case.level in LOUD else ""
            for limit in case.limits:
                at = limit.at(thresholds)
                label = f"{verdict}{level} {_SIDES[limit.sign]} {number(at)}"
                if chart := table[limit.statistic].chart:
                    found.setdefault(chart, []).append(Guide(at, label, verdict)._asdict())
    return found


def telling(head: Mapping[str, Any]) -> Statistic:
    """The field whose chart shows best why a head has its verdict."""
    table = statistics_of(Health) | statistics_of(GradHealth)
    limit = VERDICTS[head["verdict"]].rests_on
    chart = table[limit.statistic].chart if limit else ""
    return table[chart or "entropy_ratio"]
