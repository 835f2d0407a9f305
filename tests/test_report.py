"""Results in words, as JSON and as text."""

import json
import os

import numpy as np
import pytest
from checkup_support import make_call, make_result, scales_of
from rich.console import Console

import levelhead as lh
from levelhead._health.describe import headline
from levelhead._health.judge import severity
from levelhead._health.table import GAP, table
from levelhead._health.verdicts import VERDICTS
from levelhead.checkup._pictures import Album, Picture
from levelhead.report import (
    checkup_json,
    checkup_page,
    checkup_text,
    failing,
    page,
)
from levelhead.report._checkup_page import page_data
from levelhead.report._names import short_names
from levelhead.report._page import embed
from levelhead.report._scales import headline as scale_headline
from levelhead.report._scales import in_use, label

ILL = make_result(
    make_call("encoder.layer.0.attn", grow=(1, 900, 1, 30)[:3]),
    make_call("encoder.layer.1.attn", seed=1, grow=(1, 1, 30)),
    texts=[[f"t{place}" for place in range(12)]],
    name="Tiny [bold]",
)
WELL = make_result(make_call(seed=3, length=32), pictures=False)


def text_of(result, width=100):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(checkup_text(result, console.width))
        return console.export_text()


# ---------------------------------------------------------------- worst first


def test_heads_are_sorted_as_the_judge_sorts_them():
    health = make_call(heads=6, length=24, grow=(1, 900, 30, 35, 0.01, 2000)).health.over_batch()
    heads = make_result(make_call(heads=6, length=24, grow=(1, 900, 30, 35, 0.01, 2000)))
    ours = sorted(heads["layers"][0]["heads"], key=severity)
    assert [head["head"] for head in ours] == [verdict.head for verdict in health.verdicts()]


# ---------------------------------------------------------------- words


def heads_of(*verdicts):
    levels = {"saturated": "warning", "sharp": "info", "short": "info", "healthy": "ok"}
    return [{"verdict": verdict, "level": levels[verdict]} for verdict in verdicts]


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (["saturated", "sharp"], "1 of 2 heads needs attention: 1 saturated."),
        (["saturated"] * 2 + ["short"], "2 of 3 heads need attention: 2 saturated."),
        (["healthy", "sharp"], "No problems found in 2 heads."),
        (
            ["healthy", "sharp", "short"],
            "No problems found in 2 heads; 1 head could not be judged.",
        ),
        (["healthy"], "No problems found in 1 head."),
        (["short"] * 3, "None of the 3 heads could be judged: the rows are too short."),
    ],
)
def test_headline(verdicts, said):
    assert headline(heads_of(*verdicts)) == said
    later = headline(heads_of(*verdicts), "At step 7")
    assert later == f"At step 7: {said[0].lower()}{said[1:]}"


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a.0.b", "a.1.b"], ["a.0", "a.1"]),
        (["x.a.0.self", "x.b.0.self"], ["x.a", "x.b"]),
        (["enc.0", "dec.0"], ["enc", "dec"]),
        (["attn"], ["attn"]),
        (["attn", "attn #2"], ["attn", "attn #2"]),
        (["a.b", "a"], ["a.b", "a"]),
        ([], []),
    ],
)
def test_short_names(names, short):
    assert short_names(names) == short


def scaled(*scales, **options):
    """The result of layers a, b, c, … with these scales; 1/√d_k is 0.25."""
    calls = (
        make_call(name)._replace(scale=scale)
        for name, scale in zip("abcdefg", scales, strict=False)
    )
    return make_result(*calls, pictures=False, **options)


@pytest.mark.parametrize(
    ("scales", "said", "rule", "shown"),
    [
        ((0.25,), "1/√d_k", "sqrt_dk", "1/√d_k"),
        ((0.25, 0.25), "1/√d_k in all 2 layers", "sqrt_dk", "1/√d_k"),
        ((1.0,), "none", "none", "none"),
        ((0.3,), "0.3, which is 1.2 times 1/√d_k", "other", "0.3"),
        (
            (0.5, 0.6, 0.7, 0.8),
            "4 different ones in 4 layers, from 0.5 to 0.8",
            *("other", "4 different scales"),
        ),
        (
            (0.25, 1.0, 0.25, 0.25, 0.25, 1.0),
            "1/√d_k in 4 layers; none in b and f",
            *("mixed", "2 different scales"),
        ),
        ((None,), "not known", "unknown", "not known"),
    ],
)
def test_the_scale_in_use_is_told(scales, said, rule, shown):
    result = scaled(*scales)
    assert list(in_use(result)) == [f"Scale: {said}."]
    assert f"Scale: {said}." in text_of(result)
    scales = scales_of(result)
    assert next(iter(scales)) == rule
    assert label(scales[rule]) == f"as trained ({shown})"
    if rule != "unknown":
        assert label(scales["dk"]) == "1/d_k"


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("ok", "Without the scale: much the same as trained."),
        ("info", "Without the scale: not quite as trained, a little too sharp."),
        ("warning", "Without the scale: worse than as trained, too sharp."),
        ("error", "Without the scale: much worse than as trained, too sharp."),
    ],
)
def test_another_scale_has_a_headline(level, said):
    assert scale_headline({"rule": "none", "level": level, "direction": "too sharp"}) == said


