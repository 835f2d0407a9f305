"""The specification itself: by hand, against PyTorch, against differences, on the hard cases."""

import math

import numpy as np
import pytest

from levelhead._reference import dropout_keep, reference, reference_backward, softmax
from levelhead._result import AttentionGradients, AttentionResult


def inputs(*lead, heads=2, kv_heads=None, length=5, size=7, d=4, dv=3, seed=0):
    rng = np.random.default_rng(seed)
    kv_heads = heads if kv_heads is None else kv_heads
    return (
        rng.standard_normal((*lead, heads, length, d)),
        rng.standard_normal((*lead, kv_heads, size, d)),
        rng.standard_normal((*lead, kv_heads, size, dv)),
    )


def seen_pairs(**options):
    """The visible pairs of 4 queries and 6 keys, read off the weights."""
    q, k, v = inputs(heads=1, length=4, size=6)
    return (reference(q, k, v, return_weights=True, **options).weights[0] > 0).astype(int).tolist()


# ---------------------------------------------------------------- by hand


def test_saturated_textbook_row():
    q, k = np.ones((1, 1)), np.array([[25.0], [2.0], [-3.0]])
    r = reference(q, k, np.array([[1.0], [2.0], [4.0]]), return_weights=True, return_lse=True)
    total = math.exp(25) + math.exp(2) + math.exp(-3)
    expected = [math.exp(s) / total for s in (25, 2, -3)]
    np.testing.assert_allclose(r.weights[0], expected, rtol=1e-14)
    np.testing.assert_allclose(
        r.output[0, 0], expected[0] + 2 * expected[1] + 4 * expected[2], rtol=1e-15
    )
    assert r.lse[0] == pytest.approx(math.log(total), rel=1e-15)


def test_scale_is_one_over_sqrt_of_the_key_dimension():
    q = np.array([[3.0, 4.0, 0.0, 0.0]])
    k = np.array([[2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])  # scores 6/2 and 4/2
    r = reference(q, k, np.eye(2), return_lse=True)
    assert r.lse[0] == pytest.approx(math.log(math.exp(3) + math.exp(2)))
    assert r.output[0, 0] == pytest.approx(1 / (1 + math.exp(-1)))


def test_scale_per_head_zero_and_negative():
    q, k, v = inputs()
    np.testing.assert_allclose(
        reference(q, k, v, scale=0.0), np.broadcast_to(v.mean(-2, keepdims=True), (2, 5, 3))
    )
    both = reference(q, k, v, scale=[0.5, -2.0])
    np.testing.assert_array_equal(both[0], reference(q[0], k[0], v[0], scale=0.5))
    np.testing.assert_array_equal(both[1], reference(q[1], k[1], v[1], scale=-2.0))


def test_softcap_comes_after_scale_and_before_the_mask():
    q, k = np.ones((1, 1)), np.array([[50.0], [-1.0]])
    r = reference(
        q, k, np.eye(2), scale=2.0, softcap=3.0, mask=np.array([[10.0, 0.0]]), return_lse=True
    )
    logits = [3 * math.tanh(100 / 3) + 10, 3 * math.tanh(-2 / 3)]
    assert r.lse[0] == pytest.approx(math.log(sum(map(math.exp, logits))), rel=1e-14)


def test_sink_joins_the_denominator_and_has_no_value():
    q, k, v = np.zeros((1, 1, 4)), np.zeros((1, 2, 4)), np.ones((1, 2, 1))
    r = reference(q, k, v, sinks=[math.log(2)], return_lse=True, return_weights=True)
    np.testing.assert_allclose(r.weights[0, 0], [0.25, 0.25])
    assert r.output[0, 0, 0] == pytest.approx(0.5)
    assert r.lse[0, 0] == pytest.approx(math.log(4))
    np.testing.assert_array_equal(reference(q, k, v, sinks=[-np.inf]), reference(q, k, v))


def test_softmax_of_nothing():
    weights, lse = softmax(np.full((2, 3), -np.inf))
    assert (weights == 0).all() and (lse == -np.inf).all()


# ---------------------------------------------------------------- who sees whom


def test_causal_queries_are_the_last_ones():
    assert seen_pairs(causal=True) == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]


