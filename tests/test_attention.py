"""The engine against the specification: options, dtypes, shapes, layouts, masks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    BFLOAT16,
    DTYPES,
    EVERYTHING,
    LAYOUTS,
    OPTION_NAMES,
    PAIRS,
    TOGETHER,
    assert_close,
    check,
    inputs,
    normal,
    options,
    random_options,
    same_bits,
)

import levelhead as lh

PATHS = {"decode": 5, "prefill": 21}  # by the number of queries
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 97, 113, 203, 1023, 1025)
DIMENSIONS = (1, 3, 8, 40, 59, 64, 80, 111, 128)


def call(path, dtype=np.float32, **changes):
    shape = {"heads": 4, "kv_heads": 2, "length": PATHS[path], "size": 23, "d": 16, "dv": 12}
    return inputs(3, dtype=dtype, **(shape | changes))


def options_of(q, k):
    return options(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_each_option_alone(name, path):
    q, k, v = call(path)
    result = check(q, k, v, **options_of(q, k)[name])
    change = np.abs(result.output - lh.attention(q, k, v)).max()
    assert change > 1e-2, "the option changed nothing, so the comparison would prove nothing"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_each_option_in_every_dtype(name, dtype, path):
    q, k, v = call(path, dtype)
    check(q, k, v, **options_of(q, k)[name])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_options_in_pairs(pair, path):
    q, k, v = call(path)
    first, second = (options_of(q, k)[name] for name in pair)
    check(q, k, v, **(first | second))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_options_at_once(dtype, path):
    q, k, v = call(path, dtype, size=700)
    chosen = {}
    for name in (*TOGETHER, "hiding mask"):
        chosen |= options_of(q, k)[name]
    check(q, k, v, **(chosen | {"window": (300, 5), "query_offset": [400, 680, -3]}))


@pytest.mark.parametrize("path", PATHS)
def test_restrictions_combine_as_their_intersection(path):
    q, k, v = call(path)
    given_options = [options_of(q, k)[name] for name in ("causal", "bool mask", "key lengths")]
    seen = [lh.attention(q, k, v, return_weights=True, **o).weights > 0 for o in given_options]
    together = given_options[0] | given_options[1] | given_options[2]
    weights = lh.attention(q, k, v, return_weights=True, **together).weights
    np.testing.assert_array_equal(weights > 0, seen[0] & seen[1] & seen[2])


def test_the_same_seed_drops_the_same_weights():
    q, k, v = call("prefill")
    a, b = (lh.attention(q, k, v, dropout=0.5, seed=5) for _ in range(2))
    assert same_bits(a, b)
    assert not np.allclose(a, lh.attention(q, k, v, dropout=0.5, seed=6))
    # Without a seed every call draws its own.
    c, d = (lh.attention(q, k, v, dropout=0.5) for _ in range(2))
    assert not np.allclose(c, d)


@pytest.mark.parametrize("path", PATHS)
def test_an_int_window_is_the_last_keys(path):
    q, k, v = call(path)
    assert same_bits(lh.attention(q, k, v, window=4), lh.attention(q, k, v, window=(3, 0)))
    assert same_bits(lh.attention(q, k, v, window=(None, None)), lh.attention(q, k, v))
    assert same_bits(
        lh.attention(q, k, v, window=(10**30, 2)), lh.attention(q, k, v, window=(None, 2))
    )


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_that_straddle_tiles(length):
    for i, size in enumerate(LENGTHS):
        d = DIMENSIONS[(i + length) % len(DIMENSIONS)]
        dv = DIMENSIONS[(2 * i + length) % len(DIMENSIONS)]
        if length * size > 300_000:
            d, dv = 40, 59
        q, k, v = inputs(heads=1, length=length, size=size, d=d, dv=dv)
        check(q, k, v, causal=i % 2 == 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", DIMENSIONS)
def test_dimensions_that_straddle_vectors(d, dtype):
    for path, dv in itertools.product(PATHS, (1, 17, 64)):
        check(*call(path, dtype, d=d, dv=dv, size=41))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 4, 8, 9, 40])
@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 2), (6, 1), (1, 1), (16, 1)], ids=str)
def test_grouped_heads(heads, length, dtype):
    q, k, v = inputs(2, heads=heads[0], kv_heads=heads[1], length=length, size=37, dtype=dtype)
    grouped = check(q, k, v, causal=True).output
    group = heads[0] // heads[1]
    repeated = lh.attention(q, k.repeat(group, 1), v.repeat(group, 1), causal=True)
    assert same_bits(grouped, repeated), "sharing keys must change no bit"


@pytest.mark.parametrize("path", PATHS)
def test_from_two_to_six_dimensions(path):
    q, k, v = call(path)
    whole = check(q, k, v, causal=True)
    length = PATHS[path]
    one_head = check(q[1, 2], k[1, 1], v[1, 1], causal=True)
    heads = check(q[1], k[1], v[1], causal=True)
    assert one_head.output.shape == (length, 12) and one_head.lse.shape == (length,)
    assert one_head.weights.shape == (length, 23) and one_head.health.shape == (1,)
    assert heads.lse.shape == (4, length) and heads.health.shape == (4,)
    assert same_bits(one_head.output, whole.output[1, 2])
    assert same_bits(heads.output, whole.output[1])
    for lead in ((3, 1), (1, 3), (1, 3, 1)):
        more = check(*(x.reshape(*lead, *x.shape[1:]) for x in (q, k, v)), causal=True)
        assert more.output.shape == (*lead, 4, length, 12)
        assert more.health.shape == (*lead, 4) and same_bits(
            more.output.reshape(whole.output.shape), whole.output
        )


@pytest.mark.parametrize("path", PATHS)
def test_batch_dimensions_that_do_not_collapse(path):
    q, k, v = inputs(3, 2, length=PATHS[path], size=9)
    swapped = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v)]
    mask = normal(3, 2, 1, 1, 9) > 0
    check(*swapped, mask=mask, key_lengths=[[9, 8], [7, 6], [5, 4]], query_offset=np.arange(6))


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [{}, {"kv_heads": 4, "size": 1300, "dv": 16}], ids=["short", "long"]
)
def test_memory_layouts_change_no_bit(shape, layout, dtype, path):
    q, k, v = call(path, dtype, **shape)
    place = LAYOUTS[layout]
    moved = [place(x) for x in (q, k, v)]
    if layout == "misaligned":
        assert not any(x.flags.aligned for x in moved)
    elif layout not in ("contiguous", "heads last"):
        assert not any(x.flags.c_contiguous for x in moved)
    before = [x.copy() for x in moved]
    a, b = lh.attention(q, k, v, causal=True), lh.attention(*moved, causal=True)
    assert same_bits(a, b)
    assert all(same_bits(x, y) for x, y in zip(moved, before, strict=True)), "an input was written"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16], ids=str)
@pytest.mark.parametrize("d", [16, 20])
def test_16_bit_floats_are_widened_and_nothing_else(d, dtype, path):
    q, k, v = call(path, dtype, kv_heads=4, size=1300, d=d, dv=d)
    k[..., -70:, :], v[..., -70:, :] = np.inf, np.nan
    lengths = [1230, 1100, 1]
    wide = [x.astype(np.float32) for x in (q, k, v)]
    got = lh.attention(q, k, v, key_lengths=lengths, return_lse=True, return_health=True)
    want = lh.attention(*wide, key_lengths=lengths, return_lse=True, return_health=True)
    assert np.isfinite(got.lse).all()
    assert same_bits(got.output, want.output.astype(dtype))
    assert same_bits(got.lse, want.lse)
    assert got.health.to_dict() == want.health.to_dict()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("axis", range(4))
def test_broadcast_inputs(axis, path):
    q, k, v = call(path, kv_heads=4, dv=16)
    flat = [np.broadcast_to(x.take([0], axis), x.shape) for x in (q, k, v)]
    assert all(x.strides[axis] == 0 for x in flat)
    check(*flat, causal=True)


def test_read_only_inputs():
    arrays = call("prefill")
    for x in arrays:
        x.flags.writeable = False
    check(*arrays, mask=np.broadcast_to(True, (23,)))


# ---------------------------------------------------------------- masks


MASK_SHAPES = [
    shape for shape in itertools.product((1, 3), (1, 4), (1, None), (1, 23)) if None in shape
] + [(), (23,), (1,), (None, 23), (None, 1), (4, 1, 23), (1, 1, 1, 1), (3, 4, 1, 23)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.dtype(bool), *DTYPES], ids=str)
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_every_broadcast_shape(shape, dtype, path):
    q, k, v = call(path)
    shape = tuple(PATHS[path] if n is None else n for n in shape)
    draw = np.random.default_rng(3).standard_normal(shape)
    check(q, k, v, mask=np.asarray(draw > -0.5 if dtype.kind == "b" else draw.astype(dtype)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.dtype(bool), *DTYPES], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_layouts(layout, dtype, path):
    q, k, v = call(path)
    draw = np.random.default_rng(3).standard_normal((3, 4, PATHS[path], 23))
    mask = draw > 0 if dtype.kind == "b" else draw.astype(dtype)
    moved = LAYOUTS[layout](mask)
    np.testing.assert_array_equal(mask, moved)
    assert same_bits(lh.attention(q, k, v, mask=mask), lh.attention(q, k, v, mask=moved))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
def test_a_mask_of_another_dtype(mask_dtype, dtype):
    q, k, v = call("prefill", dtype)
    check(q, k, v, mask=normal(21, 23, dtype=mask_dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lowest_bias_is_arithmetic(dtype, path):
    q, k, v = call(path)
    lowest = float.fromhex("-0x1.FEp127") if dtype == BFLOAT16 else float(np.finfo(dtype).min)
    mask = np.zeros((PATHS[path], 23))
    mask[:, 5:] = lowest
    mask[2] = lowest  # nothing but the lowest: uniform
    mask = mask.astype(dtype)
    got, want = (f(q, k, v, mask=mask, **EVERYTHING) for f in (lh.attention, lh.reference))
    # What is left of a score beside a bias: nothing of it, or in float16 a part of its digits.
    lost = np.finfo(np.float32).eps * 65504 if dtype == np.float16 else 0.0
    assert_close(got.output, want.output, 1e-5 + lost)
    if not lost:
        np.testing.assert_allclose(got.output[:, :, 2], uniform(v), atol=1e-5)
    np.testing.assert_array_equal(got.health.pairs, want.health.pairs)
    assert (got.health.empty_rows == 1).all()


def uniform(v):
    return np.repeat(v.mean(axis=-2), 2, axis=1)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_types(dtype):
    q, k, v = call("prefill", dtype)
    output = lh.attention(q, k, v)
    assert type(output) is np.ndarray and output.dtype == dtype and output.flags.c_contiguous
    for asked in ({"return_lse"}, {"return_health"}, {"return_weights"}, set(EVERYTHING)):
        result = lh.attention(q, k, v, **dict.fromkeys(asked, True))
        assert type(result) is lh.AttentionResult and same_bits(result.output, output)
        for name in ("lse", "health", "weights"):
            assert (getattr(result, name) is not None) == (f"return_{name}" in asked)
    assert result.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert result.weights.dtype == dtype and type(result.health) is lh.Health
    assert type(lh.attention(q, k, v, return_lse=np.True_)) is lh.AttentionResult
    assert type(lh.attention(q, k, v, return_lse=False)) is np.ndarray


def test_weights_are_before_dropout_and_sum_to_one():
    q, k, v = call("prefill")
    weights = lh.attention(q, k, v, dropout=0.5, seed=1, return_weights=True).weights
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-5)


# ---------------------------------------------------------------- anything at all


@st.composite
def calls(draw):
    """A random call: shapes, dtype, layouts and options."""
    lead = draw(st.lists(st.integers(0, 3), max_size=2))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, size = draw(st.integers(0, 60)), draw(st.integers(0, 150))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**16))
    arrays = inputs(
        *lead,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        length=length,
        size=size,
        d=draw(st.integers(1, 70)),
        dv=draw(st.integers(1, 70)),
        dtype=dtype,
        seed=seed,
    )
    arrays = [LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x) for x in arrays]
    if draw(st.integers(0, 4)) == 0:
        axis = draw(st.integers(-3, -1))
        arrays = [np.broadcast_to(x[..., :1], x.shape) if axis == -1 else x for x in arrays]
    batch, heads = int(np.prod(lead)), kv_heads * group
    random = np.random.default_rng(seed)
    optional = random_options(batch, heads, size, random)
    chosen = draw(st.fixed_dictionaries({}, optional=optional))
    kind = draw(st.sampled_from(["none", "bool", "hiding", "bias"]))
    if kind != "none":
        full = (*lead, heads, length, size)
        shape = [1 if draw(st.booleans()) else n for n in full][draw(st.integers(0, len(full))) :]
        values = random.standard_normal(shape)
        mask = {
            "bool": lambda: values > -0.3,
            "bias": lambda: values.astype(draw(st.sampled_from(DTYPES))),
            "hiding": lambda: np.where(values > 0, values, -np.inf),
        }[kind]()
        mask = np.asarray(mask)
        chosen["mask"] = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](mask) if shape else mask
    return arrays, chosen | {"seed": seed}


@settings(max_examples=250, deadline=None, derandomize=True)
@given(calls())
def test_anything(drawn):
    (q, k, v), chosen = drawn
    threads = chosen.pop("threads", None)
    result = check(q, k, v, **chosen)
    assert same_bits(result.output, lh.attention(q, k, v, threads=threads, **chosen))


# ---------------------------------------------------------------- extremes


@pytest.mark.parametrize("length", [3, 30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cap", [1e20, 2e38, 1e39, 1e300, 1.7e308])
def test_a_softcap_far_above_the_scores_is_none(cap, dtype, length):
    q, k, v = inputs(heads=2, length=length, size=40, d=8, dtype=dtype)
    got = lh.attention(q, k, v, softcap=cap, return_lse=True)
    want = lh.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(got.output, want.output, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        lh.attention_backward(q, q, k, v, got.output, got.lse, softcap=cap)[:3],
        lh.attention_backward(q, q, k, v, got.output, got.lse)[:3],
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [3, 30])
@pytest.mark.parametrize(
    ("dtype", "scale", "queries", "keys"),
    [
        (np.float32, 1e30, 1e9, 1e-38),
        (np.float32, -1e30, 1e9, 1e-38),
        (np.float32, 1e38, 1e3, 1e-37),
        (np.float32, 1e30, 1.0, 0.0),
        (np.float32, 1e300, 1.0, 0.0),
        (np.float32, [1e30, 1.0], 1e9, 1e-38),
        (np.float64, 1e300, 1e10, 1e-308),
    ],
)
def test_a_scale_that_would_overflow_the_queries(dtype, scale, queries, keys, length):
    q, k, v = inputs(heads=2, length=length, size=40, d=8, dtype=np.float64)
    q, k, v = (queries * q).astype(dtype), (keys * k).astype(dtype), v.astype(dtype)
    got = lh.attention(q, k, v, scale=scale, **EVERYTHING)
    want = lh.reference(q, k, v, scale=scale, **EVERYTHING)
    np.testing.assert_allclose(got.output, want.output, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got.health.score_max, want.health.score_max, rtol=1e-3, atol=1e-9)
