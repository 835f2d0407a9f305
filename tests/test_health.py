"""Health: each statistic by hand, exact merging, every verdict from both sides of its threshold."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from support import PATTERNS

from levelhead._health import (
    HEALTH_SUMS,
    GradHealth,
    Health,
    Thresholds,
    Verdict,
)
from levelhead._reference import reference, reference_backward


def health_of_scores(scores, values=None, **options):
    """Health of one head whose scores are exactly these, (L, S)."""
    scores = np.asarray(scores, float)
    keys = np.eye(scores.shape[-1])
    return reference(scores, keys, keys, scale=1.0, return_health=True, **options).health


def random_call(seed=0, batch=6, heads=3, length=9, size=12):
    rng = np.random.default_rng(seed)
    q = 3 * rng.standard_normal((batch, heads, length, 8))
    k, v = rng.standard_normal((2, batch, heads, size, 8))
    return q, k, v


def close(a, b, rtol=1e-12, but=()):
    assert a.shape == b.shape
    for name in [name for name in Health.FIELDS if name not in but]:
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=rtol, err_msg=name)


# ---------------------------------------------------------------- by hand


def test_uniform_row_by_hand():
    h = health_of_scores([[0.0, 0.0, 0.0, 0.0]], query_offset=1)
    assert h.shape == (1,)
    expected = {
        **{"rows": 1, "pairs": 4, "empty_rows": 0, "nonfinite_rows": 0, "widest_row": 4},
        **{"score_max": 0, "score_min": 0, "score_mean": 0, "score_var": 0, "large_scores": 0},
        **{"entropy": math.log(4), "entropy_ratio": 1, "effective_keys": 4, "top_weight": 0.25},
        **{"saturated": 0, "signal": 0.75, "first_key": 0.25, "null_mass": 0},
        "jacobian_norm": math.sqrt(1 / 4 - 2 / 16 + 1 / 16),
        "distance": (1 + 0 + 1 + 2) / 4,
        # Patterns need rows of 8 keys; tests/test_patterns.py has them by hand.
        **dict.fromkeys(PATTERNS, math.nan),
    }
    assert set(expected) == set(Health.FIELDS)
    for name, value in expected.items():
        assert getattr(h, name)[0] == pytest.approx(value, abs=1e-15, nan_ok=True), name


def test_two_different_rows_by_hand():
    # Row 0 sees key 0 alone (no choice); row 1 has weights 1/4 and 3/4.
    h = health_of_scores([[5.0, 0.0], [0.0, math.log(3)]], causal=True)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert (h.rows[0], h.pairs[0]) == (2, 3)
    assert h.score_max[0] == 5 and h.score_min[0] == 0
    assert h.score_mean[0] == pytest.approx((5 + math.log(3)) / 3)
    assert h.score_var[0] == pytest.approx(np.var([5, 0, math.log(3)]))
    assert h.entropy[0] == pytest.approx(entropy / 2)  # over both rows
    assert h.entropy_ratio[0] == pytest.approx(entropy / math.log(2))  # over the one with a choice
    assert h.first_key[0] == pytest.approx(0.25)
    assert h.effective_keys[0] == pytest.approx((1 + 1 / (1 / 16 + 9 / 16)) / 2)
    assert h.top_weight[0] == pytest.approx((1 + 0.75) / 2)
    assert h.saturated[0] == 0  # the lone key is no saturation
    assert h.signal[0] == pytest.approx((0 + 2 * 0.25 * 0.75) / 2)
    assert h.jacobian_norm[0] == pytest.approx((0 + 2 * 0.25 * 0.75) / 2)
    assert h.distance[0] == pytest.approx((0 + 0.25) / 2)


def test_saturated_row_keeps_its_digits():
    # All of 1 - p, signal and entropy round to 0 when taken from p = 1 - 4e-44.
    h = health_of_scores([[100.0, 0.0]])
    tail = math.exp(-100)
    assert h.signal[0] == pytest.approx(2 * tail, rel=1e-12)
    assert h.entropy[0] == pytest.approx(tail * 101, rel=1e-12)
    assert h.jacobian_norm[0] == pytest.approx(2 * tail, rel=1e-12)
    assert h.top_weight[0] == 1 and h.saturated[0] == 1


def test_textbook_row():
    h = health_of_scores([[25.0, 2.0, -3.0]])
    p = np.exp([0.0, -23.0, -28.0])
    p /= p.sum()
    rest = math.exp(-23) + math.exp(-28)
    assert h.top_weight[0] == pytest.approx(p[0])
    assert h.signal[0] == pytest.approx(2 * rest, rel=1e-9)
    assert h.entropy[0] == pytest.approx(24 * math.exp(-23) + 29 * math.exp(-28), rel=1e-9)
    assert (h.score_max[0], h.score_min[0], h.score_mean[0]) == (25, -3, 8)


@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0, 100.0])
def test_definitions_agree_with_the_one_pass_sums(spread):
    # The engine's form: sums over all keys but one argmax.
    for seed in range(20):
        scores = spread * np.random.default_rng(seed).standard_normal(12)
        d = np.delete(scores - scores.max(), scores.argmax())
        e = np.exp(d)
        l1, a, l2, l3 = e.sum(), (e * d).sum(), (e**2).sum(), (e**3).sum()
        total = 1 + l1
        top, rest, t2, t3 = 1 / total, l1 / total, l2 / total**2, l3 / total**3
        square = top**2 * rest**2 + t2 * (1 + 2 * top**2) + t2**2 - 2 * t3
        expected = {
            "entropy": math.log1p(l1) - a / total,
            "effective_keys": 1 / (top**2 + t2),
            "top_weight": top,
            "signal": 2 * rest - rest**2 - t2,
            "jacobian_norm": math.sqrt(square),
        }
        h = health_of_scores([scores])
        for name, value in expected.items():
            assert getattr(h, name)[0] == pytest.approx(value, rel=1e-11, abs=0), (name, seed)


def test_saturation_begins_above_99_percent():
    for weight, saturated in ((0.9899, 0.0), (0.9901, 1.0)):
        assert health_of_scores([[math.log(weight / (1 - weight)), 0.0]]).saturated[0] == saturated


def test_large_scores_begin_above_100():
    h = health_of_scores([[100.0, 100.5, -101.0, 0.0]])
    assert h.large_scores[0] == 0.5


def test_learned_sink_is_an_outcome_but_no_pair():
    h = health_of_scores([[0.0, 0.0]], sinks=[math.log(2)])
    assert h.pairs[0] == 2 and h.widest_row[0] == 2
    assert h.null_mass[0] == pytest.approx(0.5) and h.top_weight[0] == pytest.approx(0.5)
    assert h.entropy[0] == pytest.approx(1.5 * math.log(2))
    assert h.entropy_ratio[0] == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert h.effective_keys[0] == pytest.approx(1 / (0.25 + 2 / 16))
    assert h.signal[0] == pytest.approx(1 - 0.25 - 2 / 16)
    assert h.first_key[0] == pytest.approx(0.25)
    assert h.score_max[0] == 0  # the sink is no score


def test_scores_are_before_softcap_and_bias_and_weights_after():
    h = health_of_scores([[50.0, 0.0]], softcap=1.0, mask=np.array([[0.0, 1.0]]))
    assert h.score_max[0] == 50
    assert h.top_weight[0] == pytest.approx(0.5)  # 1·tanh(50) + 0 against 0 + 1


def test_dropout_changes_no_statistic():
    q, k, v = random_call()
    plain = reference(q, k, v, return_health=True).health
    assert reference(q, k, v, dropout=0.5, seed=1, return_health=True).health == plain


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_a_bias_that_means_hidden_is_no_pair(dtype):
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        dtype, lowest = np.dtype(ml_dtypes.bfloat16), float(ml_dtypes.finfo("bfloat16").min)
    else:
        lowest = float(np.finfo(dtype).min)
    scores = [[1.0, 2.0, 3.0]]
    for bias, pairs in ((lowest, 2), (lowest / 2, 2), (lowest / 4, 3)):
        mask = np.array([[0.0, 0.0, bias]]).astype(dtype)
        h = health_of_scores(scores, mask=mask)
        assert h.pairs[0] == pairs and h.score_max[0] == pairs
    # A row of nothing else counts as empty, though its output is the arithmetic's.
    mask = np.full((1, 3), lowest).astype(dtype)
    r = reference(np.zeros((1, 3)), np.eye(3), np.eye(3), mask=mask, return_health=True)
    np.testing.assert_allclose(r.output, 1 / 3)
    assert r.health.empty_rows[0] == 1 and r.health.pairs[0] == 0


# ---------------------------------------------------------------- empty and nonfinite


def test_nothing_to_average_is_nan():
    h = health_of_scores([[1.0, 2.0]], mask=np.zeros((1, 2), bool))
    assert (h.rows[0], h.empty_rows[0], h.pairs[0], h.nonfinite_rows[0]) == (1, 1, 0, 0)
    for name in Health.FIELDS[5:]:
        assert np.isnan(getattr(h, name)[0]), name


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_hides_no_other(bad):
    q, k, v = random_call(batch=1, heads=1)
    q[0, 0, 4, 0] = bad
    with_it = reference(q, k, v, return_health=True).health
    without = reference(np.delete(q, 4, axis=2), k, v, return_health=True).health
    assert with_it.nonfinite_rows[0, 0] == 1 and without.nonfinite_rows[0, 0] == 0
    assert with_it.rows[0, 0] == without.rows[0, 0] + 1
    assert with_it.pairs[0, 0] == without.pairs[0, 0] + 12
    for name in ("score_max", "score_min", "score_mean", "score_var", "entropy", "signal"):
        assert getattr(with_it, name)[0, 0] == pytest.approx(getattr(without, name)[0, 0]), name


def test_an_empty_row_is_not_nonfinite():
    q, k, v = random_call(batch=1, heads=1)
    q[0, 0, 2] = np.nan
    mask = np.ones((9, 12), bool)
    mask[2] = False
    h = reference(q, k, v, mask=mask, return_health=True).health
    assert (h.empty_rows[0, 0], h.nonfinite_rows[0, 0]) == (1, 0)


def test_a_nan_sink_spoils_the_rows_that_see_something():
    mask = np.array([[True, True], [False, False]])
    h = health_of_scores(np.zeros((2, 2)), sinks=[np.nan], mask=mask)
    assert (h.nonfinite_rows[0], h.empty_rows[0]) == (1, 1)
    assert health_of_scores(np.zeros((2, 2)), sinks=[-np.inf]).nonfinite_rows[0] == 0


# ---------------------------------------------------------------- merging


def test_halves_of_a_batch_merge_to_the_whole():
    q, k, v = random_call()
    whole = reference(q, k, v, causal=True, return_health=True).health.over_batch()
    parts = [
        reference(q[s], k[s], v[s], causal=True, return_health=True).health
        for s in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert whole.shape == (3,)
    merged = [part.over_batch() for part in parts]
    close(Health.merge(*merged), whole)
    close(merged[0].merge(merged[1]).merge(merged[2]), whole)
    close(merged[2].merge(merged[0], merged[1]), whole)
    # And the whole is not any one part.
    assert (merged[0].entropy != whole.entropy).all()


def test_equal_batches_merge_entry_by_entry():
    q, k, v = random_call()
    first, second = (
        reference(q[..., s, :], k, v, query_offset=3 + s.start, return_health=True).health
        for s in (slice(0, 4), slice(4, 9))
    )
    # Rows of two calls are two sequences, and of each of them patterns are taken.
    close(first.merge(second), reference(q, k, v, return_health=True).health, but=PATTERNS)
    assert (first.merge(second).pattern_sequences == 2).all()


def test_merge_does_not_cancel():
    far = 1e9
    a, b = (health_of_scores([[far, far + x]]) for x in (1.0, 2.0))
    assert a.merge(b).score_var[0] == pytest.approx(np.var([0, 1, 0, 2]), rel=1e-9)


def test_merging_with_nothing_changes_nothing():
    h = health_of_scores([[1.0, 3.0, -2.0]])
    nothing = health_of_scores(np.zeros((0, 3)))
    assert nothing.rows[0] == 0
    assert h.merge(nothing) == h == nothing.merge(h)
    none = reference(*np.ones((3, 0, 2, 4, 8)), return_health=True).health
    assert none.shape == (0, 2) and none.over_batch().rows.tolist() == [0, 0]
    assert none.over_batch() == Health.merge(none.over_batch(), none.over_batch())


def test_merge_needs_equal_shapes_and_says_both():
    q, k, v = random_call()
    a = reference(q, k, v, return_health=True).health
    b = reference(q[:2], k[:2], v[:2], return_health=True).health
    with pytest.raises(ValueError, match=r"equal shapes, got \(6, 3\) and \(2, 3\); over_batch"):
        a.merge(b)
    with pytest.raises(TypeError, match="merge takes Health objects, got GradHealth"):
        a.merge(GradHealth.from_sums(np.ones((6, 3, 2))))


def test_over_batch_of_several_axes():
    q, k, v = random_call()
    flat = reference(q, k, v, return_health=True).health
    nested = reference(
        *(x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v)), return_health=True
    ).health
    assert nested.shape == (2, 3, 3)
    assert nested.over_batch() == flat.over_batch()
    assert flat.over_batch().over_batch() == flat.over_batch()


# ---------------------------------------------------------------- as an object


def test_indexing_selects_batch_entries():
    q, k, v = random_call()
    h = reference(q, k, v, return_health=True).health
    np.testing.assert_array_equal(h[2].entropy, h.entropy[2])
    assert h[1:3].shape == (2, 3) and h[-1].shape == (3,)
    assert [entry.shape for entry in h] == [(3,)] * 6
    with pytest.raises(IndexError, match="2 indices for 1 batch axes"):
        h[0, 0]


def test_fields_have_the_shape_and_kind_of_the_table():
    q, k, v = random_call()
    h = reference(q, k, v, return_health=True).health
    for name in Health.FIELDS:
        field = getattr(h, name)
        whole = name in ("rows", "pairs", "empty_rows", "nonfinite_rows", "widest_row")
        assert field.shape == (6, 3) and field.dtype == (np.int64 if whole else np.float64), name


def test_to_dict_is_json_with_none_for_nan():
    h = health_of_scores([[1.0, 2.0]], mask=np.zeros((1, 2), bool))
    d = json.loads(json.dumps(h.to_dict(), allow_nan=False))
    assert tuple(d) == Health.FIELDS
    assert d["rows"] == [1] and d["entropy"] == [None]
    q, k, v = random_call()
    batch = reference(q, k, v, return_health=True).health
    assert batch.to_dict()["entropy"] == batch.entropy.tolist()


def test_pickle_equality_and_repr():
    q, k, v = random_call()
    h = reference(q, k, v, return_health=True).health
    assert pickle.loads(pickle.dumps(h)) == h
    assert h != reference(2 * q, k, v, return_health=True).health
    assert h != h[0] and h != "health"
    assert Health.from_sums(h.sums.tolist()) == h
    shown = repr(h).splitlines()
    assert shown[0] == "Health of shape (6, 3): 3 heads, 162 rows, 1,944 visible pairs"
    assert shown[1:] == str(h).splitlines()[1:]
    with pytest.raises(TypeError, match="unhashable"):
        hash(h)


def test_the_repr_of_many_heads_is_the_head_of_the_table():
    h = Health.from_sums([head(score_max=100.0 + place) for place in range(20)])
    shown = repr(h).splitlines()
    assert [line.split()[0] for line in shown[2:-1]] == [
        "19",
        "18",
        "17",
        "16",
        "15",
        "14",
        "13",
        "12",
    ]
    assert shown[-1] == "… and 12 more heads"
    gradients = GradHealth.from_sums([[4.0, 1.0]] * 9)
    shown = repr(gradients).splitlines()
    assert shown[0] == "GradHealth of shape (9,):"
    assert shown[1].split() == ["head", "|dL/dP|", "|dL/dS|", "survival"]
    assert shown[-1] == "… and 1 more head"


def test_what_results_show_of_themselves():
    q, k, v = random_call(heads=4)
    q[:, 1] *= 1e4
    r = reference(q, k, v, return_health=True, return_lse=True)
    assert repr(r) == (
        "AttentionResult(output: float64 (6, 4, 9, 8), lse: float64 (6, 4, 9), "
        "health: 4 heads, the worst is 1: exploding (critical))"
    )
    d = reference_backward(q, q[..., :12, :], k, v, return_health=True)
    assert repr(d).endswith("dv: float64 (6, 4, 12, 8), health: 4 heads)")
    short = reference(*np.ones((3, 1, 4, 8)), return_health=True)
    assert repr(short).endswith("health: 1 head)")


def test_from_sums_checks_its_columns():
    many = len(HEALTH_SUMS)
    with pytest.raises(ValueError, match=rf"\(\.\.\., heads, {many}\), got \(3, 22\)"):
        Health.from_sums(np.zeros((3, 22)))
    with pytest.raises(ValueError, match=r"\(\.\.\., heads, 2\), got \(2,\)"):
        GradHealth.from_sums(np.zeros(2))


def test_table_is_worst_first_and_fits_100_columns():
    q, k, v = random_call(heads=4)
    q[:, 1] *= 1e4
    q[0, 3, 0] = np.nan
    lines = str(reference(q, k, v, return_health=True).health).splitlines()
    assert lines[0] == ("attention health: 4 heads, 216 rows, 2,592 visible pairs, 1 nonfinite row")
    assert [line.split()[0] for line in lines[1:4]] == ["head", "3", "1"]
    assert "nonfinite (critical)" in lines[2] and "exploding (critical)" in lines[3]
    assert len(lines) == 6 and max(map(len, lines)) <= 100


def test_table_shows_heads_without_a_verdict_too():
    lines = str(health_of_scores([[1.0, 2.0]])).splitlines()
    assert lines[0].startswith("attention health: 1 head, ") and "(few keys)" in lines[2]
    empty = health_of_scores([[1.0, 2.0]], mask=np.zeros((1, 2), bool))
    assert str(empty).splitlines()[2].split()[-1] == "-"


# ---------------------------------------------------------------- verdicts


def head(**fields):
    """Health of one unremarkable head of 100 rows with 16 keys, some fields set otherwise."""
    base = {
        **{"rows": 100, "pairs": 1600, "empty_rows": 0, "nonfinite_rows": 0},
        **{"finite_rows": 100, "choice_rows": 100, "widest_row": 16, "score_count": 1600},
        **{"score_max": 3.0, "score_min": -3.0, "score_mean": 0.0, "score_var": 1.0},
        **{"large_scores": 0.0, "entropy": 2.2, "entropy_ratio": 0.8, "effective_keys": 7.0},
        **{"top_weight": 0.3, "saturated": 0.0, "signal": 0.85, "jacobian_norm": 0.2},
        **{"first_key": 0.06, "distance": 5.0, "null_mass": 0.0, "pattern_sequences": 1},
        **dict.fromkeys(PATTERNS, 0.06),
    } | fields
    base["score_m2"] = base.pop("score_var") * base["score_count"]
    base["large_scores"] *= base["score_count"]
    for name in HEALTH_SUMS[HEALTH_SUMS.index("entropy") : HEALTH_SUMS.index("pattern_sequences")]:
        base[name] *= 100
    return [base[name] for name in HEALTH_SUMS]


def verdict_of(**fields):
    (verdict,) = Health.from_sums([head(**fields)]).verdicts()
    return verdict


UP, DOWN = 1 + 1e-9, 1 - 1e-9


@pytest.mark.parametrize(
    ("fields", "verdict", "level"),
    [
        ({}, "healthy", "ok"),
        ({"nonfinite_rows": 1}, "nonfinite", "critical"),
        ({"score_max": 100 * DOWN}, "healthy", "ok"),
        ({"score_max": 100.0}, "large", "info"),
        ({"score_min": -100.0}, "large", "info"),
        ({"score_max": 1000 * DOWN}, "large", "info"),
        ({"score_max": 1000.0}, "exploding", "error"),
        ({"score_min": -10_000 * DOWN}, "exploding", "error"),
        ({"score_min": -10_000.0}, "exploding", "critical"),
        ({"saturated": 0.5}, "healthy", "ok"),
        ({"saturated": 0.5 * UP}, "saturated", "warning"),
        ({"saturated": 0.9, "first_key": 0.3 * UP}, "sink", "info"),
        ({"saturated": 0.9, "first_key": 0.3 * DOWN}, "saturated", "warning"),
        ({"entropy_ratio": 0.05 * DOWN}, "collapsed", "warning"),
        ({"entropy_ratio": 0.05 * UP}, "sharp", "info"),
        ({"entropy_ratio": 0.01, "first_key": 0.8}, "sink", "info"),
        ({"entropy_ratio": 0.99 * UP, "score_var": 0.149**2}, "uniform", "info"),
        ({"entropy_ratio": 0.99 * UP, "score_var": 0.151**2}, "healthy", "ok"),
        ({"entropy_ratio": 0.99 * DOWN, "score_var": 0.149**2}, "healthy", "ok"),
        ({"first_key": 0.3 * DOWN}, "healthy", "ok"),
        ({"first_key": 0.3 * UP}, "sink", "info"),
        ({"entropy_ratio": 0.3 * DOWN}, "sharp", "info"),
        ({"entropy_ratio": 0.3 * UP}, "healthy", "ok"),
        ({"effective_keys": 4 * DOWN}, "sharp", "info"),
        ({"effective_keys": 4 * UP}, "healthy", "ok"),
    ],
)
def test_each_rule_from_both_sides(fields, verdict, level):
    v = verdict_of(**fields)
    assert isinstance(v, Verdict)
    assert (v.head, v.verdict, v.level) == (0, verdict, level)
    assert v.reason and v.hint


SHARP = {"saturated": {"saturated": 0.9}, "collapsed": {"entropy_ratio": 0.01}}


@pytest.mark.parametrize("name", SHARP)
@pytest.mark.parametrize(
    ("statistic", "pattern", "words"),
    [
        ("self_weight", "self", "its own position"),
        ("previous_weight", "previous", "the position before"),
        ("offset_weight", "offset", "a fixed distance"),
        ("first_key", "first key", "the first key"),
    ],
)
def test_a_pattern_that_training_makes_excuses_a_sharp_head(name, statistic, pattern, words):
    for weight, level in ((0.5 * UP, "info"), (0.5, "warning")):
        # A sink is excused before that, by another name.
        health = Health.from_sums([head(**SHARP[name], **{statistic: weight})])
        (v,) = health.verdicts(sink=2.0)
        assert (v.verdict, v.level) == (name, level)
        benign = f"it looks at {words}, a pattern that training makes" if level == "info" else ""
        assert (v.pattern, v.benign) == (pattern if level == "info" else "spread", benign)
    # Nothing excuses scores that explode.
    v = verdict_of(**SHARP[name], **{statistic: 0.9}, score_max=1e3)
    assert (v.verdict, v.level, v.pattern, v.benign) == ("exploding", "error", pattern, "")


def test_one_key_that_all_rows_share_excuses_nothing():
    v = verdict_of(saturated=0.9, shared_key=0.9)
    assert (v.verdict, v.level, v.pattern, v.benign) == ("saturated", "warning", "shared key", "")


@pytest.mark.parametrize("pattern", ["spread", "offset"])
@pytest.mark.parametrize(("enough", "causal"), [(4, False), (11, True)])
def test_a_few_rows_have_a_distance_in_common_by_chance(enough, causal, pattern):
    rows = enough if pattern == "offset" else enough - 1
    k = np.broadcast_to(np.eye(16), (20, 1, 16, 16))[..., : rows if causal else 16, :]
    q = 500.0 * np.eye(16)[np.arange(rows) - 2 if causal else np.arange(rows) + 12 - rows]
    q = np.broadcast_to(q, (20, 1, rows, 16))
    health = reference(q, k, k, causal=causal, return_health=True).health.over_batch()
    assert health.offset_weight[0] > 0.99
    (verdict,) = health.verdicts()
    assert (verdict.verdict, verdict.pattern) == ("saturated", pattern)
    assert (verdict.level == "info") == bool(verdict.benign) == (pattern == "offset")


def test_the_first_pattern_that_holds_names_the_head():
    v = verdict_of(saturated=0.9, shared_key=0.9, offset_weight=0.8, previous_weight=0.8)
    assert (v.level, v.pattern) == ("info", "previous")


def test_patterns_that_are_not_known_excuse_nothing():
    """As in a store from before they were measured."""
    v = verdict_of(saturated=0.9, **dict.fromkeys(PATTERNS, math.nan))
    assert (v.level, v.pattern, v.benign) == ("warning", "spread", "")


def test_reasons_carry_the_numbers():
    assert verdict_of(score_min=-1234.6).reason == (
        "the largest |score| is 1,235 (error from 1,000)"
    )
    assert verdict_of(nonfinite_rows=7).reason == "7 of 100 rows have a NaN or infinite score"
    assert verdict_of(saturated=0.87, signal=0.021).reason == (
        "87% of the rows put over 0.99 of their weight on one key; "
        "the softmax passes a signal of 0.021"
    )
    assert verdict_of(first_key=0.42).reason == "42% of the weight goes to the first key"
    assert "QK-norm" in verdict_of(score_max=1e5).hint


def test_the_worst_rule_wins_and_the_others_are_named():
    v = verdict_of(score_max=150.0, saturated=0.9, entropy_ratio=0.01, effective_keys=1.1)
    assert (v.verdict, v.also) == ("saturated", ("collapsed", "large", "sharp"))
    v = verdict_of(score_max=1500.0, saturated=0.9)
    assert (v.verdict, v.also) == ("exploding", ("saturated", "large"))
    assert verdict_of().also == ()


def test_worst_first_over_all_heads():
    heads = [
        {},
        {"first_key": 0.5},
        {"score_max": 200.0},
        {"saturated": 0.6},
        {"score_max": 2e4},
        {"saturated": 0.9},
        {"nonfinite_rows": 3},
        {"score_max": 2e3},
        {"score_max": 500.0},
        {"entropy_ratio": 0.04},
        {},
    ]
    verdicts = Health.from_sums([head(**fields) for fields in heads]).verdicts()
    assert [v.head for v in verdicts] == [6, 4, 7, 5, 3, 9, 8, 2, 1, 0, 10]


def test_heads_that_never_see_eight_keys_are_left_out():
    short = {"widest_row": 7, "score_max": 1e6, "saturated": 1.0}
    assert Health.from_sums([head(**short)]).verdicts() == []
    assert verdict_of(**{**short, "widest_row": 8}).verdict == "exploding"
    # A NaN is reported whatever the length.
    assert verdict_of(**short, nonfinite_rows=1).verdict == "nonfinite"


def test_a_batch_is_judged_as_a_whole():
    calm, wild = head(), head(score_max=5e4)
    (v,) = Health.from_sums([[calm], [wild]]).verdicts()
    assert (v.head, v.verdict) == (0, "exploding")


def test_thresholds_can_be_changed_by_name():
    health = Health.from_sums([head(first_key=0.4)])
    assert health.verdicts()[0].verdict == "sink"
    assert health.verdicts(sink=0.5)[0].verdict == "healthy"
    assert health.verdicts(min_keys=17) == []
    assert Thresholds().sink == 0.3
    with pytest.raises(TypeError, match="unknown threshold 'sinc'; there are: large,"):
        health.verdicts(sinc=0.5)


@pytest.mark.parametrize("value", [1, np.float32(0.5), np.int64(1), torch.tensor(0.5), math.inf])
def test_a_threshold_is_any_number(value):
    changed = Thresholds().changed({"sink": value})
    assert changed.sink == float(value) and type(changed.sink) is float


@pytest.mark.parametrize("value", [None, "0.3", [0.3], 1j, np.nan, torch.ones(2)])
def test_what_is_no_number_is_refused_as_a_threshold(value):
    health = Health.from_sums([head()])
    with pytest.raises((TypeError, ValueError), match="sink: expected a number"):
        health.verdicts(sink=value)


def test_real_attention_gets_the_expected_verdicts():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 128, 256))

    def name(**options):
        return reference(q, k, v, return_health=True, **options).health.verdicts()[0].verdict

    assert name() == "healthy"
    assert name(scale=30.0) == "exploding"
    assert name(scale=3.0) == "saturated"
    assert name(scale=1 / 256) == "uniform"
    assert name(mask=np.where(np.arange(128) == 0, 5.0, 0.0)) == "sink"
    # Unscaled scores have a standard deviation of 16: mostly one key a row, short of 100.
    assert name(scale=1.0) in ("saturated", "sharp", "collapsed")


# ---------------------------------------------------------------- gradients


def test_gradient_health_by_hand():
    # Two keys of weight 1/2, values 0 and 2: dL/dP = (0, 2), dL/dS = (-1/2, 1/2).
    q, k, v = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[0.0], [2.0]])
    h = reference_backward(np.ones((1, 1)), q, k, v, return_health=True).health
    assert h.shape == (1,)
    assert h.weight_grad_norm[0] == pytest.approx(2)
    assert h.score_grad_norm[0] == pytest.approx(math.sqrt(0.5))
    assert h.survival[0] == pytest.approx(math.sqrt(0.5) / 2)


def test_saturation_stops_the_gradient():
    rng = np.random.default_rng(0)
    q, k, v, g = rng.standard_normal((4, 2, 32, 64))
    q[1] *= 1e5
    h = reference_backward(g, q, k, v, return_health=True).health
    assert h.survival[1] < h.survival[0] / 100


def test_gradient_health_merges_by_squares():
    rng = np.random.default_rng(0)
    q, k, v, g = rng.standard_normal((4, 4, 2, 6, 8))
    whole = reference_backward(g, q, k, v, return_health=True).health
    halves = [
        reference_backward(g[s], q[s], k[s], v[s], return_health=True).health.over_batch()
        for s in (slice(1), slice(1, 4))
    ]
    merged = GradHealth.merge(*halves)
    for name in GradHealth.FIELDS:
        np.testing.assert_allclose(getattr(merged, name), getattr(whole.over_batch(), name))
    np.testing.assert_allclose(
        whole.over_batch().weight_grad_norm, np.sqrt((whole.weight_grad_norm**2).sum(axis=0))
    )


def test_gradient_health_counts_visible_pairs_only():
    rng = np.random.default_rng(0)
    q, k, v, g = rng.standard_normal((4, 1, 6, 8))
    v[:, 4:] = 1000.0
    lowest = np.finfo(np.float32).min
    hidden = [
        reference_backward(g, q, k, v, return_health=True, mask=mask).health
        for mask in (np.arange(6) < 4, np.where(np.arange(6) < 4, 0.0, lowest).astype(np.float32))
    ]
    assert hidden[0] == hidden[1]
    cut = reference_backward(g, q, k[:, :4], v[:, :4], return_health=True).health
    np.testing.assert_allclose(hidden[0].survival, cut.survival)


def test_gradient_health_as_an_object():
    h = GradHealth.from_sums([[4.0, 1.0], [0.0, 0.0], [16.0, 1.0]])
    assert h.to_dict() == {
        "weight_grad_norm": [2.0, 0.0, 4.0],
        "score_grad_norm": [1.0, 0.0, 1.0],
        "survival": [0.5, None, 0.25],
    }
    assert pickle.loads(pickle.dumps(h)) == h
    assert [line.split()[0] for line in str(h).splitlines()] == ["head", "2", "0", "1"]
    assert str(h).splitlines()[-1].split() == ["1", "0", "0", "-"]
