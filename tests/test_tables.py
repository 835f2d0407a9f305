"""The two tables, and everything that lists statistics or verdicts without being made from them."""

import importlib.util
import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from string import Formatter

import numpy as np
import pytest
from rich.style import Style

import levelhead as lh
from levelhead import _engine
from levelhead._health import GRAD_SUMS, HEALTH_SUMS, LARGE_SCORE, LEVELS, LOUD, SATURATED_WEIGHT
from levelhead._health.numbers import number, plain
from levelhead._health.statistics import Mean, OfScores, statistics_of
from levelhead._health.verdicts import HEALTHY, MARKS, SHORT, VERDICTS, failable, ranked
from levelhead._reference import health as reference_health
from levelhead.report import _tables
from levelhead.report._terminal import style_of
from levelhead.torch import _row_statistics

ROOT = Path(__file__).parents[1]
STATISTICS = statistics_of(lh.Health) | statistics_of(lh.GradHealth)
LIMITS = [
    (name, limit) for name, rule in VERDICTS.items() for case in rule.cases for limit in case.limits
]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


# ---------------------------------------------------------------- statistics


def test_columns_and_fields_stand_in_the_order_of_the_table():
    assert lh.Health.COLUMNS == HEALTH_SUMS and len(HEALTH_SUMS) == len(set(HEALTH_SUMS))
    assert lh.GradHealth.COLUMNS == GRAD_SUMS == ("weight_grad_sq", "score_grad_sq")
    for kind in (lh.Health, lh.GradHealth):
        table = statistics_of(kind)
        assert [name for name in table if table[name].is_field] == list(kind.FIELDS)
        for each in table.values():
            assert each.place == (kind.COLUMNS.index(each.column) if each.column else -1)


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_is_explained(name):
    each = STATISTICS[name]
    assert each.label and re.fullmatch(r"[A-Z].*\.", each.meaning)
    assert each.definition or not each.is_field
    assert each.chart in ("", name) or STATISTICS[each.chart].is_field
    assert len(each.heading) <= 8
    format(0.5, each.form)
    assert each.__doc__ == each.meaning and f"{name}: {each.meaning}" in (
        lh.Health.__doc__ + lh.GradHealth.__doc__
    )


def test_every_mean_over_rows_has_its_formulas():
    """In the specification, and in plain torch; the engine's are compared with them elsewhere."""
    means = {
        name
        for name, each in statistics_of(lh.Health).items()
        if isinstance(each, Mean) and each.over.endswith("_rows")
    }
    assert set(reference_health.DEFINITIONS) == set(_row_statistics.FORMULAS) == means


def test_the_engine_writes_the_columns_of_the_table():
    """What it computes is compared with the reference elsewhere."""
    assert _engine.health_columns() == HEALTH_SUMS and _engine.grad_columns() == GRAD_SUMS
    text = read("csrc/problem.h")
    assert float(re.search(r"kLargeScore = ([\d.]+)", text)[1]) == LARGE_SCORE
    assert float(re.search(r"kSaturatedWeight = ([\d.]+)", text)[1]) == SATURATED_WEIGHT


def test_what_no_part_has_seen_is_the_identity_of_merging():
    nothing = lh.Health._combine(np.empty((0, 1, len(HEALTH_SUMS))))
    for each in statistics_of(lh.Health).values():
        start = {"max": -np.inf, "min": np.inf}.get(each.merge) if isinstance(each, OfScores) else 0
        if each.column:
            assert nothing[0, each.place] == (start or 0), each.name


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_is_complete(name):
    rule = VERDICTS[name]
    assert re.fullmatch("[a-z]+", name)  # it is the name of a CSS class
    assert len(rule.letter) == 1 and rule.meaning and rule.hint
    levels = [LEVELS.index(case.level) for case in rule.cases]
    assert levels == sorted(levels)  # the first case that holds is the worst
    assert not rule.unless or rule.unless in VERDICTS
    named = {field for _, field, _, _ in Formatter().parse(rule.reason) if field}
    assert named <= {*STATISTICS, "level", "limit"}
    Style.parse(style_of(name))
    for shade in [*rule.colour.light, *rule.colour.dark] if rule.colour else []:
        assert re.fullmatch("#[0-9a-f]{6}", shade)


def test_limits_rest_on_statistics_and_thresholds_that_there_are():
    known = {each.name for each in fields(lh.Thresholds)}
    assert {limit.statistic for _, limit in LIMITS} <= set(STATISTICS)
    named = {limit.threshold for _, limit in LIMITS if isinstance(limit.threshold, str)}
    # The others are those of a pattern, and of the course of a training.
    memory = "".join(read(f"src/levelhead/_health/{name}.py") for name in ("history", "judge"))
    used = set(re.findall(r"at\.([a-z_]+)", memory))
    assert named <= known <= named | used  # and none is there for nothing
    assert all(each.metadata["source"] for each in fields(lh.Thresholds))


