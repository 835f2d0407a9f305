"""What the judge has to say: of heads, layers and the model, in words with their numbers."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import levelhead as lh
from levelhead._health import Evidence, Fact, Finding, findings, judge
from levelhead._health.describe import headline
from levelhead._health.findings import worst_first
from levelhead.scaling import in_use

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 4, 64, 16))


def health(scale=None):
    return lh.reference(Q, K, V, scale=scale, return_health=True).health


SHARP = Finding(
    scope="model",
    name="saturated",
    level="warning",
    reason="3 of 4 heads are sharp, and the loss has fallen by 2% only",
    hint="check the scale",
    evidence=(Fact("sharp heads", 0.75, high=0.5, form=".0%"), Fact("loss", math.nan, low=0.45)),
    layer="a",
    head=2,
    heads=3,
    since=40,
)

FLAT = replace(
    SHARP, name="flat", reason="4 of 4 heads give every key nearly the same", evidence=()
)


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (Fact("rows", 0.61, high=0.3, form=".0%"), "rows 61% (healthy: at most 30%)"),
        (Fact("rows", 0.61, low=0.7), "rows 0.61 (healthy: at least 0.7)"),
        (Fact("rows", 2.0, low=0.0, high=1.0), "rows 2 (healthy: 0 to 1)"),
        (Fact("rows", math.nan), "rows -"),
    ],
)
def test_a_number_comes_with_its_healthy_range(fact, words):
    assert str(fact) == words


def test_a_finding_in_words():
    assert str(SHARP) == (
        "the model: saturated (warning, since step 40); 3 of 4 heads are sharp, and the loss has "
        "fallen by 2% only. What to do: check the scale."
    )
    fine = Finding("head", "exploding", "info", "it grows", "stop", layer="a", head=1,
                   benign="no harm", forecast="At step 9 it is 1,000")  # fmt: skip
    assert str(fine) == (
        "a, head 1: exploding (info); it grows. At step 9 it is 1,000. Benign: no harm."
    )
    assert Finding("layer", "x", "info", "y", "z").where == "outside any submodule"


def test_a_finding_goes_through_json_and_back():
    again = Finding.from_dict(json.loads(json.dumps(SHARP.to_dict(), allow_nan=False)))
    assert str(again) == str(SHARP) and again.key == SHARP.key and again.evidence[0].high == 0.5
    assert math.isnan(again.evidence[1].value)
    newer = SHARP.to_dict() | {"colour": "red"}  # of a version to come
    newer["evidence"][0]["source"] = "somewhere"
    assert str(Finding.from_dict(newer)) == str(SHARP)


def test_the_worst_comes_first_and_the_model_before_its_heads():
    levels = [("head", "error"), ("model", "info"), ("layer", "warning"), ("model", "warning")]
    some = [Finding(scope, "x", level, "", "") for scope, level in levels]
    order = [(each.scope, each.level) for each in worst_first(some)]
    assert order == [levels[0], levels[3], levels[2], levels[1]]


# ---------------------------------------------------------------- of a model at one moment


def test_a_head_that_explodes_is_a_finding_with_its_numbers():
    found = findings(Evidence({"calm": health(), "loud": health(300.0)}))
    worst = found[0]
    assert (worst.scope, worst.name, worst.layer) == ("head", "exploding", "loud")
    (fact,) = worst.evidence
    # It is healthy up to where it is called large.
    assert fact.value >= 1_000 and fact.high == 100 and fact.name == "largest |score|"
    assert worst.explained == "docs/verdicts.md#exploding"
    assert {each.layer for each in found} == {"loud"}
    assert [each.to_dict() for each in found]


def test_nothing_seen_is_nothing_to_say():
    assert findings(Evidence({})) == [] == findings(Evidence({}, scales={"a": in_use(1.0, 16)}))
    assert findings(Evidence({"a": health()})) == []


def test_most_heads_that_choose_nothing_are_told_and_the_headline_says_so():
    flat = Evidence({"a": health(0.001)})
    (wide,) = [each for each in findings(flat) if each.scope == "model"]
    assert (wide.name, wide.level, wide.heads) == ("flat", "info", 4)
    said = headline([each._asdict() for each in judge(flat)["a"]], findings=findings(flat))
    assert said == "No problems found in 4 heads. 4 of 4 heads give every key the same."


# ---------------------------------------------------------------- the course beside the numbers


def test_a_sharp_head_is_information_unless_the_course_speaks_against_it():
    sharp = {"a": health(20.0), "b": health(20.0)}
    layer = Finding("layer", "saturated", "warning", "", "", layer="b")

    def levels(course):
        judged = judge(Evidence(sharp, course=course))
        return [{*judged[name].levels} for name in "ab"]

    assert levels(None) == [{"warning"}] * 2  # nothing is known of the course, as in a checkup
    assert levels(()) == [{"info"}] * 2
    assert levels((SHARP,)) == [{"warning"}] * 2
    assert levels((layer,)) == [{"info"}, {"warning"}]
    verdict = judge(Evidence(sharp, course=()))["a"][0]
    assert verdict.benign == "nothing in the course of the training speaks against it"
    assert judge(Evidence(sharp))["a"][0].benign == ""


def rising(head=1, layer="a", level="warning"):
    return Finding("head", "exploding", level, "the largest |score| is 400 and grows", "tame it",
                   layer=layer, head=head, since=7, forecast="At this rate soon")  # fmt: skip


def test_a_forecast_is_the_verdict_of_its_head():
    evidence = Evidence({"a": health()}, course=(rising(),))
    judged = judge(evidence)["a"]
    assert judged.names == ["healthy", "exploding", "healthy", "healthy"]
    assert judged.levels[1] == "warning" and judged.worst_first()[0] == 1
    assert judged[1].reason == "the largest |score| is 400 and grows. At this rate soon"
    assert findings(evidence) == [rising()]


def test_a_forecast_does_not_hide_what_is_worse_by_now():
    loud = judge(Evidence({"a": health(300.0)}, course=(rising(),)))["a"]
    assert {*loud.names} == {"exploding"} and loud.levels[1] == "error"


@pytest.mark.parametrize("course", [rising(head=9), rising(layer="gone")])
def test_a_course_of_heads_that_are_not_there_is_passed_over(course):
    assert {*judge(Evidence({"a": health()}, course=(course,)))["a"].names} == {"healthy"}


def test_a_head_is_judged_by_its_numbers_of_now():
    """A course may be of some steps ago: what it said of single heads is only since when."""
    then = Finding("head", "exploding", "error", "it was 1,000", "", layer="a", head=1, since=3)
    calm = Evidence({"a": health()}, course=(then,))
    assert findings(calm) == [] and judge(calm)["a"].names[1] == "healthy"
    loud = findings(Evidence({"a": health(300.0)}, course=(then,)))
    assert {each.head: each.since for each in loud} == {0: None, 1: 3, 2: None, 3: None}
    assert all("it was" not in each.reason for each in loud)


# ---------------------------------------------------------------- the scale in use


@pytest.mark.parametrize(
    ("scale", "sharpness", "course", "harm"),
    [
        (1.0, 20.0, (), ""),  # as in T5, whose weights are made for it
        (1.0, 20.0, None, ""),
        (1.0, 20.0, (SHARP,), "most heads are sharp"),
        (1.0, None, (SHARP,), ""),  # but these are not, or no longer
        (1 / 16, 20.0, (SHARP,), ""),  # too small a scale makes no head sharp
        (1 / 64, None, (), ""),
        (1 / 64, None, (FLAT,), "most heads give every key the same"),
        (1 / 64, None, (replace(FLAT, level="info"),), ""),
        (1.0, None, (FLAT,), ""),  # too large a scale makes no head flat
    ],
)
def test_another_scale_is_told_and_is_bad_only_where_it_does_harm(scale, sharpness, course, harm):
    seen = {"a": health(sharpness)}
    evidence = Evidence(seen, course=course, scales={"a": in_use(scale, 16, 64)})
    (told,) = [each for each in findings(evidence) if each.name == "scale"]
    assert (told.scope, told.heads) == ("model", 4)
    assert told.level == ("warning" if harm else "info")
    assert told.evidence[0].value == pytest.approx(scale * 4)
    assert told.reason.endswith(f"; {harm or 'no harm is seen'}")


def test_only_the_layers_that_suffer_are_blamed_on_their_scale():
    seen = {"a": health(20.0), "b": health(20.0)}
    scales = {"a": in_use(1.0, 16), "b": in_use(0.5, 16)}
    course = (replace(SHARP, scope="layer"),)  # of layer a
    found = findings(Evidence(seen, course=course, scales=scales))
    levels = {each.layer: each.level for each in found if each.name == "scale"}
    assert levels == {"a": "warning", "b": "info"}


def test_the_words_of_a_scale():
    def said(**scales):
        evidence = Evidence({name: health() for name in scales}, scales=scales)
        return [each.reason.partition(";")[0] for each in findings(evidence)]

    none, odd = in_use(1.0, 16), in_use(0.5, 16)
    assert said(a=none) == ["no layer scales the scores, which is 4 times 1/√d_k"]
    assert said(a=odd) == ["every layer scales by 0.5, which is 2 times 1/√d_k"]
    assert said(a=none, b=in_use(0.25, 16)) == [
        "in a the scores are not scaled, which is 4 times 1/√d_k"
    ]
    many = {name: in_use(1 / 16, 16) for name in "abcdef"} | {"z": none}
    assert said(**many)[0] == (
        "in a, b, c, d and 2 more the scores are scaled by 1/d_k, 0.25 times 1/√d_k"
    )
    learned = {str(place): in_use(0.3 + 0.1 * place, 16) for place in range(6)}
    assert said(**learned) == ["every layer scales by a number of its own, 1.2 to 3.2 times 1/√d_k"]


@pytest.mark.parametrize("scale", [None, 0.25, math.nan])
def test_the_usual_scale_and_an_unknown_one_are_no_finding(scale):
    assert findings(Evidence({"a": health()}, scales={"a": in_use(scale, 16)})) == []
