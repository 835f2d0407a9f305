"""The checkup's gathering: from attention calls to one plain dict."""

import json

import numpy as np
import pytest
import torch
from checkup_support import Silent, listen_to, make_call, make_result, scales_of, unpacked

import levelhead as lh
from levelhead.checkup import Input, Subject, TargetError, _pictures, _what_if, examine, load
from levelhead.torch.watching import _calls

TOKENS = [f"token{place}" for place in range(12)]


def layer(*calls, **options):
    (only,) = make_result(*calls, **options)["layers"]
    return only


def test_a_head_has_its_verdict_and_every_statistic():
    head = layer(make_call(grow=(1, 400)))["heads"][1]
    assert head["head"] == 1
    assert (head["verdict"], head["level"]) == ("exploding", "error")
    assert head["reason"].startswith("the largest |score| is 1,")
    assert "QK-norm" in head["hint"]
    assert "saturated" in head["also"]
    assert set(lh.Health.FIELDS) <= set(head)


def test_statistics_are_those_of_health():
    call = make_call(batch=2)
    heads = layer(call)["heads"]
    want = call.health.over_batch()
    for name in lh.Health.FIELDS:
        np.testing.assert_array_equal([head[name] for head in heads], getattr(want, name))


def test_inputs_merge_exactly():
    calls = [make_call(seed=1), make_call(seed=2, length=20)]
    together = lh.Health.merge(*(call.health.over_batch() for call in calls))
    runs = iter(calls)

    def listen(*given):
        return listen_to(next(runs))(*given)

    subject = Subject("two", Silent(), [Input("one"), Input("other")])
    (only,) = examine(subject, listen=listen)["layers"]
    assert only["calls"] == 2
    assert [head["entropy"] for head in only["heads"]] == together.entropy.tolist()
    assert only["heads"][0]["widest_row"] == 20


def test_few_keys_are_not_judged_but_shown():
    (head,) = layer(make_call(length=7, heads=1))["heads"]
    assert (head["verdict"], head["level"]) == ("short", "info")
    assert "8 keys" in head["reason"]
    assert head["rows"] == 7
    assert layer(make_call(length=8, heads=1))["heads"][0]["verdict"] != "short"


def test_nonfinite_heads_are_judged_and_stay_json():
    call = make_call(length=5)
    call.query[0, 1, 2] = np.nan
    result = make_result(call)
    verdicts = [head["verdict"] for head in result["layers"][0]["heads"]]
    assert verdicts == ["short", "nonfinite", "short"]
    json.dumps(result, allow_nan=False)


def test_other_scales_are_of_the_same_queries_and_keys():
    call = make_call(d_k=16, heads=2)
    found = layer(call)
    assert found["scale"] == 0.25
    assert (found["d_k"], found["d_model"]) == (16, 32)
    for rule, scale in {"none": 1.0, "dk": 1 / 16, "sqrt_dmodel": 32**-0.5}.items():
        want = lh.reference(call.query, call.key, call.key, scale=scale, return_health=True).health
        view = found["scales"][rule]
        assert view["scale"] == pytest.approx(scale)
        got = [head["entropy"] for head in view["heads"]]
        np.testing.assert_allclose(got, want.over_batch().entropy)
    assert found["scale_rule"] == "sqrt_dk"
    entropies = [found["scales"][rule]["heads"][0]["entropy"] for rule in ("none", "dk")]
    assert entropies[0] < found["heads"][0]["entropy"] < entropies[1]


def test_the_models_width_counts_where_it_is_known():
    subject = Subject("wide", Silent(), [Input("x")], width=64)
    (only,) = examine(subject, listen=listen_to(make_call(d_k=16, heads=2)))["layers"]
    assert only["scales"]["sqrt_dmodel"]["scale"] == pytest.approx(1 / 8)


def test_an_unknown_scale_has_no_alternatives():
    result = make_result(make_call()._replace(scale=None), pictures=False)
    assert result["layers"][0]["scales"] == {}
    assert result["layers"][0]["scale_rule"] == "unknown"
    assert list(scales_of(result)) == ["unknown"]


