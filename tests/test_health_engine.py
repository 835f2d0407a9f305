"""The engine's statistics, field by field, against the definitions in the specification."""

import copy
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest
from support import (
    DTYPES,
    OPTION_NAMES,
    PATTERNS,
    assert_health,
    inputs,
    normal,
    options,
    score_error,
)

import levelhead as lh

LENGTHS = {"decode": 4, "prefill": 27, "prefill long": 75}


def health(q, k, v, **opts):
    """Ours, after comparing it with the reference's."""
    got = lh.attention(q, k, v, return_health=True, **opts).health
    want = lh.reference(q, k, v, return_health=True, **opts).health
    assert_health(got, want, score_error(q, k, opts.get("scale")))
    return got


def call(path, dtype=np.float32, size=90, **changes):
    shape = {"heads": 4, "kv_heads": 2, "length": LENGTHS[path], "d": 32} | changes
    return inputs(2, size=size, dtype=dtype, **shape)


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_field(dtype, path):
    q, k, v = call(path, dtype)
    ours = health(q, k, v)
    assert ours.shape == (2, 4)
    assert (ours.rows == LENGTHS[path]).all() and (ours.pairs == LENGTHS[path] * 90).all()
    assert set(ours.FIELDS) == set(ours.to_dict())


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("size", [90, 1300])
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_with_every_option(name, size, path):
    q, k, v = call(path, size=size)
    opts = options(2, 4, LENGTHS[path], size)[name]
    changed = health(q, k, v, **opts)
    if name != "dropout":  # which no statistic sees
        plain = lh.attention(q, k, v, return_health=True).health
        assert not np.allclose(changed.entropy, plain.entropy, rtol=1e-4)


@pytest.mark.parametrize("path", LENGTHS)
def test_options_together(path):
    """Bias, softcap, sinks, a padded batch and a window, where each touches another statistic."""
    q, k, v = call(path, size=1100)
    length = LENGTHS[path]
    mask = np.where(normal(length, 1100) > -1, normal(length, 1100, seed=4), -np.inf)
    health(
        *(q, k, v),
        mask=mask,
        softcap=2.5,
        sinks=[0.0, 1.0, 3.0, -2.0],
        key_lengths=[1100, 333],
        query_offset=[1100 - length, 333 - length],
        window=(700, 0),
        scale=[0.3, 1.0, -0.7, 2.0],
    )


