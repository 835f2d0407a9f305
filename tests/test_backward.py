"""attention_backward against the dense formulas, and its own semantics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    DTYPES,
    LAYOUTS,
    OPTION_NAMES,
    PAIRS,
    TOGETHER,
    inputs,
    normal,
    options,
    random_options,
    same_bits,
    score_error,
    storage_epsilon,
)

import levelhead as lh

LENGTHS = {"few": 5, "many": 37}


def call(length=37, size=45, dtype=np.float64, **changes):
    shape = {"heads": 4, "kv_heads": 2, "d": 16, "dv": 12} | changes
    return inputs(2, length=length, size=size, dtype=dtype, **shape)


def gradient_of(q, v):
    return normal(*q.shape[:-1], v.shape[-1], dtype=q.dtype, seed=9)


def backward(q, k, v, g=None, **opts):
    """Forward, then backward with what it returned."""
    g = gradient_of(q, v) if g is None else g
    only_forward = {name: value for name, value in opts.items() if name != "return_health"}
    r = lh.attention(q, k, v, return_lse=True, **only_forward)
    return lh.attention_backward(g, q, k, v, r.output, r.lse, **opts)


def check(q, k, v, **opts):
    """dq, dk and dv against the reference's, relative to the largest of each."""
    g = gradient_of(q, v)
    got = backward(q, k, v, g, **opts)
    want = lh.reference_backward(g, q, k, v, **opts)
    assert type(got) is lh.AttentionGradients and got.health is None
    # Errors of a weight are twice those of a score; the row sums add √n of them. The output that
    # comes in was rounded to its dtype, and so is what goes out.
    error = 64 * score_error(q, k, opts.get("scale")) + 2 * storage_epsilon(q.dtype)
    if q.dtype == np.float64:
        error = 1e-10
    for name, ours, theirs, like in zip(
        ("dq", "dk", "dv"), got[:3], want[:3], (q, k, v), strict=True
    ):
        assert ours.shape == like.shape and ours.dtype == like.dtype
        size = max(1.0, np.abs(theirs).max(initial=0.0))
        np.testing.assert_allclose(
            ours.astype(np.float64), theirs, rtol=0, atol=error * size, err_msg=name
        )
    return got


# ---------------------------------------------------------------- against the specification


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_each_option_in_every_dtype(name, dtype, path):
    q, k, v = call(LENGTHS[path], dtype=dtype)
    opts = options(2, 4, LENGTHS[path], 45)[name]
    got = check(q, k, v, **opts)
    plain = backward(q, k, v)
    changes = [
        np.abs((a - b).astype(np.float64)).max() for a, b in zip(got[:3], plain, strict=False)
    ]
    assert max(changes) > 1e-2, "the option changed nothing"


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_options_in_pairs(pair):
    q, k, v = call()
    first, second = (options(2, 4, 37, 45)[name] for name in pair)
    check(q, k, v, **(first | second))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_options_at_once(dtype):
    q, k, v = call(60, 300, dtype)
    chosen = {}
    for name in (*TOGETHER, "hiding mask"):
        chosen |= options(2, 4, 60, 300)[name]
    check(q, k, v, **(chosen | {"window": (150, 5), "query_offset": [230, 40]}))


SIZES = (1, 2, 3, 7, 8, 9, 16, 17, 23, 25, 97, 203)
DIMENSIONS = (1, 3, 8, 40, 59, 64, 80, 111, 128)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [*SIZES, 1025])
def test_lengths_that_straddle_tiles(length, dtype):
    for i, size in enumerate(SIZES):
        d, dv = DIMENSIONS[(i + length) % 9], DIMENSIONS[(2 * i + length) % 9]
        q, k, v = inputs(heads=1, length=length, size=size, d=d, dv=dv, dtype=dtype)
        check(q, k, v, causal=i % 2 == 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_more_keys_than_a_block(dtype):
    for size in (257, 1023, 1025):
        check(*inputs(heads=2, kv_heads=1, length=40, size=size, d=40, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 2), (6, 1), (1, 1)], ids=str)
def test_grouped_heads(heads, dtype):
    q, k, v = call(heads=heads[0], kv_heads=heads[1], dtype=dtype)
    check(q, k, v, causal=True)