# ---------------------------------------------------------------- other scales


def test_each_scale_says_how_far_it_moves_the_model():
    calls = [make_call("a"), make_call("b", seed=1, heads=2, grow=(3, 1))]
    result = make_result(*calls, pictures=False)
    for name, scaled in scales_of(result).items():
        parts = [
            call.moved(layer["scales"][name]["factor"])
            for call, layer in zip(calls, result["layers"], strict=True)
        ]
        for layer, part in zip(result["layers"], parts, strict=True):
            view = layer["scales"][name]
            heads = [head["weight_moved"] for head in view["heads"]]
            np.testing.assert_allclose(heads, part.weight_moved[0], atol=1e-12)
            assert view["weight_moved"] == pytest.approx(np.mean(heads), abs=1e-12)
            changed = [head["output_changed"] for head in view["heads"]]
            np.testing.assert_allclose(changed, part.output_changed[0], atol=1e-12)
        moved = np.concatenate([part.weight_moved[0] for part in parts]).mean()
        assert scaled["weight_moved"] == pytest.approx(moved, abs=1e-12)
    used, *others = scales_of(result).items()
    assert used[0] == "sqrt_dk"
    assert (used[1]["weight_moved"], used[1]["level"]) == (0.0, "ok")
    assert used[1]["direction"] == "as trained"
    assert {name for name, _ in others} == {"none", "dk", "sqrt_dmodel"}
    assert all(scaled["weight_moved"] > 0 for _, scaled in others)


def test_rows_count_alike_whichever_text_they_are_from():
    short, long = make_call(length=8), make_call(seed=1, length=24)
    heard = iter([short, long])

    def listen(on_call, model, on_not_understood):
        return listen_to(next(heard))(on_call, model, on_not_understood)

    result = examine(Subject("two", Silent(), [Input("one"), Input("other")]), listen=listen)
    got = [head["weight_moved"] for head in result["layers"][0]["scales"]["none"]["heads"]]
    parts = [call.moved(4.0).weight_moved[0] for call in (short, long)]
    np.testing.assert_allclose(got, (8 * parts[0] + 24 * parts[1]) / 32)


@pytest.mark.parametrize(
    ("moved", "level"),
    [
        (0, "ok"),
        (0.049, "ok"),
        (0.051, "info"),
        (0.199, "info"),
        (0.201, "warning"),
        (0.31, "error"),
    ],
)
def test_levels_follow_the_moved_weight(moved, level):
    assert _what_if.level_of(moved) == level


def test_a_scale_that_changes_nothing_is_no_alarm():
    """A new model, its scores all but equal: there is nothing that a scale could move."""
    result = make_result(make_call(grow=(1e-3,) * 3), pictures=False)
    for scaled in scales_of(result).values():
        assert (scaled["level"], scaled["direction"]) == ("ok", "as trained")
    said = scales_of(result)["none"]["sentence"]
    assert said == "Without the scale: under 1% of the weight moves, hardly anything changes."


def test_both_sides_are_told():
    scales = scales_of(make_result(make_call(length=32, grow=(4, 4, 4)), pictures=False))
    assert [scales[rule]["direction"] for rule in ("none", "dk")] == ["too sharp", "too flat"]
    sharp, flat = (scales[rule]["sentence"] for rule in ("none", "dk"))
    rows = scales["none"]["saturated"], scales["sqrt_dk"]["saturated"]
    assert sharp.endswith(
        f"{rows[0]:.0%} of the rows saturate ({rows[1]:.0%} as trained): too sharp."
    )
    assert flat.startswith(
        f"With 1/d_k: {scales['dk']['weight_moved']:.0%} of the weight moves, the"
    )
    assert "the entropy ratio rises from " in flat and flat.endswith(": too flat.")


