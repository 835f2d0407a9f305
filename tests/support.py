"""What the engine's tests share: inputs, memory layouts, options, comparison with `reference`."""

import itertools

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import levelhead as lh

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("float32", "float64", "float16")] + [BFLOAT16]
EVERYTHING = {"return_lse": True, "return_health": True, "return_weights": True}


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def inputs(*lead, heads=4, kv_heads=None, length=5, size=7, d=8, dv=None, dtype=np.float32, seed=0):
    """query, key, value of shape (*lead, heads, ...)."""
    kv_heads = heads if kv_heads is None else kv_heads
    return (
        normal(*lead, heads, length, d, dtype=dtype, seed=seed),
        normal(*lead, kv_heads, size, d, dtype=dtype, seed=seed + 1),
        normal(*lead, kv_heads, size, d if dv is None else dv, dtype=dtype, seed=seed + 2),
    )


def options(batch, heads, length, size):
    """Every option alone, for a call of that shape; each changes the output."""
    rng = np.random.default_rng(7)
    dense = rng.random((batch, heads, length, size))
    spread = np.arange(batch)
    return {
        "causal": {"causal": True, "query_offset": max(0, min(size - 2, size - length))},
        "window": {"window": max(1, size // 3)},
        "window pair": {"window": (size // 4, 1), "query_offset": 1},
        "window left": {"window": (size // 4, None)},
        "window right": {"window": (None, 0), "query_offset": 0},
        "top left": {"causal": True, "query_offset": 0},
        "negative offset": {"causal": True, "query_offset": -(length // 2)},
        "offset per entry": {"causal": True, "query_offset": spread},
        "key lengths": {"key_lengths": size - 1 - spread % size},
        "scale": {"scale": 1.7},
        "scale 0": {"scale": 0.0},
        "scale negative": {"scale": -0.6},
        "scale per head": {"scale": np.linspace(-0.5, 1.5, heads)},
        "softcap": {"softcap": 0.7},
        "sinks": {"sinks": np.linspace(-1.0, 2.0, heads)},
        "bool mask": {"mask": dense > 0.4},
        "float mask": {"mask": (4 * dense - 2).astype(np.float32)},
        "hiding mask": {"mask": np.where(dense > 0.4, dense, -np.inf).astype(np.float32)},
        "dropout": {"dropout": 0.4, "seed": 11},
    }


OPTION_NAMES = list(options(1, 1, 4, 4))
TOGETHER = (  # of these, all may be given at once
    *("window", "offset per entry", "key lengths", "scale per head", "softcap", "sinks", "dropout"),
)
PAIRS = list(itertools.combinations((*TOGETHER, "bool mask", "float mask"), 2))


def random_options(batch, heads, size, random):
    """A strategy for each option but the mask, to draw any of them or none."""
    side, offset = st.none() | st.integers(0, 80), st.integers(-70, 160)
    return {
        "causal": st.booleans(),
        "window": st.tuples(side, side) | st.integers(1, 90),
        "query_offset": offset | st.lists(offset, min_size=batch, max_size=batch),
        "key_lengths": st.lists(st.integers(0, size), min_size=batch, max_size=batch),
        "scale": st.floats(-0.5, 0.5) | st.just(random.uniform(-1, 1, heads)),
        "softcap": st.floats(0.5, 30),
        "sinks": st.just(random.normal(size=heads)),
        "dropout": st.sampled_from([0.0, 0.1, 0.8]),
        "threads": st.integers(1, 4),
    }


# ---------------------------------------------------------------- memory layouts


def _heads_last(x):
    """(..., length, heads, d) in memory, as a projection leaves it."""
    return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3) if x.ndim > 2 else x


def _every_second(x):
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), 1000.0).astype(x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _padded_rows(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), 1000.0).astype(x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def _misaligned(x):
    """One byte off any alignment."""
    memory = np.empty(x.nbytes + 1, np.uint8)[1:]
    moved = memory.view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def _reversed(x):
    backwards = tuple(slice(None, None, -1) for _ in x.shape)
    return np.ascontiguousarray(x[backwards])[backwards]


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "heads last": _heads_last,
    "fortran": np.asfortranarray,
    "every second": _every_second,
    "padded rows": _padded_rows,
    "misaligned": _misaligned,
    "reversed": _reversed,
}


# ---------------------------------------------------------------- comparison


def epsilon(dtype):
    """Of what the engine computes in: 16-bit floats are widened to float32."""
    return np.finfo(np.float64 if np.dtype(dtype) == np.float64 else np.float32).eps


def storage_epsilon(dtype):
    dtype = np.dtype(dtype)
    return 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)


def score_error(q, k, scale=None):
    """What a score's rounding errors may sum to: eps · (√D + 4) · max(1, |scale|·‖q‖·‖k‖)."""
    if 0 in (*q.shape, *k.shape):
        return epsilon(q.dtype)
    d = q.shape[-1]
    scale = d**-0.5 if scale is None else float(np.max(np.abs(scale)))
    norms = [float(np.linalg.norm(x.astype(np.float64), axis=-1).max()) for x in (q, k)]
    return epsilon(q.dtype) * (d**0.5 + 4) * max(1.0, scale * norms[0] * norms[1])


def assert_close(got, want, atol, dtype=None):
    """NaN and infinities first, then the numbers; `dtype` is what they were rounded to."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    rtol = 0.0 if dtype is None else 0.6 * storage_epsilon(dtype)
    if dtype == np.float16:
        atol += 2.0**-24  # its smallest number
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


COUNTS = ("rows", "pairs", "empty_rows", "nonfinite_rows", "widest_row")
EXACT = (*COUNTS, "large_scores", "saturated")  # counts, or shares of counted things
PATTERNS = ("self_weight", "previous_weight", "offset_weight", "shared_key")
SCORES = ("score_max", "score_min", "score_mean", "score_var")


def assert_health(got, want, error):
    """`error` bounds that of a score; a weight's relative error is twice that."""
    assert got.shape == want.shape
    for name in got.FIELDS:
        ours, theirs = getattr(got, name), getattr(want, name)
        if name in EXACT:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=name)
            continue
        size = np.nanmax(np.abs([want.score_max, want.score_min]), initial=1.0)
        atol = error * (4 * size if name == "score_var" else 2) if name in SCORES else 1e-9
        if name == "distance":  # in positions; next to 0 its parts cancel
            atol = error
        rtol = 16 * error if name not in SCORES else 4 * error
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=name)


def check(q, k, v, **opts):
    """Output, lse, weights and health of the engine against the reference's; returns ours."""
    got = lh.attention(q, k, v, **EVERYTHING, **opts)
    want = lh.reference(q, k, v, **EVERYTHING, **opts)
    assert got.output.dtype == got.weights.dtype == q.dtype
    error = score_error(q, k, opts.get("scale"))
    largest = float(np.max(np.abs(v.astype(np.float64)), initial=1.0)) / (
        1 - opts.get("dropout", 0.0)
    )
    assert_close(got.output, want.output, 4 * error * largest, q.dtype)
    assert_close(got.lse, want.lse, 2 * error)
    assert_close(got.weights, want.weights, 4 * error, q.dtype)
    assert_health(got.health, want.health, error)
    return got


def same_bits(a, b):
    """Whether two arrays agree to the last bit, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
