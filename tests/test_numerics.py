"""How exact: float64 as the truth, plain NumPy in the same precision as the yardstick."""

import numpy as np
import pytest
from support import DTYPES, EVERYTHING, epsilon, inputs, normal, storage_epsilon

import levelhead as lh
from levelhead import _engine

SHAPES = {
    "decode": {"length": 1, "size": 1500, "d": 64},
    "decode group": {"length": 4, "size": 600, "d": 128, "heads": 8, "kv_heads": 2},
    "prefill": {"length": 70, "size": 333, "d": 64},
    "wide": {"length": 40, "size": 128, "d": 111, "dv": 59},
}


WIDE = np.finfo(np.longdouble).nmant > 52


def precision(dtype):
    """What a plain computation on such arrays works in, and one that can judge it."""
    return (np.float64, np.longdouble) if dtype == np.float64 else (np.float32, np.float64)


def product(a, b):
    """a @ b; for the build without a fused multiply-add, term by term without one as well."""
    if lh.cpu_info()["isa"] != "portable" or a.dtype == np.longdouble:
        return a @ b
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i : i + 1] * b[..., i : i + 1, :]
    return total


def plain(q, k, v, scale, work):
    """The textbook in the precision `work`, output and lse."""
    group = q.shape[-3] // k.shape[-3]
    q, k, v = (x.astype(work) for x in (q, k, v))
    k, v = k.repeat(group, axis=-3), v.repeat(group, axis=-3)
    scores = product(q, k.swapaxes(-1, -2)) * work(scale)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    output = product(weights / total, v)
    return output, (top + np.log(total))[..., 0]


def worst(got, want):
    assert np.isfinite(got.astype(np.float64)).all()
    return float(np.abs(got.astype(want.dtype) - want).max())