def test_from_two_to_five_dimensions():
    q, k, v = call()
    whole = backward(q, k, v, causal=True)
    g = gradient_of(q, v)
    check(q[1, 2], k[1, 1], v[1, 1], causal=True)
    heads = backward(q[1], k[1], v[1], g[1], causal=True)
    five = backward(*(x.reshape(1, 2, *x.shape[1:]) for x in (q, k, v, g)), causal=True)
    for i in range(3):
        assert same_bits(heads[i], whole[i][1])
        assert same_bits(five[i][0], whole[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts_change_no_bit(layout, dtype):
    q, k, v = call(dtype=dtype)
    g = gradient_of(q, v)
    r = lh.attention(q, k, v, return_lse=True)
    a = lh.attention_backward(g, q, k, v, r.output, r.lse)
    moved = [LAYOUTS[layout](x) for x in (g, q, k, v, r.output)]
    b = lh.attention_backward(*moved, r.lse)
    assert all(same_bits(x, y) for x, y in zip(a[:3], b[:3], strict=True))


def test_a_sum_of_outputs_broadcasts_its_gradient():
    q, k, v = call()
    ones = np.broadcast_to(np.float64(1), (2, 4, 37, 12))  # every stride 0
    a, b = backward(q, k, v, ones), backward(q, k, v, np.ones((2, 4, 37, 12)))
    assert all(same_bits(x, y) for x, y in zip(a[:3], b[:3], strict=True))


def test_central_differences():
    """The chain as a whole, forward kernel against backward kernel."""
    q, k, v = call(9, 11)
    opts = {
        "causal": True,
        "softcap": 2.0,
        "sinks": [0.1, 0.2, 0.3, 0.4],
        "dropout": 0.2,
        "seed": 3,
    }
    g = gradient_of(q, v)
    gradients = backward(q, k, v, g, **opts)
    for i in range(3):
        direction = normal(*(q, k, v)[i].shape, dtype=np.float64, seed=20 + i)
        moved = []
        for step in (1e-5, -1e-5):
            arrays = [q, k, v]
            arrays[i] = arrays[i] + step * direction
            moved.append((lh.attention(*arrays, **opts) * g).sum())
        slope = (moved[0] - moved[1]) / 2e-5
        np.testing.assert_allclose((gradients[i] * direction).sum(), slope, rtol=1e-7)


# ---------------------------------------------------------------- semantics


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing_give_zero(dtype):
    q, k, v = call(dtype=dtype)
    mask = np.ones((37, 45), bool)
    mask[3] = False
    mask[:, 7] = False
    got = check(q, k, v, mask=mask)
    assert (got.dq[:, :, 3] == 0).all()
    assert (got.dk[:, :, 7] == 0).all() and (got.dv[:, :, 7] == 0).all()
    g = gradient_of(q, v)
    broken = g.copy()
    broken[:, :, 3] = np.nan  # what comes in there does not matter
    again = backward(q, k, v, broken, mask=mask)
    assert all(same_bits(x, y) for x, y in zip(got[:3], again[:3], strict=True))
    nothing = backward(q, k, v, key_lengths=[0, 0])
    assert all((x == 0).all() for x in nothing[:3])


@pytest.mark.parametrize("path", LENGTHS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1000.0])
@pytest.mark.parametrize("kind", ["mask", "bias", "lengths", "causal", "window"])
def test_hidden_poison_has_no_effect(kind, poison, path):
    length, keys = LENGTHS[path], np.arange(45)
    q, k, v = call(length, dtype=np.float32)
    hidden = keys % 3 == 1 if kind in ("mask", "bias") else keys >= 40
    opts = {
        "mask": {"mask": ~hidden},
        "bias": {"mask": np.where(hidden, -np.inf, 0.25)},
        "lengths": {"key_lengths": [40, 40]},
        "causal": {"causal": True, "query_offset": 40 - length},
        "window": {"window": (None, 0), "query_offset": 40 - length},
    }[kind]
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, :, hidden], bad_v[:, :, hidden] = poison, -poison
    clean = backward(q, k, v, return_health=True, **opts)
    bad = backward(q, bad_k, bad_v, return_health=True, **opts)
    assert all(same_bits(x, y) for x, y in zip(clean[:3], bad[:3], strict=True))
    assert clean.health == bad.health
    assert all((x[:, :, hidden] == 0).all() for x in clean[1:3])