# ---------------------------------------------------------------- the terminal


def test_the_terminal_shows_a_line_a_layer_and_the_worst_first():
    text = text_of(ILL)
    assert "Tiny [bold] · 2 layers · 6 heads · 1 text · 12 tokens" in text
    assert headline([h for layer in ILL["layers"] for h in layer["heads"]]) in text
    lines = text.splitlines()
    (first,) = [line for line in lines if line.startswith("  layer.0 ")]
    marks = [VERDICTS[head["verdict"]].letter for head in ILL["layers"][0]["heads"]]
    assert "  ".join(marks) in first
    assert "1 exploding: the largest |score|" in first
    (second,) = [line for line in lines if line.startswith("  layer.1 ")]
    assert "2 saturated: " in second
    worst = text.index("layer.0, head 1: exploding (error); the largest")
    assert worst < text.index("layer.1, head 2: saturated (warning); ")
    assert "→ tame the scores: QK-norm" in text


def test_the_terminal_shows_other_scales():
    lines = text_of(WELL).split("at other scales")[1].splitlines()
    rows = {line.split("  ")[1]: line for line in lines if line.strip()}
    names = ["as trained (1/√d_k)", "1/√d_model", "1/d_k", "none"]  # by how much weight they move
    assert [name for name in rows if name in names] == names
    assert " 0% " in rows["as trained (1/√d_k)"] and "what it learned" in text_of(WELL, 140)
    moved = scales_of(WELL)["none"]["weight_moved"]
    assert f" {moved:.0%} " in rows["none"] and "much worse, too sharp: " in text_of(WELL, 140)
    assert "need attention" not in "".join(lines)
    unknown = text_of(scaled(None), 140)
    assert "The scale in use is not known, so it cannot be compared with other rules." in unknown
    assert "1/d_k" not in unknown


def test_the_terminal_holds_many_heads_and_narrow_windows():
    text = text_of(make_result(make_call(heads=40, length=8), pictures=False), width=60)
    assert max(map(len, text.splitlines())) <= 60 and "…" not in text
    assert "\n    nothing: this is what it learned\n" in text
    wide = text_of(make_result(make_call(heads=70, length=8), pictures=False), width=60)
    assert max(map(len, wide.splitlines())) <= 60 and "…" in wide


# ---------------------------------------------------------------- tables of text


ROWS = [["7", "one two three four"], ["12", ""]]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["largest value  words", "            7  one two three four", "           12"]),
        (40, ["largest value  words", "            7  one two three four", "           12"]),
        (
            24,
            ["largest", "  value  words", "      7  one two three", "         four", "     12"],
        ),
        (
            17,
            ["largest", "  value", "  words", "      7", "  one two three", "  four", "     12"],
        ),
    ],
)
def test_a_table_makes_room_for_its_last_column(width, lines):
    top, rows = table(["largest value", "words"], ROWS, "><", width)
    assert [GAP.join(line).rstrip() for line in top + rows] == lines


def test_a_model_of_nan_is_shown():
    call = make_call()
    call.query[:] = float("nan")
    text = text_of(make_result(call))
    assert "3 of 3 heads need attention: 3 nonfinite." in text


def test_attention_that_was_not_understood_is_named():
    result = make_result(make_call(), pictures=False, missed=["odd", "odd", ""])
    said = "Attention was seen but not understood in odd (2 calls), (outside any module) (1 call)."
    assert said in text_of(result) and page_data(result)["missing"] == said
    data = json.loads(checkup_json(result))
    assert data["not_understood"] == {"odd": 2, "(outside any module)": 1}
    assert "not understood" not in text_of(WELL) and page_data(WELL)["missing"] == ""