@pytest.mark.parametrize("size", [1.0, 30.0], ids=["scores 1", "scores 30"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_within_twice_that_of_the_plain_computation(dtype, shape, size):
    if dtype == np.float64 and not WIDE:
        pytest.skip("long double is no wider than float64 here")
    q, k, v = inputs(2, **({"heads": 4} | SHAPES[shape]), dtype=dtype)
    scale = size / np.sqrt(q.shape[-1])
    work, exact = precision(dtype)
    output, lse = plain(q, k, v, scale, exact)
    yardstick, yardstick_lse = plain(q, k, v, scale, work)
    if exact is np.float64:  # then the truth is the specification's
        want = lh.reference(q, k, v, scale=scale, return_lse=True)
        np.testing.assert_allclose(output, want.output, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(lse, want.lse, rtol=1e-13)
    got = lh.attention(q, k, v, scale=scale, return_lse=True)
    # Where the yardstick happens to be exact, one rounding of the result is still due.
    floor = storage_epsilon(dtype) / 2 * np.abs(output).max()
    ours, theirs = worst(got.output, output), worst(yardstick.astype(dtype), output)
    assert ours <= 2 * theirs + floor, (ours, theirs)
    # Three more: of the scaled queries, of the maximum's change of base, of the sum.
    floor = 1.5 * epsilon(dtype) * np.abs(lse).max()
    ours, theirs = worst(got.lse, lse), worst(yardstick_lse, lse)
    assert ours <= 2 * theirs + floor, (ours, theirs)


@pytest.mark.parametrize("length", [4, 40])
def test_scores_of_fifty_thousand(length):
    """As training has seen them: no overflow, and the softmax picks the right key."""
    q, k, v = inputs(heads=2, length=length, size=100, d=64)
    scale = 2000.0
    got = lh.attention(q, k, v, scale=scale, **EVERYTHING)
    want = lh.reference(q, k, v, scale=scale, **EVERYTHING)
    assert got.health.score_max.max() > 50_000
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)
    np.testing.assert_allclose(got.output, want.output, atol=1e-4)
    np.testing.assert_allclose(got.health.score_max, want.health.score_max, rtol=1e-6)
    np.testing.assert_allclose(got.health.large_scores, want.health.large_scores, rtol=1e-3)


# ---------------------------------------------------------------- large scores and long sums


def steps(g, q, k, v, scale, bias, work):
    """Weights, dq, dk and dv by the textbook in the precision `work`; the size of their terms."""
    g, q, k, v, bias = (x.astype(work) for x in (g, q, k, v, bias))
    scores = product(q, k.swapaxes(-1, -2)) * work(scale) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dweights = product(g, v.swapaxes(-1, -2))
    mean = (weights * dweights).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - mean) * work(scale)
    dk, dv = product(dscores.swapaxes(-1, -2), q), product(weights.swapaxes(-1, -2), g)
    terms = np.abs(weights * dweights * work(scale))
    sizes = [1, (terms @ np.abs(k)).max(), (terms.swapaxes(-1, -2) @ np.abs(q)).max(), dv.max()]
    return (weights, product(dscores, k), dk, dv), sizes


def ours(g, q, k, v, **options):
    r = lh.attention(q, k, v, return_lse=True, return_weights=True, **options)
    return r.weights, *lh.attention_backward(g, q, k, v, r.output, r.lse, **options)[:3]


def assert_within_three_times(draws, ulps):
    """draws: pairs of what we give and of what `steps` takes; the worst over all of them counts.

    ulps: of the terms that make up a result, for where the yardstick is exact by luck
    """
    errors = []
    for results, call in draws:
        (exact, sizes), (yardstick, _) = steps(*call, np.float64), steps(*call, np.float32)
        errors.append(
            [
                (worst(got, want), worst(plain, want), size)
                for got, plain, want, size in zip(results, yardstick, exact, sizes, strict=True)
            ]
        )
    for name, (mine, theirs, size) in zip(
        ("weights", "dq", "dk", "dv"), np.max(errors, axis=0), strict=True
    ):
        floor = ulps * np.finfo(np.float32).eps * size
        assert mine <= 3 * theirs + floor, (name, mine, theirs, floor)


@pytest.mark.parametrize(("length", "size"), [(4, 60), (40, 60), (70, 300)])
@pytest.mark.parametrize("largest", [1, 10, 30, 100, 1e3, 1e4, 1e5, 1e6])
def test_weights_and_gradients_of_large_scores(largest, length, size):
    """A dozen draws. The lse is rounded: weights made from it alone would be off by its error."""
    draws = []
    for seed in range(12):
        q, k, v = inputs(heads=2, length=length, size=size, d=16, seed=3 * seed)
        g = normal(2, length, 16, seed=100 + seed)
        scale = largest / np.abs(q @ k.swapaxes(-1, -2)).max()
        results = ours(g, q, k, v, scale=float(scale))
        sums = results[0].sum(axis=-1, dtype=np.float64)
        np.testing.assert_allclose(sums, 1, atol=1e-5)
        draws.append((results, (g, q, k, v, scale, np.zeros((length, size)))))
    assert_within_three_times(draws, ulps=0.5)


@pytest.mark.parametrize("length", [4, 40])
@pytest.mark.parametrize("low", [-1e9, np.finfo(np.float32).min])
def test_rows_in_which_every_key_has_a_low_bias(low, length):
    """Such a row is a softmax over all its keys."""
    draws = []
    for seed in range(12):
        q, k, v = inputs(heads=2, length=length, size=17, d=16, seed=3 * seed)
        g = normal(2, length, 16, seed=100 + seed)
        mask = np.zeros((length, 17), np.float32)
        mask[::3] = low
        results = ours(g, q, k, v, mask=mask)
        np.testing.assert_allclose(results[0].sum(axis=-1, dtype=np.float64), 1, atol=1e-5)
        draws.append((results, (g, q, k, v, 0.25, mask)))
    assert_within_three_times(draws, ulps=0.5)


VALUES = {
    "uniform": lambda rng, shape: rng.random(shape),
    "constant": lambda rng, shape: np.broadcast_to(rng.random(shape[-1]), shape),
    "one": lambda rng, shape: np.full(shape, 0.1),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("size", [4096, 16_384, 65_536])
def test_long_sums(size, kind):
    """Many keys, and in the backward pass many queries: the error does not grow with their number.

    Summed up one after the other, 65,536 times 0.1 is off by 1e-3.
    """
    rng = np.random.default_rng(size)
    q, k = normal(1, 16, 8), normal(1, size, 8, seed=1)
    if kind == "one":
        q[:] = 0  # all weights are equal
    v = VALUES[kind](rng, (1, size, 8)).astype(np.float32)
    scale = float(np.sqrt(1 / 8))
    output, _ = plain(q, k, v, scale, np.float64)
    mine = worst(lh.attention(q, k, v), output)
    theirs = worst(plain(q, k, v, scale, np.float32)[0], output)
    assert mine <= 3 * theirs + 4 * np.finfo(np.float32).eps * np.abs(output).max()

    draws = []
    for query, key, value in ((q, k, v), (k, q, v[:, :16])):
        g = VALUES[kind](rng, (1, query.shape[1], 8)).astype(np.float32)
        call = (g, query, key, value, scale, np.zeros(1))
        draws.append((ours(g, query, key, value), call))
    for draw in draws:
        assert_within_three_times([draw], ulps=3)


# ---------------------------------------------------------------- saturated rows


def saturated(length, size, gap, dtype):
    """Rows whose largest score lies `gap` above a spread-out rest: exact in 16 bits too."""
    q = np.zeros((1, length, 8))
    q[..., 0] = 1.0
    k = np.zeros((1, size, 8))
    k[0, :, 0] = -np.arange(size) % 4 / 4
    k[0, size // 3, 0] = gap
    return q.astype(dtype), k.astype(dtype), np.ones((1, size, 4), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [12, 20, 40, 64])
@pytest.mark.parametrize(("length", "size"), [(2, 30), (2, 1300), (30, 30), (30, 700)])
def test_saturated_rows_keep_their_digits(length, size, gap, dtype):
    q, k, v = saturated(length, size, gap, dtype)
    got = lh.attention(q, k, v, scale=1.0, return_health=True).health
    want = lh.reference(q, k, v, scale=1.0, return_health=True).health
    fields = ["entropy", "entropy_ratio", "signal"]
    if gap <= 40 or dtype == np.float64:  # squared, larger gaps underflow in float32
        fields.append("jacobian_norm")
    for field in fields:
        ours, theirs = getattr(got, field), getattr(want, field)
        assert (ours > 0).all(), field
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, err_msg=field)
    if gap > 12:
        assert got.saturated[0] == want.saturated[0] == 1.0


def test_the_textbook_formulas_would_lose_them():
    """In float32 lse - Σp·s and 1 - Σp² of such a row are 0 or worse: the test above can fail."""
    q, k, _ = saturated(1, 30, 40, np.float32)
    scores = (q @ k.swapaxes(-1, -2))[0, 0]
    p = np.exp(scores - scores.max())
    p /= p.sum()
    assert np.float32(1) - (p * p).sum() == 0
    signal = lh.attention(q, k, k, scale=1.0, return_health=True).health.signal[0]
    assert 1e-17 < signal < 1e-15


# ---------------------------------------------------------------- 2^x


def exp2(x):
    y = np.empty_like(x)
    _engine.exp2(x, y)
    return y


def in_ulp(y, truth, bits):
    """|y - truth| in units in the last place of the truth."""
    _, exponent = np.frexp(truth)
    return np.abs((y.astype(truth.dtype) - truth) / np.ldexp(truth.dtype.type(1), exponent - bits))


def spread(dtype, lowest):
    """The whole range evenly, every scale near 0, and both sides of every half and integer."""
    even = np.linspace(lowest, 0, 2_000_001)
    small = -np.logspace(-30, 0, 200_001, base=2)
    edges = np.arange(2 * lowest, 1) / 2
    points = np.concatenate([even, small, edges]).astype(dtype)
    near = edges.astype(dtype)
    points = np.concatenate(
        [points, np.nextafter(near, dtype(-2000)), np.nextafter(near, dtype(0))]
    )
    return points[(points >= lowest) & (points <= 0)]


def test_exp2_float32_in_ulp():
    x = spread(np.float32, -126)
    error = in_ulp(exp2(x), np.exp2(x.astype(np.float64)), 24)
    assert error.max() <= 1.5


@pytest.mark.skipif(not WIDE, reason="long double is no wider than float64 here")
def test_exp2_float64_in_ulp():
    x = spread(np.float64, -1022)
    error = in_ulp(exp2(x), np.exp2(x.astype(np.longdouble)), 53)
    assert error.max() <= 1.2


@pytest.mark.parametrize(("dtype", "floor"), [(np.float32, -127), (np.float64, -1023)])
def test_exp2_exact_values(dtype, floor):
    whole = np.arange(floor + 1, 1).astype(dtype)
    np.testing.assert_array_equal(exp2(whole), np.exp2(whole))  # 2^0 = 1 among them
    below = np.array([floor, floor - 0.5, 2 * floor, -3e38, -np.inf], dtype)
    assert (exp2(below) == 0).all() and not np.signbit(exp2(below)).any()
    assert np.isnan(exp2(np.array([np.nan, -np.nan], dtype))).all()
    np.testing.assert_array_equal(exp2(np.array([-0.0, 0.0], dtype)), 1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_is_the_same_in_body_and_tail(dtype):
    x = -np.random.default_rng(0).exponential(10, 67).astype(dtype)
    whole = exp2(x)
    for n in (1, 2, 3, 5, 9, 66):
        np.testing.assert_array_equal(exp2(x[:n].copy()), whole[:n])


# ---------------------------------------------------------------- ln(1 + x)


def log1p(x):
    y = np.empty_like(x)
    _engine.log1p(x, y)
    return y


def log1p_points(dtype):
    """Every scale, densely about sqrt(2) - 1, where the way to compute it changes."""
    scales = np.logspace(-100, 60, 1_000_001, base=2)
    change = np.linspace(0.35, 0.5, 200_001)
    return np.concatenate([scales, change]).astype(dtype)


def test_log1p_float32_in_ulp():
    x = log1p_points(np.float32)
    assert in_ulp(log1p(x), np.log1p(x.astype(np.float64)), 24).max() <= 3


@pytest.mark.skipif(not WIDE, reason="long double is no wider than float64 here")
def test_log1p_float64_in_ulp():
    x = log1p_points(np.float64)
    assert in_ulp(log1p(x), np.log1p(x.astype(np.longdouble)), 53).max() <= 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log1p_of_nothing_and_of_what_one_plus_x_would_lose(dtype):
    np.testing.assert_array_equal(log1p(np.zeros(3, dtype)), 0)
    tiny = np.finfo(dtype).eps * np.array([0.4, 1e-3, 1e-12], dtype)
    np.testing.assert_allclose(log1p(tiny), tiny, rtol=float(np.finfo(dtype).eps))
    assert (np.log(1 + tiny) == 0).all()  # what the textbook form gives