def test_causal_top_left():
    assert seen_pairs(causal=True, query_offset=0)[:2] == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_window_as_a_number_is_the_last_keys_with_its_own():
    expected = [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert seen_pairs(window=2) == expected
    assert seen_pairs(window=(1, 0)) == expected
    assert seen_pairs(window=(1, None), causal=True) == expected


def test_window_with_open_sides_and_a_negative_offset():
    assert seen_pairs(window=(None, 1), query_offset=-2) == [
        [0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
    ]
    assert seen_pairs(window=(0, None), query_offset=3)[0] == [0, 0, 0, 1, 1, 1]


def test_key_lengths_hide_and_move_nothing():
    q, k, v = inputs(2, length=4, size=6)
    r = reference(q, k, v, causal=True, key_lengths=[6, 4], return_weights=True)
    assert (r.weights[1, :, :, 4:] == 0).all() and (r.weights[0, :, 3, 4:] > 0).all()
    # Entry 1's last query stands at position 5 still, and sees all four keys that exist.
    np.testing.assert_allclose(
        r.output[1, :, 3], reference(q[1, :, 3:], k[1, :, :4], v[1, :, :4])[:, 0]
    )


def test_query_offset_per_batch_entry_flat_or_shaped():
    q, k, v = inputs(2, 3, length=2, size=6)
    offsets = [[0, 1, 2], [3, 4, -1]]
    r = reference(q, k, v, causal=True, query_offset=offsets)
    np.testing.assert_array_equal(
        r, reference(q, k, v, causal=True, query_offset=np.ravel(offsets))
    )
    for b in np.ndindex(2, 3):
        one = reference(q[b], k[b], v[b], causal=True, query_offset=offsets[b[0]][b[1]])
        np.testing.assert_allclose(r[b], one, rtol=1e-12)


def test_bool_and_infinite_masks_are_the_same_and_combine_with_causal():
    q, k, v = inputs(3)
    mask = np.random.default_rng(1).random((3, 1, 5, 7)) < 0.6
    with_bool = reference(q, k, v, mask=mask, causal=True)
    np.testing.assert_array_equal(
        with_bool, reference(q, k, v, mask=np.where(mask, 0.0, -np.inf), causal=True)
    )
    both = mask & (np.arange(7) <= np.arange(5)[:, None] + 2)
    np.testing.assert_array_equal(with_bool, reference(q, k, v, mask=both))


# ---------------------------------------------------------------- shapes


def test_two_three_and_many_dimensions_agree():
    q, k, v = inputs(2, 3, heads=4, kv_heads=2)
    r = reference(q, k, v, return_lse=True, return_weights=True, return_health=True)
    assert isinstance(r, AttentionResult)
    assert r.output.shape == (2, 3, 4, 5, 3)
    assert r.lse.shape == (2, 3, 4, 5)
    assert r.weights.shape == (2, 3, 4, 5, 7)
    assert r.health.shape == (2, 3, 4)
    np.testing.assert_allclose(r.output[1, 2], reference(q[1, 2], k[1, 2], v[1, 2]), rtol=1e-12)
    # Query heads 2 and 3 share key head 1.
    one = reference(
        q[1, 2, 3], k[1, 2, 1], v[1, 2, 1], return_lse=True, return_weights=True, return_health=True
    )
    np.testing.assert_allclose(r.output[1, 2, 3], one.output, rtol=1e-12)
    assert one.lse.shape == (5,) and one.weights.shape == (5, 7) and one.health.shape == (1,)


@pytest.mark.parametrize(
    ("q", "k"), [((2, 0, 4), (2, 3, 4)), ((2, 3, 4), (2, 0, 4)), ((0, 2, 3, 4), (0, 2, 5, 4))]
)
def test_empty_dimensions(q, k):
    r = reference(
        np.ones(q), np.ones(k), np.ones(k), return_lse=True, return_weights=True, return_health=True
    )
    assert r.output.shape == q and (r.output == 0).all()
    assert r.lse.shape == q[:-1] and (r.lse == -np.inf).all()
    assert r.weights.shape == (*q[:-1], k[-2])
    assert r.health.over_batch().rows.shape == (2,)
    gradients = reference_backward(np.ones(q), np.ones(q), np.ones(k), np.ones(k))
    assert [g.shape for g in gradients[:3]] == [q, k, k]
    assert all((g == 0).all() for g in gradients[:3])


def test_agrees_with_torch():
    torch = pytest.importorskip("torch")
    q, k, v = inputs(2, heads=4, kv_heads=2, length=6, size=6, d=8, dv=8)
    g = np.random.default_rng(9).standard_normal(q.shape)
    tq, tk, tv = (torch.tensor(x, requires_grad=True) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        tq, tk, tv, is_causal=True, enable_gqa=True
    )
    out.backward(torch.tensor(g))
    np.testing.assert_allclose(
        reference(q, k, v, causal=True), out.detach().numpy(), rtol=1e-12, atol=1e-14
    )
    gradients = reference_backward(g, q, k, v, causal=True)
    for ours, theirs in zip(gradients[:3], (tq.grad, tk.grad, tv.grad), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-10, atol=1e-13)


# ---------------------------------------------------------------- the hard cases


def test_empty_rows_give_zero_and_minus_infinity():
    q, k, v = inputs(heads=1)
    mask = np.ones((5, 7), bool)
    mask[2] = False
    r = reference(q, k, v, mask=mask, return_lse=True, return_weights=True)
    assert (r.output[0, 2] == 0).all() and r.lse[0, 2] == -np.inf and (r.weights[0, 2] == 0).all()
    np.testing.assert_array_equal(r.output[0, 1], reference(q, k, v)[0, 1])
    with_sink = reference(q, k, v, mask=mask, sinks=[0.75], return_lse=True)
    assert (with_sink.output[0, 2] == 0).all() and with_sink.lse[0, 2] == 0.75
    g = np.full((1, 5, 3), np.nan)
    g[0, :2] = 1.0  # an empty row's gradient is 0 whatever comes in, even NaN
    gradients = reference_backward(g[:, 2:3], q[:, 2:3], k, v, mask=mask[2:3])
    assert all((x == 0).all() for x in gradients[:3])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1000.0])
