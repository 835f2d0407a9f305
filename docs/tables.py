"""Write the tables of docs/health.md from the tables that the code has.

    python docs/tables.py

`tests/test_tables.py` fails while they differ.
"""

import sys
from dataclasses import fields
from pathlib import Path

import levelhead as lh
from levelhead._health.statistics import statistics_of
from levelhead._health.verdicts import Limit, ranked

PAGE = Path(__file__).parent / "health.md"


def table(*rows: tuple[str, ...]) -> str:
    """Markdown; the first row has the headings."""
    heading, *body = rows
    lines = [heading, ("---",) * len(heading), *body]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def statistics(kind: type) -> str:
    """Every field of Health or GradHealth."""
    known = statistics_of(kind)
    rows = [("field", "what it says", "definition", "over")]
    for each in known.values():
        if each.is_field:
            over = known[each.over].label if each.over else ""
            rows.append((f"`{each.name}`", each.meaning, each.definition, over))
    return table(*rows)


def rule(limit: Limit) -> str:
    """A limit in words, with the name of its threshold."""
    sign = limit.sign.replace(">=", "≥")
    if not isinstance(limit.threshold, str):
        return f"`{limit.statistic}` {sign} {limit.threshold:g}"
    value = getattr(lh.Thresholds, limit.threshold)
    return f"`{limit.statistic}` {sign} {value:,g} (`{limit.threshold}`)"


def verdicts() -> str:
    """Every verdict that is a rule, level by level, with the sources of its thresholds."""
    sources = {each.name: each.metadata["source"] for each in fields(lh.Thresholds)}
    rows = [("verdict", "level", "rule", "source")]
    for name, each in ranked().items():
        for case in each.cases:
            words = " and ".join(map(rule, case.limits)) or "none of the others"
            if each.unless:
                words += f", and no {each.unless}"
            of = [sources[t] for _, _, t in case.limits if isinstance(t, str)]
            rows.append((f"`{name}`", case.level, words, "; ".join(dict.fromkeys(of))))
    return table(*rows)


def meanings() -> str:
    """What every verdict means, and what to do."""
    rows = [("verdict", "letter", "what it means", "what to do")]
    for name, each in ranked().items():
        rows.append((f"`{name}`", each.letter, each.meaning, each.hint))
    return table(*rows)


PARTS = {
    "statistics": lambda: statistics(lh.Health),
    "gradients": lambda: statistics(lh.GradHealth),
    "verdicts": verdicts,
    "meanings": meanings,
}


def filled(page: str) -> str:
    """The page with its tables as they should be."""
    for name, make in PARTS.items():
        before, start, rest = page.partition(f"<!-- {name}:start -->\n")
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        if not (start and end):
            sys.exit(f"{PAGE} has no place for its {name}: <!-- {name}:start --> … :end -->")
        page = f"{before}{start}{make()}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