@pytest.mark.parametrize("size", [511, 512, 513, 1024, 1025, 2100])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_decode_splits(length, size):
    """Parts of 512 keys are merged: the largest score in any of them, or late, or in none."""
    q, k, v = inputs(heads=4, kv_heads=2, length=length, size=size, d=64)
    ours = health(q, k, v, causal=True)
    assert (ours.widest_row == size).all()
    for at in {0, size // 2, size - 1}:
        peaked = k.copy()
        peaked[:, at] = 40 * q[::2, 0] / np.linalg.norm(q[::2, 0])
        health(q, peaked, v)
    health(q, k, v, key_lengths=[size // 3])
    health(q, k, v, window=100, sinks=[0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("window", [None, (40, 0), (333, 2)], ids=str)
def test_few_rows_of_decode(group, window):
    """However many rows share a tile, and wherever it begins and ends."""
    for size in (31, 32, 33, 47, 700):
        q, k, v = inputs(heads=2 * group, kv_heads=2, length=1, size=size)
        k[:, size // 2] *= 5  # the argmax is not in the first lane everywhere
        health(q, k, v, window=window, query_offset=size - 3)
        health(q, k, v, window=window, sinks=np.linspace(-1.0, 2.0, 2 * group))


@pytest.mark.parametrize("path", LENGTHS)
def test_padded_batch(path):
    q, k, v = inputs(4, heads=2, length=LENGTHS[path], size=600, d=16)
    lengths = [0, 1, 70, 600]
    ours = health(q, k, v, key_lengths=lengths)
    np.testing.assert_array_equal(ours.pairs[:, 0], LENGTHS[path] * np.array(lengths))
    np.testing.assert_array_equal(ours.empty_rows[:, 0], [LENGTHS[path], 0, 0, 0])
    assert np.isnan(ours.entropy[0]).all() and (ours.entropy[1] == 0).all()
    assert np.isnan(ours.entropy_ratio[1]).all(), "one key is no choice"


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_that_means_hidden_is_no_pair(dtype, path):
    q, k, v = call(path)
    low = float.fromhex("-0x1.FEp127") if dtype.name == "bfloat16" else float(np.finfo(dtype).min)
    for share, hidden in ((1.0, True), (0.51, True), (0.25, False)):
        mask = np.zeros((LENGTHS[path], 90))
        mask[:, ::2] = share * low
        got = lh.attention(q, k, v, mask=mask.astype(dtype), return_health=True).health
        want = lh.reference(q, k, v, mask=mask.astype(dtype), return_health=True).health
        np.testing.assert_array_equal(got.pairs, want.pairs)
        assert (got.pairs == LENGTHS[path] * (45 if hidden else 90)).all()
        np.testing.assert_allclose(got.entropy, want.entropy, rtol=1e-5)
        np.testing.assert_allclose(got.score_var, want.score_var, rtol=1e-5)


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("offset", [0, -3, 1000, None])
def test_distance_is_in_positions(offset, path):
    q, k, v = call(path)
    plain = lh.attention(q, k, v, query_offset=0, return_health=True).health
    ours = health(q, k, v, query_offset=offset)
    assert np.allclose(ours.distance, plain.distance) == (offset == 0)


@pytest.mark.parametrize("path", LENGTHS)
def test_large_and_saturated(path):
    q, k, v = call(path)
    ours = health(q, k, v, scale=12.0)
    assert (ours.large_scores > 0).all() and (ours.large_scores < 1).all()
    assert (ours.saturated > 0).any() and (ours.top_weight > 0.5).any()
    assert (lh.attention(q, k, v, return_health=True).health.large_scores == 0).all()


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("path", LENGTHS)
def test_scores_far_from_zero_keep_their_variance(path, kv_heads):
    """E[x²] - E[x]² would lose a spread of 1 beside a mean of 4000 in float32."""
    q, k, v = call(path, d=2, kv_heads=kv_heads)
    q[..., 0], k[..., 0] = 64.0, 64.0
    ours = lh.attention(q, k, v, scale=1.0, return_health=True).health
    want = lh.reference(q, k, v, scale=1.0, return_health=True).health
    assert (ours.score_mean > 4000).all()
    np.testing.assert_allclose(ours.score_var, want.score_var, rtol=1e-3)


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("rows", [slice(3, 4), slice(0, 2), slice(None, None, 2)], ids=str)
def test_rows_far_from_each_other(rows, path):
    """Rows that are measured together may have nothing in common."""
    q, k, v = call(path)
    k[..., 0] = 1.0
    q[:, :, rows, 0] += 1e4
    assert (health(q, k, v).score_var > 1e4).all()


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_at_a_late_key_is_left_out(bad, path):
    """Other statistics than the counts are those of the call without it."""
    q, k, v = call(path, size=600)
    q[..., 0], k[:, :, 550, 0] = 0.0, 2e38
    q[:, :, 3, 0] = np.sign(bad) * 1e10  # only their product overflows
    without_it = lh.attention(np.delete(q, 3, axis=2), k, v, return_health=True).health
    with_it = lh.attention(q, k, v, return_health=True).health
    assert (with_it.nonfinite_rows == 1).all() and (without_it.nonfinite_rows == 0).all()
    assert (with_it.pairs == without_it.pairs + 600).all()
    # Rows move up by one where it is gone, which distances and patterns see.
    for name in set(with_it.FIELDS) - {"rows", "pairs", "nonfinite_rows", "distance", *PATTERNS}:
        np.testing.assert_allclose(
            getattr(with_it, name), getattr(without_it, name), rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("path", LENGTHS)
def test_keys_that_some_rows_do_not_see_at_all(path, sign):
    """All scores are far from 0 on one side: a block hidden from a row must not put a 0 there."""
    length, size = LENGTHS[path], 600
    q, k, v = call(path, size=size)
    q, k = abs(q) + 1, sign * (abs(k) + 1)
    mask = np.zeros((length, size), bool)
    mask[: length // 2, : size // 2] = mask[length // 2 :, size // 2 :] = True
    ours = health(q, k, v, mask=mask)
    assert (sign * ours.score_min > 1).all() and (sign * ours.score_max > 1).all()


@pytest.mark.parametrize("path", LENGTHS)
def test_halves_of_a_batch_merge_to_the_whole(path):
    q, k, v = inputs(6, heads=3, length=LENGTHS[path], size=50)
    opts = {"causal": True, "sinks": [0.0, 1.0, 2.0]}
    whole = lh.attention(q, k, v, return_health=True, **opts).health
    parts = [
        lh.attention(q[s], k[s], v[s], return_health=True, **opts).health
        for s in (slice(0, 3), slice(3, 6))
    ]
    assert whole[:3] == parts[0] and whole[3:] == parts[1]
    merged, together = parts[0].over_batch().merge(parts[1].over_batch()), whole.over_batch()
    for name in together.FIELDS:
        np.testing.assert_allclose(getattr(merged, name), getattr(together, name), rtol=1e-13)
    # The batch of each head as rows of one long head: what merging means.
    for head, name in itertools.product(range(3), ("entropy", "signal", "score_max")):
        each = getattr(whole, name)[:, head]
        expected = each.max() if name == "score_max" else each.mean()
        np.testing.assert_allclose(getattr(merged, name)[head], expected, rtol=1e-12)


@pytest.mark.parametrize("path", LENGTHS)
def test_queries_in_two_halves_merge_to_the_whole(path):
    q, k, v = call(path, np.float64)
    half = LENGTHS[path] // 2
    whole = lh.attention(q, k, v, query_offset=10, causal=True, return_health=True).health
    first, second = (
        lh.attention(part, k, v, query_offset=at, causal=True, return_health=True).health
        for part, at in ((q[:, :, :half], 10), (q[:, :, half:], 10 + half))
    )
    merged = first.merge(second)
    for name in set(whole.FIELDS) - set(PATTERNS):  # which are those of two sequences
        np.testing.assert_allclose(
            getattr(merged, name), getattr(whole, name), rtol=1e-10, err_msg=name
        )


# ---------------------------------------------------------------- gradients


def grad_health(q, k, v, **opts):
    g = normal(*q.shape[:-1], v.shape[-1], dtype=q.dtype, seed=9)
    forward = lh.attention(q, k, v, return_lse=True, **opts)
    call = (g, q, k, v, forward.output, forward.lse)
    got = lh.attention_backward(*call, return_health=True, **opts).health
    want = lh.reference_backward(*call, return_health=True, **opts).health
    assert type(got) is lh.GradHealth and got.shape == want.shape
    rtol = {"float64": 1e-10, "float32": 1e-4}.get(q.dtype.name, 2e-2)
    for name in got.FIELDS:
        np.testing.assert_allclose(
            getattr(got, name), getattr(want, name), rtol=rtol, atol=rtol * 1e-3, err_msg=name
        )
    return got


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_health(dtype, path):
    ours = grad_health(*call(path, dtype))
    assert ours.shape == (2, 4) and (ours.survival > 0).all() and (ours.survival < 1).all()


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_gradient_health_with_every_option(name, path):
    q, k, v = call(path, np.float64)
    grad_health(q, k, v, **options(2, 4, LENGTHS[path], 90)[name])


def test_saturation_stops_the_gradient():
    q, k, v = call("prefill", np.float64)
    free, stopped = grad_health(q, k, v), grad_health(q, k, v, scale=40.0)
    assert (stopped.survival < free.survival).all()
    assert stopped.survival.mean() < free.survival.mean() / 3


def test_untouched_health_is_copied_and_pickled():
    def made():
        return lh.attention(*inputs(2, heads=3), return_health=True).health

    for twin in (copy.copy(made()), copy.deepcopy(made()), pickle.loads(pickle.dumps(made()))):
        assert twin == made() and twin.shape == (2, 3)
    assert made().sums.flags.writeable
    with pytest.raises(AttributeError, match="'Health' object has no attribute 'entropyy'"):
        _ = made().entropyy


# ---------------------------------------------------------------- extremes


@pytest.mark.parametrize("length", [3, 30])
def test_scores_whose_squares_overflow(length):
    q, k, v = inputs(heads=2, length=length, size=40, d=8)
    ours = health(1e15 * q, 1e15 * k, v)
    assert (ours.score_var > 1e58).all()


@pytest.mark.parametrize("length", [3, 30])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_a_nan_where_a_bias_hides_from_the_statistics(name, length):
    """The output is NaN, as arithmetic has it; the statistics are those of the other keys."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    q, k, v = inputs(heads=2, length=length, size=40, d=8)
    k[:, 7] = np.nan
    mask = np.zeros((length, 40), dtype)
    mask[:, 7] = ml_dtypes.finfo(dtype).min
    ours = health(q, k, v, mask=mask)
    assert (ours.nonfinite_rows == 0).all() and np.isfinite(ours.entropy).all()
    assert np.isnan(lh.attention(q, k, v, mask=mask)).all()
    k[:, 8] = np.inf  # at a key that counts
    assert (health(q, k, v, mask=mask).nonfinite_rows == length).all()


@pytest.mark.parametrize("sinks", [None, np.array([0.0, -3e4])], ids=["plain", "sinks"])
@pytest.mark.parametrize("length", [3, 30])
def test_pairs_that_a_bias_hides_have_no_part_in_any_statistic(length, sinks):
    """Not even where all the others lie as low, so that they have weight in the output."""
    q, k, v = inputs(heads=2, length=length, size=40, d=8)
    mask = np.full((length, 40), -32_700, np.float16)
    mask[:, ::3] = -32_752  # half of the lowest: hidden
    mask[:, 1] = -np.inf
    health(q, k, v, mask=mask, sinks=sinks)
    weights = lh.attention(q, 30 * k, v, mask=mask, return_weights=True).weights
    assert (weights[..., ::3] > 0).any()


@pytest.mark.parametrize("length", [3, 30])
def test_biases_near_the_lowest_number_with_a_sink(length):
    q, k, v = inputs(heads=2, length=length, size=1300, d=8, dtype=np.float64)
    mask = np.full((length, 1300), -7e307)
    mask[:, ::2] = -8.9e307
    ours = health(q, k, v, mask=mask, sinks=[0.0, 1.0])
    assert np.isfinite(ours.entropy).all() and (ours.null_mass == 1).all()
