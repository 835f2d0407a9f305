"""The cases that others leave open: nothing to see, NaN in and out of sight, empty arrays, bits."""

import numpy as np
import pytest
from support import DTYPES, EVERYTHING, inputs, normal, same_bits

import levelhead as lh

LENGTHS = {"decode": 5, "prefill": 30}  # paths, by the number of queries
SIZE = 40
POISONS = [np.nan, np.inf, -np.inf, 1000.0]


def call(path, dtype=np.float32, batch=2, **changes):
    shape = {"heads": 4, "kv_heads": 2, "length": LENGTHS[path], "size": SIZE, "d": 24, "dv": 20}
    return inputs(batch, dtype=dtype, **(shape | changes))


def same_results(a, b):
    """Output, lse, weights and health, bit for bit."""
    assert all(same_bits(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    assert same_bits(a.health.sums, b.health.sums)


# ---------------------------------------------------------------- a row that sees nothing


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_sees_nothing(dtype, path):
    q, k, v = call(path, dtype)
    mask = np.ones((LENGTHS[path], SIZE), bool)
    mask[3] = False
    r = lh.attention(q, k, v, mask=mask, **EVERYTHING)
    assert (r.output[:, :, 3] == 0).all() and not np.signbit(r.output[:, :, 3]).any()
    assert (r.lse[:, :, 3] == -np.inf).all() and (r.weights[:, :, 3] == 0).all()
    assert (r.health.empty_rows == 1).all() and (r.health.nonfinite_rows == 0).all()
    others = np.arange(LENGTHS[path]) != 3
    plain = lh.attention(q, k, v, return_lse=True)
    assert same_bits(r.output[:, :, others], plain.output[:, :, others])
    assert same_bits(r.lse[:, :, others], plain.lse[:, :, others])


@pytest.mark.parametrize("path", LENGTHS)
def test_every_way_to_see_nothing(path):
    q, k, v = call(path)
    q[:] = np.nan  # nor does it matter what the query holds
    for hiding in (
        {"key_lengths": [0, 0]},
        {"causal": True, "query_offset": -100},
        {"window": 3, "query_offset": 10_000},
        {"mask": np.zeros((1, 1), bool)},
        {"mask": np.full((1, SIZE), -np.inf)},
    ):
        r = lh.attention(q, k, v, **EVERYTHING, **hiding)
        assert (r.output == 0).all() and (r.lse == -np.inf).all() and (r.weights == 0).all()
        assert (r.health.empty_rows == LENGTHS[path]).all() and (r.health.pairs == 0).all()
        assert (r.health.nonfinite_rows == 0).all() and np.isnan(r.health.entropy).all()
        assert np.isnan(r.health.score_max).all()


@pytest.mark.parametrize("path", LENGTHS)
def test_a_row_that_sees_only_the_sink(path):
    q, k, v = call(path)
    r = lh.attention(q, k, v, key_lengths=[0, 0], sinks=[0.5, -1, 0, 2], **EVERYTHING)
    assert (r.output == 0).all() and (r.weights == 0).all()
    np.testing.assert_allclose(r.lse[0, :, 0], [0.5, -1, 0, 2], rtol=1e-6)
    assert (r.health.empty_rows == LENGTHS[path]).all()


# ---------------------------------------------------------------- poison out of sight


def hiding_options(length):
    """Options, and the keys (per batch entry) that they hide from all of `length` queries."""
    keys = np.arange(SIZE)
    tail = keys >= SIZE - 9
    scattered = keys % 3 == 1
    bias = normal(length, SIZE)
    return {
        "causal": ({"causal": True, "query_offset": SIZE - 9 - length}, [tail, tail]),
        "window": (
            {"window": (2, None), "query_offset": 12},
            [keys < 10, keys < 10],
        ),
        "lengths": ({"key_lengths": [SIZE - 9, SIZE - 20]}, [tail, keys >= SIZE - 20]),
        "bool mask": ({"mask": ~scattered}, [scattered, scattered]),
        "float mask": ({"mask": np.where(scattered, -np.inf, bias)}, [scattered, scattered]),
        "softcap": ({"mask": ~scattered, "softcap": 2.0}, [scattered, scattered]),
        "dropout": (
            {"mask": ~scattered, "dropout": 0.3, "seed": 1, "sinks": [0.0] * 4},
            [scattered, scattered],
        ),
    }


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("name", hiding_options(1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_that_nobody_sees_has_no_effect(dtype, name, path):
    q, k, v = call(path, dtype)
    options, hidden = hiding_options(LENGTHS[path])[name]
    clean = lh.attention(q, k, v, **EVERYTHING, **options)
    assert np.isfinite(clean.output.astype(np.float64)).all()
    for poison in POISONS:
        bad_k, bad_v = k.copy(), v.copy()
        for b in range(2):
            bad_k[b, :, hidden[b]] = poison
            bad_v[b, :, hidden[b]] = -poison
        same_results(lh.attention(q, bad_k, bad_v, **EVERYTHING, **options), clean)
        if np.isnan(poison):  # the same poison in sight is loud
            assert np.isnan(lh.attention(q, bad_k, bad_v).astype(np.float64)).any()


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("kind", ["causal", "window", "bool mask", "float mask", "all"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_poison_that_only_some_rows_see(dtype, kind, path):
    """The rows that do not see it keep their bits; those that do are NaN."""
    q, k, v = call(path, dtype)
    length, at = LENGTHS[path], SIZE - 4
    draw = np.random.default_rng(0).random((length, SIZE))
    options = {
        "causal": {"causal": True},
        "window": {"window": (1, 1)},
        "bool mask": {"mask": draw > 0.5},
        "float mask": {"mask": np.where(draw > 0.5, draw, -np.inf)},
        "all": {"mask": draw > 0.3, "causal": True, "window": 30, "sinks": [0.0] * 4},
    }[kind]
    clean = lh.attention(q, k, v, **EVERYTHING, **options)
    sees = clean.weights[0, 0, :, at] > 0
    assert sees.any() and not sees.all()
    for poison, where in [(np.nan, "key"), (np.inf, "key"), (np.nan, "value"), (np.inf, "value")]:
        bad = {"key": k.copy(), "value": v.copy()}
        bad[where][:, :, at] = poison
        r = lh.attention(q, **bad, **EVERYTHING, **options)
        assert same_bits(r.output[:, :, ~sees], clean.output[:, :, ~sees])
        assert same_bits(r.lse[:, :, ~sees], clean.lse[:, :, ~sees])
        if np.isnan(poison):
            assert np.isnan(r.output[:, :, sees]).all()
        else:
            assert not np.isfinite(r.output[:, :, sees]).all(axis=-1).any()
        if where == "key" and np.isnan(poison):
            assert np.isnan(r.lse[:, :, sees]).all()
            assert (r.health.nonfinite_rows == sees.sum()).all()
        hidden = clean.weights == 0
        assert (r.weights[hidden] == 0).all()


@pytest.mark.parametrize("path", LENGTHS)
def test_nonfinite_scores_against_the_reference(path):
    for poison in (np.nan, np.inf, -np.inf):
        for where in ("query", "key"):
            q, k, v = call(path)
            {"query": q, "key": k}[where][0, 1, 3, 2] = poison
            options = {"causal": True, "query_offset": 4}
            with np.errstate(all="ignore"):
                want = lh.reference(q, k, v, **EVERYTHING, **options)
            got = lh.attention(q, k, v, **EVERYTHING, **options)
            np.testing.assert_array_equal(np.isnan(got.output), np.isnan(want.output))
            np.testing.assert_array_equal(np.isnan(got.lse), np.isnan(want.lse))
            np.testing.assert_array_equal(got.health.nonfinite_rows, want.health.nonfinite_rows)
            assert got.health.nonfinite_rows.sum() > 0
            np.testing.assert_allclose(got.health.entropy, want.health.entropy, rtol=1e-5)
            np.testing.assert_allclose(got.health.score_max, want.health.score_max, rtol=1e-5)


@pytest.mark.parametrize("path", LENGTHS)
def test_one_nan_value_stays_in_its_column(path):
    q, k, v = call(path)
    v[:, :, 7, 5] = np.nan
    nan = np.isnan(lh.attention(q, k, v))
    assert nan[..., 5].all() and not nan[..., np.arange(20) != 5].any()


@pytest.mark.parametrize("path", LENGTHS)
def test_nan_is_not_swallowed_wherever_it_stands(path):
    """In the first, the last and a middle key, alone and as the only key; decode splits too."""
    for size in (1, 9, 1100):
        for at in {0, size // 2, size - 1}:
            q, k, v = call(path, size=size)
            k[0, 0, at, 0] = np.nan
            r = lh.attention(q, k, v, **EVERYTHING)
            bad = np.isnan(r.output).all(axis=(-2, -1))
            assert bad.tolist() == [[True, True, False, False], [False] * 4]
            assert (r.health.nonfinite_rows == bad * LENGTHS[path]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("path", LENGTHS)
def test_a_bad_sink_spoils_its_head(path, bad):
    q, k, v = call(path)
    r = lh.attention(q, k, v, sinks=[0, bad, 0, 0], **EVERYTHING)
    assert np.isnan(r.output[:, 1]).all() and not np.isnan(r.output[:, [0, 2, 3]]).any()
    assert (r.health.nonfinite_rows == np.array([0, LENGTHS[path], 0, 0])).all()


@pytest.mark.parametrize("path", LENGTHS)
def test_a_sink_of_minus_infinity_is_no_sink(path):
    q, k, v = call(path)
    r = lh.attention(q, k, v, sinks=[-np.inf] * 4, return_lse=True)
    plain = lh.attention(q, k, v, return_lse=True)
    assert same_bits(r.output, plain.output) and same_bits(r.lse, plain.lse)


# ---------------------------------------------------------------- empty arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"size": 0},
        {"size": 0, "length": 1},
        {"length": 0},
        {"length": 0, "size": 0},
        {"batch": 0},
        {"dv": 0},
        {"dv": 0, "length": 2},
        {"heads": 0, "kv_heads": 0},
    ],
    ids=str,
)
def test_empty_dimensions(shape, dtype):
    q, k, v = call("prefill", dtype, **shape)
    batch, heads, length, size = (*q.shape[:3], k.shape[2])
    r = lh.attention(q, k, v, **EVERYTHING)
    assert r.output.shape == (batch, heads, length, v.shape[3]) and (r.output == 0).all()
    assert r.lse.shape == (batch, heads, length)
    assert r.weights.shape == (batch, heads, length, size)
    assert r.health.shape == (batch, heads)
    assert (r.lse == -np.inf).all() == (size == 0 or r.lse.size == 0)
    assert (r.health.rows == length).all()
    assert (r.health.empty_rows == (length if size == 0 else 0)).all()
    assert same_bits(lh.attention(q, k, v, causal=True, threads=2), r.output * 1)
    if heads:
        want = lh.reference(q, k, v, **EVERYTHING)
        assert [x.shape for x in r[:3]] == [x.shape for x in want[:3]]


def test_options_of_an_empty_batch():
    q, k, v = call("decode", batch=0)
    r = lh.attention(q, k, v, key_lengths=[], query_offset=[], return_health=True)
    assert r.output.shape == (0, 4, 5, 20) and r.health.over_batch().rows.tolist() == [0] * 4


def test_a_single_key_returns_its_value_unchanged():
    for path, length in LENGTHS.items():
        for dtype in DTYPES:
            q, k, v = call(path, dtype, size=1)
            expected = np.broadcast_to(v.repeat(2, axis=1), (2, 4, length, 20))
            np.testing.assert_array_equal(lh.attention(30 * q, k, v), expected)


# ---------------------------------------------------------------- the same bits


SHAPES = {
    "decode": {"length": 3, "size": 700},
    "decode long": {"length": 1, "size": 2100, "heads": 8},
    "prefill": {"length": 61, "size": 130},
    "prefill wide": {"length": 150, "size": 300, "d": 80, "dv": 72},
}
VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 50, "sinks": [0.3, 0.1, 2.0, -1.0]},
    "mask": {"mask": normal(1, 1, 1, 4096) > 0, "softcap": 3.0},
}


def shaped(shape, variant, batch=3, dtype=np.float32):
    q, k, v = inputs(batch, **({"heads": 4, "kv_heads": 2, "d": 32} | shape), dtype=dtype)
    options = dict(VARIANTS[variant])
    if "mask" in options:
        options["mask"] = options["mask"][..., : k.shape[2]]
    if "sinks" in options:
        options["sinks"] = np.resize(options["sinks"], q.shape[1])
    return q, k, v, options


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_change_no_bit(shape, variant):
    q, k, v, options = shaped(SHAPES[shape], variant)
    results = [lh.attention(q, k, v, threads=n, **EVERYTHING, **options) for n in (1, 2, 3, 8)]
    for other in results[1:]:
        same_results(results[0], other)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_position_change_no_bit(dtype, shape, variant):
    q, k, v, options = shaped(SHAPES[shape], variant, dtype=dtype)
    whole = lh.attention(q, k, v, **EVERYTHING, **options)
    alone = [
        lh.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], **EVERYTHING, **options)
        for b in range(3)
    ]
    turned = lh.attention(q[::-1], k[::-1], v[::-1], **EVERYTHING, **options)
    for b in range(3):
        for i in range(3):
            assert same_bits(whole[i][b], alone[b][i][0])
            assert same_bits(whole[i][b], turned[i][2 - b])
        assert whole.health[b] == alone[b].health[0] == turned.health[2 - b]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_health_changes_no_bit(dtype, shape, variant):
    q, k, v, options = shaped(SHAPES[shape], variant, dtype=dtype)
    on = lh.attention(q, k, v, return_health=True, return_lse=True, **options)
    off = lh.attention(q, k, v, return_lse=True, **options)
    assert same_bits(on.output, off.output) and same_bits(on.lse, off.lse)
    assert same_bits(on.output, lh.attention(q, k, v, **options))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_neighbours_change_no_bit(shape, variant):
    """A row's bits do not depend on the other rows, however large or broken those are."""
    q, k, v, options = shaped(SHAPES[shape], variant)
    length = q.shape[2]
    kept = length // 2
    before = lh.attention(q, k, v, **EVERYTHING, **options)
    for other in (50.0, np.nan, np.inf, 0.0):
        changed = q.copy()
        changed[:, :, np.arange(length) != kept] = other
        changed[:, 1:] = other if length == 1 else changed[:, 1:]
        after = lh.attention(changed, k, v, **EVERYTHING, **options)
        for i in range(3):
            assert same_bits(before[i][:, 0, kept], after[i][:, 0, kept])


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_change_no_bit(shape):
    q, k, v, _ = shaped(SHAPES[shape], "plain")
    whole = lh.attention(q, k, v, causal=True)
    group = q.shape[1] // 2
    for h in range(2):
        rows = slice(h * group, (h + 1) * group)
        part = lh.attention(q[:, rows], k[:, h : h + 1], v[:, h : h + 1], causal=True)
        assert same_bits(part, whole[:, rows])