def test_poison_that_only_some_rows_see():
    q, k, v = call(dtype=np.float32)
    clean = backward(q, k, v, causal=True, query_offset=8)
    k[:, :, 40] = np.nan  # seen from row 32 on
    bad = backward(q, k, v, causal=True, query_offset=8)
    assert same_bits(bad.dq[:, :, :32], clean.dq[:, :, :32])
    assert np.isnan(bad.dq[:, :, 32:]).all()


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_visible_nan_goes_where_the_reference_says(where):
    q, k, v = call(dtype=np.float32)
    {"query": q, "key": k, "value": v}[where][0, 1, 30, 2] = np.nan
    g = gradient_of(q, v)
    got = backward(q, k, v, g, causal=True)
    want = lh.reference_backward(g, q, k, v, causal=True)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))


@pytest.mark.parametrize(
    "shape",
    [{"size": 0}, {"length": 0}, {"length": 0, "size": 0}, {"dv": 0}, {"heads": 0, "kv_heads": 0}],
    ids=str,
)
def test_empty_dimensions(shape):
    q, k, v = call(**shape)
    got = backward(q, k, v, return_health=True)
    for ours, like in zip(got[:3], (q, k, v), strict=True):
        assert ours.shape == like.shape and (ours == 0).all()
    assert got.health.shape == q.shape[:2] and (got.health.weight_grad_norm == 0).all()


def test_empty_batch():
    q, k, v = (x[:0] for x in call())
    assert [x.shape for x in backward(q, k, v)[:3]] == [q.shape, k.shape, v.shape]


VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 30, "sinks": [0.3, 0.1, 2.0, -1.0]},
    "mask": {"mask": normal(90, 300) > 0, "softcap": 3.0},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_change_no_bit(variant, dtype):
    q, k, v = call(90, 300, dtype)
    results = [
        backward(q, k, v, threads=n, return_health=True, **VARIANTS[variant]) for n in (1, 2, 3, 8)
    ]
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0][:3], other[:3], strict=True))
        assert results[0].health == other.health


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_and_position_change_no_bit(variant):
    q, k, v = inputs(3, length=90, size=300, kv_heads=2, d=16)
    g = gradient_of(q, v)
    opts = VARIANTS[variant]
    whole = backward(q, k, v, g, return_health=True, **opts)
    turned = backward(q[::-1], k[::-1], v[::-1], g[::-1], return_health=True, **opts)
    for b in range(3):
        part = slice(b, b + 1)
        alone = backward(q[part], k[part], v[part], g[part], return_health=True, **opts)
        for i in range(3):
            assert same_bits(whole[i][b], alone[i][0])
            assert same_bits(whole[i][b], turned[i][2 - b])
        assert whole.health[b] == alone.health[0] == turned.health[2 - b]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_health_changes_no_bit(dtype):
    q, k, v = call(90, 300, dtype)
    on, off = backward(q, k, v, return_health=True), backward(q, k, v)
    assert all(same_bits(a, b) for a, b in zip(on[:3], off[:3], strict=True))
    assert off.health is None and on.health.shape == (2, 4)


def test_dropout_needs_and_follows_its_seed():
    q, k, v = call()
    a, b = (check(q, k, v, dropout=0.4, seed=seed) for seed in (5, 6))
    assert not np.allclose(a.dv, b.dv)


# ---------------------------------------------------------------- anything at all


@st.composite
def calls(draw):
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    batch, size = draw(st.integers(1, 2)), draw(st.integers(0, 120))
    length, seed = draw(st.integers(0, 60)), draw(st.integers(0, 999))
    arrays = inputs(
        batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        length=length,
        size=size,
        d=draw(st.integers(1, 70)),
        dv=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=seed,
    )
    random = np.random.default_rng(seed)
    optional = random_options(batch, kv_heads * group, size, random) | {
        "mask": st.sampled_from(
            [random.random((length, size)) > 0.3, random.standard_normal((1, size))]
        )
    }
    del optional["threads"]
    chosen = draw(st.fixed_dictionaries({}, optional=optional))
    return [LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x) for x in arrays], chosen, seed


@settings(max_examples=120, deadline=None, derandomize=True)
@given(calls())
def test_anything(drawn):
    (q, k, v), chosen, seed = drawn
    check(q, k, v, **chosen, seed=seed)
