"""Write the tables of docs/health.md and docs/verdicts.md from what the code and the lab have.

    python docs/tables.py

`tests/test_tables.py` fails while they differ.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import levelhead as lh
from levelhead._health.statistics import statistics_of
from levelhead._health.verdicts import MODEL_VERDICTS, VERDICTS, Limit, Rule, ranked

HERE = Path(__file__).parent


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


def levels(rule: Rule) -> str:
    """The levels that a head's verdict can have, the mildest first, and where the others begin."""
    mildest, *worse = reversed(rule.cases)
    begin = [f"{case.level} from {case.limits[0].at(lh.Thresholds()):,g}" for case in worse]
    return ", ".join([mildest.level, *begin])


def course() -> str:
    """What many heads at once can mean, over time."""
    rows = [("finding", "level", "what it means", "what to do")]
    for name, foretold in (("nonfinite", ""), ("exploding", "warning as a forecast, ")):
        each, level = VERDICTS[name], foretold + levels(VERDICTS[name])
        rows.append((f"[`{name}`](#{name})", level, each.meaning, each.hint))
    for name, each in MODEL_VERDICTS.items():
        level = "info or warning" if name == "flat" else each.level
        rows.append((f"[`{name}`](#{name})", level, each.meaning, each.hint))
    return table(*rows)


def thresholds() -> str:
    """Every threshold, with its source."""
    rows = [("threshold", "value", "what it is", "source")]
    for each in fields(lh.Thresholds):
        value = f"{each.default:,g}"
        rows.append((f"`{each.name}`", value, each.metadata["meaning"], each.metadata["source"]))
    return table(*rows)


def study() -> str:
    """Claim 16 in numbers."""
    results = json.loads((HERE / "lab" / "results.json").read_text(encoding="utf-8"))
    found = next((each for each in results if each["claim"] == 16), None)
    if found is None:
        return "The study is not among the published results."
    columns = found["figures"]["summary"]
    rows = [("runs", "recorded every", "ended well", "false alarms", "failed", "caught", "lead")]
    for part, every, well, false, sick, caught, low, lead, high in zip(
        *(columns[name] for name in SUMMARY), strict=True
    ):
        steps = "-" if lead is None else f"{lead:.0f} steps (quartiles {low:.0f}, {high:.0f})"
        share = f"{false} ({false / max(well, 1):.1%})", f"{caught} ({caught / max(sick, 1):.0%})"
        rarely = f"{every} steps" if every > 1 else "step"
        rows.append((part, rarely, str(well), share[0], str(sick), share[1], steps))
    return table(*rows) + f"\n\n{found['why'][:1].upper()}{found['why'][1:]}"


SUMMARY = (
    *("part", "recorded_every", "well", "false", "sick", "caught"),
    *("lead_low", "lead", "lead_high"),
)
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "health.md": {
        "statistics": lambda: statistics(lh.Health),
        "gradients": lambda: statistics(lh.GradHealth),
        "verdicts": verdicts,
        "meanings": meanings,
    },
    "verdicts.md": {"course": course, "thresholds": thresholds, "study": study},
}


def filled(name: str) -> str:
    """A page with its tables as they should be."""
    page = (HERE / name).read_text(encoding="utf-8")
    for part, make in PARTS[name].items():
        before, start, rest = page.partition(f"<!-- {part}:start -->\n")
        _, end, after = rest.partition(f"<!-- {part}:end -->")
        if not (start and end):
            sys.exit(f"{name} has no place for its {part}: <!-- {part}:start --> … :end -->")
        page = f"{before}{start}{make()}\n{end}{after}"
    return page


if __name__ == "__main__":
    for each in PARTS:
        (HERE / each).write_text(filled(each), encoding="utf-8")