def test_any_factor_can_be_asked_for():
    result = make_result(make_call(), pictures=False, factors=(1.0, 2.0, 0.0))
    assert set(scales_of(result)) == {"sqrt_dk", "none", "dk", "sqrt_dmodel", "x1", "x2", "x0"}
    same, twice, never = (scales_of(result)[name] for name in ("x1", "x2", "x0"))
    assert (same["weight_moved"], same["level"]) == (0.0, "ok")
    assert (twice["words"], twice["direction"]) == ("2 times the scale", "too sharp")
    assert never["entropy_ratio"] == pytest.approx(1) and never["direction"] == "too flat"
    view = result["layers"][0]["scales"]["x2"]
    assert (view["factor"], view["scale"]) == (2.0, 0.5)
    unknown = make_result(make_call()._replace(scale=None), pictures=False, factors=(2.0,))
    assert list(scales_of(unknown)) == ["unknown", "x2"]
    with pytest.raises(TargetError, match=r"a scale factor must be a number from 0 on, got -1"):
        make_result(make_call(), factors=(-1,))


def test_a_scale_near_the_one_in_use_is_that_one():
    """16 bits round it: nothing moves, and nothing is computed."""
    call = make_call()._replace(scale=float(np.float16(1 / 4.0001)))
    result = make_result(call, pictures=False)
    assert result["layers"][0]["scale_rule"] == "sqrt_dk"
    assert result["layers"][0]["scales"]["sqrt_dk"]["weight_moved"] == 0.0
    assert next(iter(scales_of(result))) == "sqrt_dk"


def test_a_place_that_attends_twice_is_two_layers():
    result = make_result(
        make_call("a"), make_call("b"), make_call("a", seed=1), texts=[TOKENS, TOKENS]
    )
    assert [found["name"] for found in result["layers"]] == ["a", "b", "a #2"]
    assert [found["calls"] for found in result["layers"]] == [2, 2, 2]
    first, _, second = (found["heads"][0]["entropy"] for found in result["layers"])
    assert first != second


def test_a_call_outside_any_module_has_a_name():
    assert layer(make_call(""))["name"] == "(outside any module)"


def test_no_attention_is_said():
    with pytest.raises(TargetError, match="a model made no attention call that can be seen"):
        make_result()


class Odd(torch.nn.Module):
    """Attention that can be measured, and weights that come from no scores."""

    def __init__(self):
        super().__init__()
        self.known, self.odd = torch.nn.MultiheadAttention(16, 2, batch_first=True), Silent()
        self.odd.forward = lambda x: torch.rand(2, 3, 8, 8).softmax(-1) @ x[:, None]

    def forward(self, x):
        return self.odd(self.known(x, x, x)[0])


def test_attention_that_is_not_understood_is_named():
    inputs = [Input(name, args=(torch.randn(2, 8, 16),)) for name in ("one", "other")]
    result = examine(Subject("odd", Odd(), inputs))
    assert [found["name"] for found in result["layers"]] == ["known"]
    assert result["not_understood"] == {"odd": 2}
    assert make_result(make_call())["not_understood"] == {}
    with pytest.raises(TargetError) as caught:
        examine(Subject("odd", Odd().odd, inputs))
    said = "Attention was seen but not understood in (outside any module) (2 calls)."
    assert str(caught.value).endswith(f" or a softmax of scores. {said}")


class Raising(Silent):
    def forward(self, x):
        raise RuntimeError("shapes 3 and 4 differ\nlong story")


def test_a_model_that_raises_is_reported_in_one_line():
    subject = Subject("bad", Raising(), [Input("x", args=(1,))])
    with pytest.raises(TargetError) as caught:
        examine(subject, listen=listen_to(make_call()))
    assert str(caught.value) == (
        "bad raised RuntimeError: shapes 3 and 4 differ when it was called; --debug shows where"
    )


def test_training_flags_come_back():
    class Watched(Silent):
        def forward(self):
            seen.append((self.training, torch.is_grad_enabled()))

    seen = []
    model = Watched()
    model.part = torch.nn.Dropout().eval()
    examine(Subject("flags", model, [Input("x")]), listen=listen_to(make_call()))
    assert seen == [(False, False)]
    assert model.training
    assert not model.part.training


def test_progress_is_reported():
    progress = []
    subject = Subject("m", Silent(), [Input("x"), Input("y")])
    examine(subject, listen=listen_to(make_call()), on_input=lambda *at: progress.append(at))
    assert progress == [(0, 2), (1, 2), (2, 2)]


