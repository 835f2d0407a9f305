"""What the rows of a sequence have in common: by hand, and in every way it is computed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support import PATTERNS, inputs
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