def test_marks_tell_verdicts_and_levels_apart():
    letters = Counter(rule.letter for rule in VERDICTS.values())
    assert max(letters.values()) == 1
    assert len(set(MARKS.values())) == len(LEVELS) and list(MARKS) == list(LEVELS)
    assert " " not in {*letters, *MARKS.values()}  # a blank is a layer that took no part


def test_verdicts_are_ranked_by_their_worst_level():
    assert list(ranked()) == [
        *("nonfinite", "exploding", "saturated", "collapsed"),
        *("large", "uniform", "sink", "sharp", HEALTHY, SHORT),
    ]
    assert failable() == tuple(ranked())[:-2]


# ---------------------------------------------------------------- pages


def test_every_verdict_has_its_colours_on_a_page():
    css = _tables.colours()
    for name in VERDICTS:
        assert f".{name} {{ --of: var(--{name}); --on: var(--on-{name}); }}" in css
        assert f"--{name}: " in css and f"--on-{name}: " in css


def test_guides_are_the_thresholds_of_the_charts():
    guides = _tables.guides(lh.Thresholds(exploding=2.0))
    assert set(guides) <= {each.name for each in _tables.charted()}
    assert [guide["at"] for guide in guides["largest_score"]] == [10_000.0, 2.0, 100.0]
    assert guides["largest_score"][1]["label"] == "exploding (error) from 2"
    assert guides["entropy_ratio"][0]["label"] == "collapsed (warning) below 0.05"
    assert guides["first_key"] == [{"at": 0.3, "label": "sink above 0.3", "verdict": "sink"}]
    assert "score_var" not in guides  # a standard deviation is no variance


def test_what_the_worst_verdicts_rest_on_is_drawn_first():
    names = [each.name for each in _tables.charted()]
    assert names[:3] == ["largest_score", "saturated", "entropy_ratio"]
    assert {*lh.Health.FIELDS, *lh.GradHealth.FIELDS} <= set(names) and names[-1] in (
        "pairs",
        "empty_rows",
    )


@pytest.mark.parametrize(
    "asset",
    [*sorted(path.name for path in (ROOT / "src/levelhead/report/assets").glob("*.js")), "map.css"],
)
def test_assets_list_no_statistics_and_no_verdicts(asset):
    """They get them as data. A heading or a class that means a thing of its own is fine."""
    text = read(f"src/levelhead/report/assets/{asset}")
    quoted = set(re.findall(r"""["'`.](\w+)""", text))
    verdicts = {name for name in VERDICTS if name not in (SHORT, "sharp", HEALTHY)}
    assert not quoted & verdicts
    assert not quoted & (set(STATISTICS) - {"score_std", "rows"})


# ---------------------------------------------------------------- the docs


def test_the_tables_of_the_docs_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for page in tables.PARTS:
        assert read(f"docs/{page}") == tables.filled(page), "run: python docs/tables.py"


@pytest.mark.parametrize("name", ["nonfinite", "exploding"])
def test_every_level_of_an_alarm_is_in_the_docs(name):
    (level,) = re.findall(rf"\| \[`{name}`\]\(#{name}\) \| (.*?) \|", read("docs/verdicts.md"))
    foretold = {"warning"} if name == "exploding" else set()
    given = {case.level for case in VERDICTS[name].cases}
    assert {each for each in LEVELS if each in level} == given | foretold


def test_the_docs_list_what_there_is():
    listed = ", ".join(failable())
    assert f"From worst to best: {listed};" in read("docs/checkup.md")
    marks = ", ".join(f"`{MARKS[level]}` {level}" for level in reversed(LEVELS))
    assert f"a mark per head ({marks})" in read("docs/watching.md")
    tracked = [f"`{name}`" for name, each in STATISTICS.items() if each.tracked]
    assert f"The statistics are {', '.join(tracked[:-1])} and {tracked[-1]};" in read(
        "docs/store.md"
    )
    assert ", ".join(f"`heads/{level}`" for level in LOUD) in read("docs/store.md")


# ---------------------------------------------------------------- numbers


def test_numbers_for_people():
    assert (
        number(1234.5) == "1,234" and number(0.12345) == "0.1235" and number(-2e6) == "-2,000,000"
    )
    assert number(float("nan"), ".0%") == "-" and number(0.5, ".0%") == "50%"


def test_json_has_no_nan():
    given = {"a": [1, float("inf"), {"b": float("nan")}], "c": (0.123456, "x", None, True)}
    assert plain(given) == {"a": [1, None, {"b": None}], "c": [0.123456, "x", None, True]}
    assert plain(given, digits=3)["c"] == [0.123, "x", None, True]
    numpy = {
        "d": np.array([[1.5, np.nan]]),
        "e": np.float32(0.5),
        "h": [np.float64("nan")],
        "f": np.int64(3),
        "g": np.True_,
    }
    assert (
        json.dumps(plain(numpy)) == '{"d": [[1.5, null]], "e": 0.5, "h": [null], "f": 3, "g": true}'
    )