def test_hidden_keys_and_values_have_no_effect(poison):
    q, k, v = inputs(2, size=7)
    g = np.random.default_rng(5).standard_normal((2, 2, 5, 3))
    hidden = np.arange(7) >= 4
    bad_k, bad_v = (np.where(hidden[:, None], poison, x) for x in (k, v))
    clean_k, clean_v = (np.where(hidden[:, None], 0.0, x) for x in (k, v))
    for options in (
        {"mask": ~hidden},
        {"key_lengths": [4, 4]},
        {"mask": np.where(hidden, -np.inf, 0.25)},
        {"softcap": 2.0, "mask": ~hidden},
    ):
        asked = {"return_lse": True, "return_weights": True, "return_health": True}
        clean = reference(q, clean_k, clean_v, **options, **asked)
        bad = reference(q, bad_k, bad_v, **options, **asked)
        for a, b in zip(clean[:3], bad[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        assert clean.health == bad.health
        clean_g = reference_backward(g, q, clean_k, clean_v, return_health=True, **options)
        bad_g = reference_backward(g, q, bad_k, bad_v, return_health=True, **options)
        for a, b in zip(clean_g[:3], bad_g[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        assert clean_g.health == bad_g.health
    # The same poison in sight is loud.
    seen = reference(q, bad_k, bad_v)
    assert not np.isclose(seen, reference(q, clean_k, clean_v)).any()


@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_visible_nan_reaches_exactly_the_rows_that_see_it(where):
    q, k, v = inputs(heads=1, length=7, size=7)
    {"key": k, "value": v, "query": q}[where][0, 3] = np.nan
    r = reference(q, k, v, causal=True)
    bad = np.isnan(r[0]).all(axis=-1)
    assert bad.tolist() == [i == 3 if where == "query" else i >= 3 for i in range(7)]
    assert np.isfinite(r[0][~bad]).all()


def test_gradients_keep_a_visible_nan_to_what_it_touches():
    q, k, v = inputs(heads=1, length=7, size=7)
    q[0, 3] = np.nan
    dq, dk, dv, _ = reference_backward(np.ones((1, 7, 3)), q, k, v, causal=True)
    assert np.isnan(dq[0]).any(axis=-1).tolist() == [i == 3 for i in range(7)]
    for gradient in (dk, dv):
        assert np.isnan(gradient[0]).any(axis=-1).tolist() == [j <= 3 for j in range(7)]


def test_one_nan_value_stays_in_its_column():
    q, k, v = inputs(heads=1)
    v[0, 1, 2] = np.nan
    assert np.isnan(reference(q, k, v)[0]).tolist() == [[False, False, True]] * 5


def test_infinite_scores():
    q, v = np.ones((1, 1)), np.array([[1.0], [2.0]])
    some = reference(q, np.array([[-np.inf], [0.0]]), v, return_lse=True, return_weights=True)
    assert some.weights.tolist() == [[0.0, 1.0]] and some.output.tolist() == [[2.0]]
    none = reference(q, np.full((2, 1), -np.inf), v, return_lse=True, return_health=True)
    assert none.output.tolist() == [[0.0]] and none.lse[0] == -np.inf
    assert none.health.nonfinite_rows[0] == 1 and none.health.empty_rows[0] == 0
    plus = reference(q, np.array([[np.inf], [0.0]]), v, return_health=True)
    assert np.isnan(plus.output).all() and plus.health.nonfinite_rows[0] == 1


# ---------------------------------------------------------------- gradients


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "bias": {"mask": np.linspace(-2, 2, 35).reshape(5, 7)},
    "softcap": {"softcap": 0.8, "scale": 2.0},
    "sinks": {"sinks": [0.3, -0.6, 1.0, 0.0]},
    "scales": {"scale": [0.1, -0.5, 2.0, 0.0]},
    "lengths": {"key_lengths": [7, 3], "causal": True},
    "dropout": {"dropout": 0.4, "seed": 11},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_central_differences(options):
    arrays = inputs(2, heads=4, kv_heads=2)
    rng = np.random.default_rng(3)
    g = rng.standard_normal((2, 4, 5, 3))
    gradients = reference_backward(g, *arrays, **options)
    assert isinstance(gradients, AttentionGradients) and gradients.health is None
    step = 1e-5
    for which, gradient in enumerate(gradients[:3]):
        assert gradient.shape == arrays[which].shape
        for _ in range(3):  # along random directions: each touches every entry
            direction = rng.standard_normal(gradient.shape)
            moved = [
                reference(
                    *(
                        x + (sign * step * direction if i == which else 0.0)
                        for i, x in enumerate(arrays)
                    ),
                    **options,
                )
                for sign in (1, -1)
            ]
            difference = (g * (moved[0] - moved[1])).sum() / (2 * step)
            assert (gradient * direction).sum() == pytest.approx(difference, rel=1e-7, abs=1e-8)


def test_backward_takes_output_and_lse_like_the_engine():
    q, k, v = inputs()
    g = np.ones((2, 5, 3))
    r = reference(q, k, v, return_lse=True)
    for a, b in zip(
        reference_backward(g, q, k, v, r.output, r.lse)[:3],
        reference_backward(g, q, k, v)[:3],
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- dropout


def keep_in_plain_integers(seed, row, key, rate):
    z = (seed + (row + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    x = (key * 0x9E3779B1 + z % 2**32) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x ^= z >> 32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    x ^= x >> 16
    return x >= int(rate * 2**32)


def test_dropout_mask_bit_for_bit():
    rows, keys = [0, 1, 7, 2**40], [0, 1, 2, 3, 1000, 2**31 + 5]
    for seed in (0, 1, 2**63 + 12345, -1):
        kept = dropout_keep(seed, rows, keys, 0.37)
        expected = [[keep_in_plain_integers(seed, r, j, 0.37) for j in keys] for r in rows]
        assert kept.tolist() == expected


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_in_every_row_and_column(rate):
    kept = dropout_keep(42, np.arange(400), np.arange(1000), rate)
    sigma = math.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 5 * sigma / math.sqrt(kept.size)
    assert np.abs(kept.mean(axis=1) - (1 - rate)).max() < 5 * sigma / math.sqrt(1000)
    assert np.abs(kept.mean(axis=0) - (1 - rate)).max() < 5 * sigma / math.sqrt(400)
    # Neighbouring rows are unrelated.
    agree = (kept[1:] == kept[:-1]).mean()
    assert agree == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.01)


def test_dropout_acts_on_the_sum_and_not_on_the_weights():
    q, k, v = inputs(2, heads=2)
    r = reference(q, k, v, dropout=0.5, seed=3, return_weights=True, return_lse=True)
    plain = reference(q, k, v, return_weights=True, return_lse=True)
    np.testing.assert_array_equal(r.weights, plain.weights)
    np.testing.assert_array_equal(r.lse, plain.lse)
    row = (1 * 2 + 1) * 5 + 4  # batch entry 1, head 1, query 4
    kept = dropout_keep(3, row, np.arange(7), 0.5)
    np.testing.assert_allclose(
        r.output[1, 1, 4], (plain.weights[1, 1, 4] * kept * 2) @ v[1, 1], rtol=1e-14
    )
    assert (r.output != reference(q, k, v, dropout=0.5, seed=4)).any()


# ---------------------------------------------------------------- bad input


Q, K, V = inputs(3, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "text"),
    [
        ((Q[0], K, V), {}, ValueError, "must have the same number of dimensions"),
        ((Q[..., :3], K, V), {}, ValueError, "key must have query's last dimension 3, got 4"),
        ((Q, K, V[..., :6, :]), {}, ValueError, r"value must have shape \(3, 2, 7\) \+ \(Dv,\)"),
        ((Q[:2], K, V), {}, ValueError, r"batch dimensions \(2,\), got \(3,\)"),
        ((Q[:, :3], K, V), {}, ValueError, "query's 3 heads must be a multiple of key's 2"),
        ((Q, K, V), {"mask": np.ones((5, 6), bool)}, ValueError, r"mask must broadcast to \(3, 4, 5, 7\), got shape \(5, 6\)"),  # noqa: E501
        ((Q, K, V), {"mask": np.ones((5, 7), int)}, TypeError, "mask must be bool or floating"),
        ((Q, K, V), {"window": 0}, ValueError, "window must be at least 1 key, got 0"),
        ((Q, K, V), {"window": (-1, 0)}, ValueError, r"sides of 0 or more, or None; got \(-1, 0\)"),
        ((Q, K, V), {"query_offset": [0, 1]}, ValueError, "query_offset must be an int or 3"),
        ((Q, K, V), {"query_offset": 0.5}, TypeError, "query_offset must be whole numbers"),
        ((Q, K, V), {"key_lengths": [1, 2]}, ValueError, "key_lengths must have 3 entries"),
        ((Q, K, V), {"key_lengths": [1, 2, 8]}, ValueError, r"0 … 7, got \[1, 2, 8\]"),
        ((Q, K, V), {"scale": [1.0, 2.0]}, ValueError, r"be a number or have shape \(4,\)"),
        ((Q, K, V), {"sinks": 1.0}, ValueError, r"sinks must have shape \(4,\), got shape \(\)"),
        ((Q, K, V), {"softcap": 0.0}, ValueError, "softcap must be above 0, got 0.0"),
        ((Q, K, V), {"dropout": 1.0}, ValueError, r"dropout must lie in \[0, 1\), got 1.0"),
        ((Q, K, V), {"dropout": 0.1}, ValueError, "dropout needs a seed"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected(arrays, options, error, text):
    with pytest.raises(error, match=text):
        reference(*arrays, **options)


def test_backward_checks_its_gradient():
    with pytest.raises(ValueError, match=r"grad_output must have shape \(3, 4, 5, 3\), got \(3,\)"):
        reference_backward(np.ones(3), Q, K, V)