# ---------------------------------------------------------------- pictures


def drawn(picture, head, factor=1.0):
    """The weights of the corner at a scale, from the scores and the groups beyond it."""
    scores, beyond = (factor * np.float64(each[head]) for each in (picture.scores, picture.beyond))
    top = np.nanmax(np.concatenate([scores, beyond], axis=-1), axis=-1, keepdims=True)
    exps, rest = (np.nan_to_num(np.exp(each - top)) for each in (scores, beyond))
    return exps / (exps.sum(-1) + (rest * picture.many[head]).sum(-1))[:, None]


@pytest.mark.parametrize("causal", [False, True])
def test_weights_follow_from_scores(causal):
    call = make_call(causal=causal)
    result = make_result(call, texts=[TOKENS])
    ((picture,),) = unpacked(result)
    for factor in (1.0, 0.25, 4.0):
        want = call._run(factor).weights[0, 1]
        np.testing.assert_allclose(drawn(picture, 1, factor), want, atol=1e-3)
    assert np.isnan(picture.scores[0]).sum() == (12 * 11 // 2 if causal else 0)
    assert picture.weights is None
    assert result["pictures"]["inputs"] == [{"label": " ".join(TOKENS), "tokens": TOKENS}]


def test_a_corner_keeps_the_weights_of_the_whole_row():
    call = make_call(length=80)
    ((picture,),) = unpacked(make_result(call))
    assert (picture.scores.shape, picture.keys) == ((3, 64, 64), 80)
    assert picture.many[0].sum(-1).tolist() == [16] * 64
    for factor, close in ((1.0, 1e-3), (0.3, 1e-3), (4.0, 1e-2)):
        want = call._run(factor).weights[0, 2][:64, :64]
        np.testing.assert_allclose(drawn(picture, 2, factor), want, atol=close)
        smaller = picture.cut(24)
        assert smaller.many[0].sum(-1).tolist() == [56] * 24
        np.testing.assert_allclose(drawn(smaller, 2, factor), want[:24, :24], atol=close)


def test_a_cap_or_a_bias_keeps_the_weights_themselves():
    call = make_call(grow=(9, 9, 9), softcap=2.0)
    ((picture,),) = unpacked(make_result(call))
    np.testing.assert_allclose(picture.weights[0], call.weights(0, 0), atol=1e-4)


def test_batch_entries_are_pictures_of_their_own():
    call = make_call(batch=3)
    subject = Subject("m", Silent(), [Input("the input", tokens=[["a"] * 12, ["b"] * 12])])
    result = examine(subject, pictures=True, listen=listen_to(call))
    pictures = result["pictures"]
    labels = [given["label"] for given in pictures["inputs"]]
    assert labels == ["the input, entry 1", "the input, entry 2", "the input, entry 3"]
    assert [given["tokens"][:1] for given in pictures["inputs"]] == [["a"], ["b"], []]
    np.testing.assert_allclose(drawn(unpacked(result)[0][2], 0), call.weights(2, 0), atol=1e-3)


def test_pictures_stay_within_their_room(monkeypatch):
    monkeypatch.setattr(_pictures, "MOST_NUMBERS", 3 * 144 * 3)
    shown = make_result(make_call(), texts=[TOKENS] * 5)["pictures"]
    assert len(shown["inputs"]) == 3  # three heads of 12 × 12 each
    monkeypatch.setattr(_pictures, "MOST_NUMBERS", 2 * 3 * (64 + 8 * 2 * 4))
    result = make_result(make_call(), texts=[TOKENS] * 5)
    assert len(result["pictures"]["inputs"]) == 2
    assert unpacked(result)[0][0].scores.shape == (3, 8, 8)


def test_long_calls_are_measured_but_not_drawn(monkeypatch):
    monkeypatch.setattr(_pictures, "MOST_PAIRS", 143)
    result = make_result(make_call(), texts=[TOKENS])
    assert result["pictures"]["inputs"] == []
    assert result["layers"][0]["heads"][0]["rows"] == 12


def test_pictures_only_on_request():
    result = make_result(make_call(), pictures=False)
    assert result["pictures"] is None and result["slider"] is None


def test_a_page_has_heads_at_many_scales():
    call = make_call()
    result = make_result(call, factors=[2.0])
    (layer,) = result["slider"]["layers"]
    assert set(layer) == {"sqrt_dk", "none", "dk", "sqrt_dmodel", "x2"} | {
        _what_if.factor_name(factor) for factor in _what_if.SLIDER
    }
    assert len(layer) == 25
    head = layer["x0.42"]["heads"][1]
    assert head["weight_moved"] == pytest.approx(call.moved(0.42).weight_moved[0, 1])
    told = {"sqrt_dk", "none", "dk", "sqrt_dmodel", "x2"}
    assert set(result["layers"][0]["scales"]) == told  # the JSON is as it was
    assert [scale["rule"] for scale in result["slider"]["scales"]].count("x0.42") == 1
    assert {scale["rule"] for scale in result["scales"]} == told - {"sqrt_dk"} | {"as_trained"}


# ---------------------------------------------------------------- the real thing


def test_the_demo_model_is_examined_by_default():
    result = examine(load())
    assert result["model"] == "all-MiniLM-L6-v2"
    texts = [given["text"] for given in result["inputs"]]
    assert {"The dog chased the ball because it was fast.", "love Apple phones"} <= set(texts)
    assert [len(found["heads"]) for found in result["layers"]] == [12] * 6
    assert result["layers"][3]["name"] == "encoder.layer.3.attention.self"
    assert [found["scale"] for found in result["layers"]] == pytest.approx([32**-0.5] * 6)
    assert {found["d_model"] for found in result["layers"]} == {384}
    head = result["layers"][0]["heads"][2]  # looks at the token before, and nowhere else
    assert head["verdict"] == "saturated"
    assert head["distance"] == pytest.approx(1.0, abs=0.1)
    assert sum(given["tokens"] for given in result["inputs"]) == head["rows"]


def test_the_demo_is_best_as_it_was_trained(monkeypatch):
    passes, compute = [], _calls.compute
    monkeypatch.setattr(_calls, "compute", lambda *a, **k: passes.append(1) or compute(*a, **k))
    result = examine(load(), pictures=True)
    calls = sum(layer["calls"] for layer in result["layers"])
    # As it was, and each other scale once: the rules and those of the page's slider.
    assert len(passes) == (1 + 3 + len(_what_if.SLIDER)) * calls
    assert {layer["scale_rule"] for layer in result["layers"]} == {"sqrt_dk"}
    assert result["scale_findings"] == []
    scales = scales_of(result)
    assert list(scales) == ["sqrt_dk", "sqrt_dmodel", "none", "dk"]
    assert [scaled["level"] for scaled in scales.values()] == ["ok", "error", "error", "error"]
    directions = [scaled["direction"] for scaled in scales.values()]
    assert directions == ["as trained", "too flat", "too sharp", "too flat"]
    assert scales["sqrt_dk"]["weight_moved"] == 0.0
    assert scales["none"]["weight_moved"] == pytest.approx(0.43, abs=0.01)
    assert scales["none"]["sentence"] == (
        "Without the scale: 43% of the weight moves, 61% of the rows saturate (2% as trained): "
        "too sharp."
    )
    copying = result["layers"][0]["scales"]["none"]["heads"][2]
    assert copying["weight_moved"] < 0.01  # it looks at one key alone, whatever the scale


@pytest.mark.parametrize(("scale", "rule"), [(1.0, "none"), (384**-0.5, "sqrt_dmodel")])
def test_the_demo_with_a_wrong_scale_is_told(scale, rule):
    subject = load()
    for module in subject.model.modules():
        if hasattr(module, "scaling"):
            module.scaling = scale
    result = examine(subject)
    assert {layer["scale_rule"] for layer in result["layers"]} == {rule}
    (found,) = result["scale_findings"]
    assert (found["rule"], found["scope"]) == (rule, "model")