# ---------------------------------------------------------------- JSON


def test_json_is_the_documented_form():
    data = json.loads(checkup_json(ILL))
    assert data["model"] == "Tiny [bold]"
    head = data["layers"][1]["heads"][2]
    assert data["layers"][1]["name"] == "encoder.layer.1.attn"
    assert head["head"] == 2
    assert head["verdict"] == "saturated"
    assert set(lh.Health.FIELDS) <= set(head)
    assert head["score_var"] == ILL["layers"][1]["heads"][2]["score_var"]
    assert "pictures" not in data


def test_failing_is_that_verdict_or_worse():
    assert failing(ILL, "saturated").startswith("--fail-on saturated: 2 heads (1 exploding, 1 sat")
    assert failing(ILL, "exploding") == "--fail-on exploding: 1 head (1 exploding)"
    assert failing(ILL, "nonfinite") is None
    assert failing(WELL, "sharp") is None


# ---------------------------------------------------------------- pages


def test_a_page_is_one_file_without_network():
    html = checkup_page(ILL)
    assert html.startswith("<!doctype html>")
    assert "<title>Checkup of Tiny [bold]</title>" in html
    assert "plotly.js v" not in html
    for fetched in ('src="', "url(", "@import", '<link rel="stylesheet"', "fetch("):
        assert fetched not in html
    assert "default-src 'none'" in html


def test_a_large_models_page_stays_below_3_mb():
    """40 layers of 24 heads on 8 texts of 64 tokens, and no number twice."""
    rng = np.random.default_rng(0)
    one = make_result(make_call(heads=24, length=16))
    layers = [f"layer.{place}" for place in range(40)]
    album = Album()
    for text in range(8):
        album._labels.append((f"text {text}", ["token"] * 64))
        for layer in layers:
            scores = rng.standard_normal((24, 64, 64), np.float32)
            nothing = np.zeros((24, 64, 0), np.float32)
            album._pictures.setdefault(layer, {})[text] = Picture(
                64, 64, scores, nothing, nothing, None
            )
    heads, slider = one["layers"][0]["heads"], one["slider"]["layers"][0]

    def shaken(head):
        return {
            name: value * (1 + 0.1 * rng.random()) if isinstance(value, float) else value
            for name, value in head.items()
        }

    result = one | {
        "layers": [
            one["layers"][0] | {"name": layer, "heads": [shaken(head) for head in heads]}
            for layer in layers
        ],
        "slider": one["slider"]
        | {
            "layers": [
                {
                    name: scale | {"heads": [shaken(head) for head in scale["heads"]]}
                    for name, scale in slider.items()
                }
                for _ in layers
            ]
        },
        "pictures": album.result(layers),
    }
    assert len(result["pictures"]["inputs"]) == 2
    assert len(checkup_page(result)) < 3_000_000


def test_what_a_page_embeds_cannot_end_its_script():
    nasty = "</script><script>alert(1)</script><!-- & \u2028 \ud800"
    embedded = embed({"token": nasty})
    assert "<" not in embedded
    assert json.loads(embedded) == {"token": nasty}
    html = page("<b>", "<p></p>", {"token": nasty}, "")
    assert html.count("</script>") == 4
    assert "<title>&lt;b&gt;</title>" in html
    html.encode("utf-8")  # a lone surrogate has been escaped


def test_a_page_refuses_numbers_that_json_has_not():
    with pytest.raises(ValueError, match="JSON"):
        embed({"x": float("nan")})


def test_the_pages_words():
    data = page_data(ILL)
    assert data["headline"].startswith("2 of 6 heads need attention: 1 exploding, 1 saturated.")
    assert data["worst"] == {"layer": 0, "head": 1}
    leads = [item["lead"] for item in data["list"]["heads"]]
    assert leads[:2] == [
        "layer.0, head 1: exploding (error)",
        "layer.1, head 2: saturated (warning)",
    ]
    assert data["list"]["title"] == "Worst first"
    assert page_data(WELL)["list"]["title"] == "Nothing to repair; worth knowing"
    scales = {scale["rule"]: scale for scale in data["scales"]}
    assert list(scales) == ["used", "sqrt_dmodel", "dk", "none"]
    assert "attention" not in scales["none"]["headline"]
    assert scales["none"]["headline"].startswith("Without the scale: ")
    largest = [scales[rule]["largest_score"] for rule in ("none", "used")]
    assert largest[0] == pytest.approx(4 * largest[1])  # d_k is 16
