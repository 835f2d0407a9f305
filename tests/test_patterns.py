"""What the rows of a sequence have in common: by hand, and in every way it is computed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support import PATTERNS, inputs, same_bits, score_error
from torch_support import in_torch

import levelhead as lh
from levelhead._health import sampling
from levelhead._health.sampling import sampled_rows
from levelhead.torch import _tiled_health
from levelhead.torch._attention import normalise
from levelhead.torch._row_statistics import matrix_health

SURE = 40.0  # a score that takes all the weight


def tiled(q, k, v, **opts):
    given = normalise(*(torch.from_numpy(x) for x in (q, k, v)), **in_torch(opts))
    return lh.Health(_tiled_health.tiled_health(given).numpy())


WAYS = {
    "engine": lambda *call, **opts: lh.attention(*call, return_health=True, **opts).health,
    "reference": lambda *call, **opts: lh.reference(*call, return_health=True, **opts).health,
    "tiled": tiled,
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def of_scores(way, scores, **opts):
    """The four fields of one head whose scores are exactly these, (L, S)."""
    scores = np.asarray(scores, np.float64)[None]
    keys = np.eye(scores.shape[-1])[None]
    health = WAYS[way](scores, keys, keys, scale=1.0, **opts)
    return {name: getattr(health, name)[0] for name in PATTERNS}


def one_hot(keys, size):
    """Scores of rows that look at one key each; none for a key that is not there."""
    return SURE * (np.asarray(keys)[:, None] == np.arange(size))


# ---------------------------------------------------------------- which rows


def test_all_rows_of_a_short_sequence():
    np.testing.assert_array_equal(sampled_rows(np.full(64, 9), 9), np.arange(64))
    np.testing.assert_array_equal(sampled_rows(np.arange(1, 21), 20), np.arange(7, 20))
    assert len(sampled_rows(np.full(50, 7), 7)) == len(sampled_rows(np.zeros(0, int), 9)) == 0


def test_a_long_sequence_is_sampled_evenly():
    rows = sampled_rows(np.arange(1, 1001), 1000)
    np.testing.assert_array_equal(rows, [7 + i * 993 // 64 for i in range(64)])


def test_rows_are_fewer_where_they_are_long():
    assert [len(sampled_rows(np.full(10_000, n), n)) for n in (4096, 4097, 16_384, 2**20)] == [
        *(64, 63, 16, 8)
    ]


def test_the_engine_has_the_same_numbers():
    text = (Path(__file__).parents[1] / "csrc/problem.h").read_text(encoding="utf-8")
    for name in ("Rows", "Keys", "LeastRows", "Weights"):
        python = "PATTERN_" + re.sub("(?<=.)([A-Z])", r"_\1", name).upper()
        assert int(re.search(rf"kPattern{name} = (\d+)", text)[1]) == getattr(sampling, python)


# ---------------------------------------------------------------- by hand


@EVERY_WAY
@pytest.mark.parametrize("length", [8, 40, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_patterns_by_hand(way, length, causal):
    at = np.arange(length)
    rows = sampled_rows(np.where(causal, at + 1, length), length)
    for keys, expected in [
        (at, (1, 0, 1, None)),
        (at - 1, (0, 1, 1, None)),
        (at - 3, (0, 0, 1, None)),
        (0 * at, (None, None, None, 0)),
        (0 * at + 5, (None, None, None, 1)),
    ]:
        looked = np.where(keys < 0, length - 1, keys)  # a row that has no such key
        share = np.mean(keys[rows] >= 0)
        found = of_scores(way, one_hot(looked, length), causal=causal)
        for name, value in zip(PATTERNS, expected, strict=True):
            if value is not None:
                assert found[name] == pytest.approx(value * share, abs=1e-9), name


@EVERY_WAY
def test_uniform_rows(way):
    for causal in (False, True):
        at = np.arange(20)
        rows = at[7:] if causal else at
        found = of_scores(way, np.zeros((20, 20)), causal=causal)
        seen = rows + 1 if causal else 0 * rows + 20
        assert found["self_weight"] == pytest.approx(np.mean(1 / seen))
        assert found["previous_weight"] == pytest.approx(np.sum((1 / seen)[rows > 0]) / len(rows))
        assert found["offset_weight"] == pytest.approx(np.mean(1 / seen))
        assert found["shared_key"] == pytest.approx(np.mean(1 / seen))


@EVERY_WAY
@pytest.mark.parametrize("offset", [-12, -1, 0, 4, 1000])
def test_positions_follow_the_offset(way, offset):
    """Row r is at position r + offset, and its own key may not be there."""
    at = np.arange(16)
    for behind, name in ((0, "self_weight"), (1, "previous_weight")):
        keys = at + offset - behind
        there = (keys >= 0) & (keys < 16)
        scores = one_hot(np.where(there, keys, 9), 16)
        found = of_scores(way, scores, query_offset=offset)
        assert found[name] == pytest.approx(np.mean(there), abs=1e-9)


@EVERY_WAY
def test_offsets_go_ahead_too(way):
    scores = one_hot(np.minimum(np.arange(30) + 4, 29), 30)
    assert of_scores(way, scores)["offset_weight"] == pytest.approx(26 / 30)


@EVERY_WAY
def test_a_sink_takes_its_share(way):
    found = of_scores(way, one_hot(np.arange(10), 10), sinks=np.array([SURE + np.log(3.0)]))
    assert found["self_weight"] == pytest.approx(0.25)


@EVERY_WAY
def test_rows_that_a_mask_leaves_few_keys_are_left_out(way):
    mask = np.ones((12, 12), bool)
    mask[3, 7:] = False  # leaves 7 keys
    mask[4, 8:] = False  # leaves 8
    looked = np.arange(12)
    looked[3], looked[4] = 0, 0
    for given in (mask, np.where(mask, 0.0, -np.inf), np.where(mask, 0.0, np.finfo(float).min)):
        found = of_scores(way, one_hot(looked, 12), mask=given)
        assert found["self_weight"] == pytest.approx(10 / 11)


@EVERY_WAY
def test_the_mask_has_no_say_in_which_rows_are_sampled(way):
    """As it would have to be read for that; a mask as wide as causal leaves the first rows out."""
    causal = np.tri(200, dtype=bool)
    looked = one_hot(np.where(np.arange(200) % 25 < 12, np.arange(200), 5), 200)
    rows = np.arange(64) * 200 // 64
    rows = rows[rows >= 7]
    by_mask = of_scores(way, looked, mask=causal)["self_weight"]
    assert by_mask == pytest.approx(np.mean(rows % 25 < 12))
    assert by_mask != pytest.approx(of_scores(way, looked, causal=True)["self_weight"])


@EVERY_WAY
def test_rows_that_are_not_finite_are_left_out(way):
    scores = one_hot(np.arange(12), 12)
    scores[5] = np.nan
    assert of_scores(way, scores)["self_weight"] == pytest.approx(1)
    assert np.isnan(of_scores(way, np.full((12, 12), np.nan))["self_weight"])


@EVERY_WAY
@pytest.mark.parametrize("shape", [(5, 7), (0, 20), (20, 0), (1, 7)])
def test_a_sequence_without_rows_does_not_count(way, shape):
    q, k, v = inputs(2, heads=2, length=shape[0], size=shape[1], dtype=np.float64)
    health = WAYS[way](q, k, v)
    assert (health.pattern_sequences == 0).all()
    assert all(np.isnan(getattr(health, name)).all() for name in PATTERNS)
    assert (WAYS[way](q[:, :, :0], k, v).pattern_sequences == 0).all()


@EVERY_WAY
def test_sequences_merge_as_means(way):
    q, k, v = inputs(4, heads=2, length=30, size=40, dtype=np.float64)
    health = WAYS[way](q, k, v, key_lengths=np.array([40, 20, 7, 0]), query_offset=np.arange(4))
    assert health.pattern_sequences[:, 0].tolist() == [1, 1, 0, 0]
    merged = health.over_batch()
    assert merged.pattern_sequences.tolist() == [2, 2]
    for name in PATTERNS:
        each = getattr(health, name)
        np.testing.assert_allclose(getattr(merged, name), each[:2].mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_matrices_of_scores(lead):
    """Attention by hand: nobody says who sees whom but the matrix."""
    q, k, v = inputs(*lead, heads=3, length=70, size=90, dtype=np.float64)
    scores = torch.from_numpy(q @ k.swapaxes(-1, -2) * 8**-0.5)
    if not lead:
        scores, q, k, v = scores[0], q[0], k[0], v[0]
    counted = torch.ones_like(scores, dtype=torch.bool)
    got = matrix_health(scores, scores, counted, None).reshape(*lead, -1, len(lh.Health.COLUMNS))
    want = lh.reference(q, k, v, return_health=True).health
    np.testing.assert_allclose(got.numpy(), want.sums, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- the engine, on every path


# Few queries; one tile; one tile and a sample; keys in blocks; that and a sample.
SHAPES = [
    *((1, 30), (1, 2100), (3, 40), (8, 8), (8, 700), (5, 2100), (9, 9), (24, 24), (61, 64)),
    *((77, 77), (150, 130), (300, 60), (30, 700), (64, 300), (333, 333), (100, 5000)),
]
EVERY_SHAPE = pytest.mark.parametrize(("length", "size"), SHAPES)


def check_engine(q, k, v, like=None, **opts):
    """The engine's columns are the reference's, and those of any number of threads.

    like: the query for the reference, if there it is another
    """
    ours = lh.attention(q, k, v, return_health=True, threads=1, **opts).health
    like = q if like is None else like
    theirs = lh.reference(like, k, v, return_health=True, **opts).health
    np.testing.assert_array_equal(ours.pattern_sequences, theirs.pattern_sequences)
    usual = [np.where(abs(x) < 1e30, x, 1).astype(x.dtype) for x in (like, k)]
    rtol = 16 * score_error(*usual, opts.get("scale"))
    for name in PATTERNS:
        np.testing.assert_allclose(
            getattr(ours, name), getattr(theirs, name), rtol=rtol, atol=1e-7, err_msg=name
        )
    for threads in (2, 5):
        again = lh.attention(q, k, v, return_health=True, threads=threads, **opts).health
        assert same_bits(again.sums, ours.sums)
    return ours


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_every_path_of_the_engine(dtype, length, size):
    q, k, v = inputs(2, heads=4, kv_heads=2, length=length, size=size, d=16, dtype=dtype)
    draw = np.random.default_rng(0).random((2, 4, length, size))
    bias = np.where(draw > 0.4, draw, -np.inf).astype(np.float32)
    for opts in (
        {},
        {"causal": True},
        {"window": (20, 3), "query_offset": np.array([size // 2, -length // 2])},
        {"key_lengths": np.array([size - 1, size // 2])},
        {"sinks": np.linspace(-2, 3, 4)},
        {"mask": draw > 0.4},
        {"mask": bias, "softcap": 3.0, "causal": True},
        {"dropout": 0.5, "seed": 1},
    ):
        check_engine(2 * q, k, v, **opts)


@EVERY_SHAPE
@pytest.mark.parametrize("at", [-1000, -1, 0, 0.4, 1.0])
def test_a_key_that_all_rows_share(length, size, at):
    """Wherever it is; the first key is left out."""
    q, k, v = inputs(heads=2, length=length, size=size, d=16)
    key = int(at * (size - 1)) if at >= 0 else 0
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, key, 0] = 60.0 if at >= 0 else -60.0
    found = check_engine(q, k, v, scale=1.0)
    if at > 0:
        assert (found.shared_key > 0.9).all() and (found.offset_weight > 0.9 / length).all()
    elif at == 0:
        assert (found.shared_key < 0.1).all()


@EVERY_SHAPE
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(length, size, bad):
    """Sampled or not; from the first key on, or at a late one only."""
    rows = [0, length // 2, length - 1]
    q, k, v = inputs(heads=2, length=length, size=size, d=16)
    q[..., 0], k[..., 0] = 1.0, 0.0
    broken = q.copy()
    broken[0, rows] = bad
    for opts in ({}, {"causal": True}):
        assert (check_engine(broken, k, v, **opts).nonfinite_rows > 0).tolist() == [True, False]
    late = k.copy()
    late[0, size // 2, 0] = bad  # for rows that see it
    found = check_engine(q, late, v, causal=True)
    assert found.nonfinite_rows[0] == min(length, size - size // 2)
    if np.isinf(bad):  # in float32, where every row sees every key
        k[:, size - 2, 0] = 2e38
        q[..., 0] = 0.0
        like = q.copy()
        like[0, rows] = bad
        q[0, rows, 0] = np.sign(bad) * 1e10
        check_engine(q, k, v, like=like)


@EVERY_SHAPE
@pytest.mark.parametrize("size_of_scores", [300.0, 3e3, 1e5, 1e30])
def test_large_scores(length, size, size_of_scores):
    """Float32 weights of such scores would be off; half of the rows have small ones."""
    q, k, v = inputs(heads=2, length=length, size=size, d=16)
    q[:, ::2] *= size_of_scores
    k[:, 3:6] = k[:, :3]  # ties, so that weights are shared
    found = check_engine(q, k, v)
    assert (found.pattern_sequences == 1).all()


@pytest.mark.parametrize(("length", "size"), [(3, 40), (30, 40), (80, 300), (1, 40)])
def test_large_scores_of_keys_that_compete(length, size):
    """Scores of 1e6 that differ by 1: a float32 does not hold the difference."""
    q, k = np.zeros((1, length, 3), np.float32), np.zeros((1, size, 3), np.float32)
    q[..., 0], k[..., 0] = 1000.0, 1000.0
    q[..., 1], q[..., 2] = 1.0, 1.0
    k[:, :, 1] = np.arange(size) % 5
    k[:, 7, 2] = 3.3
    found = check_engine(q, k, k, scale=1.0)
    assert ((found.shared_key > 0.03) & (found.shared_key < 0.99)).all()


@EVERY_SHAPE
def test_pairs_that_a_bias_hides_have_no_part(length, size):
    """Not even where all the others lie as low, so that they have weight in the output."""
    q, k, v = inputs(heads=2, length=length, size=size, d=8)
    mask = np.full((length, size), -32_700, np.float16)
    mask[:, ::3] = -32_752  # half of the lowest: hidden
    mask[::2] = 0
    check_engine(q, k, v, mask=mask)
    k[:, size // 3 * 3 - 3] = np.nan
    assert (check_engine(q, k, v, mask=mask).nonfinite_rows == (length + 1) // 2).all()


@EVERY_SHAPE
def test_a_sequence_has_the_same_bits_alone(length, size):
    q, k, v = inputs(3, heads=4, kv_heads=2, length=length, size=size, d=16)
    together = lh.attention(q, k, v, causal=True, return_health=True).health
    for entry in range(3):
        alone = lh.attention(q[entry], k[entry], v[entry], causal=True, return_health=True)
        assert same_bits(alone.health.sums, together.sums[entry])


@pytest.mark.parametrize("seed", range(150))
def test_random_calls(seed):
    """Shapes and bands at random: which rows are sampled, and where tiles begin and end."""
    rng = np.random.default_rng([4, seed])
    length, size = (int(2 ** rng.uniform(0, 9)) for _ in range(2))
    q, k, v = inputs(
        2, heads=2, length=length, size=size, d=int(rng.choice([4, 40, 130])), seed=seed
    )
    opts = {"query_offset": rng.integers(-20, size, 2)}
    opts["window"] = (int(rng.integers(0, 80)), rng.choice([None, 0, 9]))
    if rng.random() < 0.5:
        opts["key_lengths"] = rng.integers(0, size + 1, 2)
    if rng.random() < 0.3:
        opts["mask"] = rng.random((length, size)) < 0.7
    check_engine(3 * q, k, v, **opts)
