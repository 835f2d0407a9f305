"""Health in plain torch, a few rows at a time, against the engine's: what other devices get."""

import numpy as np
import pytest
import torch
from support import OPTION_NAMES, assert_close, assert_health, options, score_error
from torch_support import array, in_torch, leaf, tensors

import levelhead as lh
from levelhead.torch import _ops, _tiled_health
from levelhead.torch._attention import normalise
from levelhead.torch._patterns import sample
from levelhead.torch._row_statistics import health_sums, matrix_health, row_statistics

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
EVERY_OPTION = pytest.mark.parametrize("name", ["plain", *OPTION_NAMES])
# What PyTorch's own dropout drops is not known.
ALL_BUT_DROPOUT = pytest.mark.parametrize(
    "name", ["plain", *(name for name in OPTION_NAMES if name != "dropout")]
)


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(_tiled_health, "TILE", 150)


def health_of(q, k, v, **opts):
    return lh.Health(_tiled_health.tiled_health(normalise(q, k, v, **in_torch(opts))).numpy())


def engine_health(q, k, v, **opts):
    return lh.attention(array(q), array(k), array(v), return_health=True, **opts).health


def check(q, k, v, **opts):
    """The tiled health is the engine's, to rounding of the scores; returns it."""
    got = health_of(q, k, v, **opts)
    finite = [np.nan_to_num(array(x), posinf=1.0, neginf=1.0) for x in (q, k)]
    error = score_error(*finite, opts.get("scale"))
    assert_health(got, engine_health(q, k, v, **opts), error)
    return got


def every(name, batch=2, length=5, size=7):
    return {} if name == "plain" else options(batch, 4, length, size)[name]


# ---------------------------------------------------------------- health


@BOTH
@EVERY_OPTION
def test_every_option(name, dtype):
    check(*tensors(2, length=13, size=11, dtype=dtype), **every(name, 2, 13, 11))


@BOTH
@pytest.mark.parametrize(("scores", "count"), [(1, 5), (150, 3), (1 << 22, 1)])
def test_tiles_of_any_size(scores, count, dtype, monkeypatch):
    monkeypatch.setattr(_tiled_health, "TILE", scores)
    q, k, v = tensors(2, dtype=dtype)
    assert len(list(_tiled_health.tiles(normalise(q, k, v)))) == count
    opts = {
        **every("hiding mask"),
        **every("softcap"),
        **every("key lengths"),
        **every("sinks"),
        "window": (4, None),
        "query_offset": np.array([2, 3]),
    }
    check(q, k, v, **opts)
    check_gradients(q, k, v, **opts)


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=["3-D", "5-D"])
def test_dimensions(lead):
    numbers = np.arange(6) + 1
    opts = {"key_lengths": numbers, "query_offset": numbers} if lead else {}
    assert check(*tensors(*lead), causal=True, **opts).shape == (*lead, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_measured_in_float32(dtype):
    q, k, v = tensors(2, dtype=dtype)
    got = check(q, k, v, causal=True)
    wide = health_of(q.float(), k.float(), v.float(), causal=True)
    assert got.sums.tobytes() == wide.sums.tobytes()


@BOTH
@pytest.mark.parametrize("factor", [30.0, 1000.0])
@pytest.mark.parametrize("sink", [None, 0.0, 1e4], ids=["no sink", "low sink", "high sink"])
def test_saturated_rows_keep_their_small_numbers(dtype, factor, sink):
    q = torch.eye(8).repeat(2, 4, 1, 1).to(dtype) * factor
    q[:, 1] *= 0.5
    k, v = torch.eye(8).repeat(2, 2, 1, 1).to(dtype), torch.ones(2, 2, 8, 3, dtype=dtype)
    sinks = {} if sink is None else {"sinks": np.full(4, sink)}
    got = check(q, k, v, scale=1.0, **sinks)
    if factor == 30 and sink is None:
        assert (got.saturated[:, 0] == 1).all()
        np.testing.assert_allclose(got.signal[:, 0], 14 * np.exp(-30.0), rtol=1e-4)


@BOTH
def test_ties_for_the_largest(dtype):
    q, k = torch.ones(2, 4, 3, 8, dtype=dtype), torch.ones(2, 2, 7, 8, dtype=dtype)
    got = check(q, k, k)
    np.testing.assert_allclose(got.effective_keys, 7, rtol=1e-6)
    np.testing.assert_allclose(got.entropy_ratio, 1, rtol=1e-6)
    check(q, k, k, sinks=np.full(4, 8**0.5))  # and one with the sink


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_rows_are_counted_and_left_out(dtype, bad):
    q, k, v = tensors(2, dtype=dtype)
    k[0, 0, 3] = bad  # keys seen by the last rows, and
    q[1, 2, 1] = bad  # one whole row
    got = check(q, k, v, causal=True)
    assert got.nonfinite_rows.sum() == 2 * 4 + 1  # two heads share the key; 4 rows see it
    hidden = np.ones((5, 7), bool)
    hidden[:, 3] = False
    q, k, v = tensors(2, dtype=dtype)
    k[..., 3, :] = bad
    for mask in (hidden, np.where(hidden, 0.0, -np.inf)):
        assert not check(q, k, v, mask=mask).nonfinite_rows.any()


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_sinks_and_biases(dtype, bad):
    q, k, v = tensors(2, dtype=dtype)
    sinks = np.zeros(4)
    sinks[1] = bad
    got = check(q, k, v, sinks=sinks)
    assert (got.nonfinite_rows[:, 1] == (0 if bad == -np.inf else 5)).all()
    bias = np.zeros((5, 7), np.float32)
    bias[2, 4] = bad
    check(q, k, v, mask=bias)


@BOTH
def test_biases_that_stand_in_for_hidden(dtype):
    q, k, v = tensors(2, dtype=dtype)
    for kind in (np.float16, np.float32, np.float64):
        bias = np.zeros((5, 7), kind)
        bias[1] = np.finfo(kind).min  # empty to the statistics
        bias[2, 1:] = np.finfo(kind).min * 0.6
        bias[3, 2] = np.finfo(kind).min * 0.4 if kind is np.float16 else -1e4
        got = check(q, k, v, mask=bias)
        assert (got.empty_rows == 1).all() and (got.widest_row == 7).all()


@BOTH
@pytest.mark.parametrize(
    ("lead", "length", "size"), [((2,), 0, 7), ((2,), 5, 0), ((0,), 5, 7), ((), 0, 0)]
)
def test_nothing_to_measure(lead, length, size, dtype):
    got = check(*tensors(*lead, length=length, size=size, dtype=dtype))
    assert (got.rows == length).all() and not got.pairs[..., :0].any()
    assert (got.empty_rows == (0 if size else length)).all()


def test_scores_whose_squares_overflow():
    q, k, v = tensors(2)
    assert (check(1e15 * q, 1e15 * k, v).score_var > 1e58).all()


def test_empty_rows():
    got = check(*tensors(2), causal=True, query_offset=-3)
    assert (got.empty_rows == 3).all()
    got = check(*tensors(2), key_lengths=np.array([0, 7]))
    assert (got.empty_rows == [[5] * 4, [0] * 4]).all()


# ---------------------------------------------------------------- scores that are there


@BOTH
def test_matrices_of_scores(dtype):
    q, k, v = tensors(2, dtype=dtype)
    scores = (q @ k.repeat_interleave(2, 1).mT) * 8**-0.5
    mask = torch.from_numpy(every("bool mask")["mask"])
    sinks = torch.linspace(-1, 2, 4, dtype=dtype)
    logits = scores.masked_fill(~mask, -torch.inf)
    null = sinks[:, None, None].expand(2, 4, 5, 1)
    got = lh.Health(matrix_health(scores, logits, mask, null).numpy())
    want = engine_health(q, k, v, mask=mask.numpy(), sinks=sinks.double().numpy())
    assert_health(got, want, score_error(array(q), array(k)))


def test_rows_merge_whatever_their_order():
    scores = 5 * leaf(2, 3, 8, 6).detach()
    counted = torch.ones(1, dtype=torch.bool)
    distance = torch.zeros(1)
    sampled = sample(8, 6)  # none: rows that see 6 keys show no pattern
    parts = [
        row_statistics(
            *(scores[..., rows, :], scores[..., rows, :], counted, None, distance),
            sampled.part(rows),
        )
        for rows in (slice(0, 1), slice(1, 5), slice(5, 8))
    ]
    whole = health_sums([row_statistics(scores, scores, counted, None, distance, sampled)], sampled)
    for some in (parts, parts[::-1]):
        torch.testing.assert_close(health_sums(some, sampled), whole)


# ---------------------------------------------------------------- gradients


@BOTH
@ALL_BUT_DROPOUT
def test_gradients_of_every_option(name, dtype):
    q, k, v = tensors(2, dtype=dtype, dv=3)
    check_gradients(q, k, v, **every(name))


def check_gradients(q, k, v, **opts):
    grad = torch.linspace(-1, 1, q[..., 0].numel() * v.shape[-1], dtype=q.dtype)
    grad = grad.reshape(*q.shape[:-1], v.shape[-1])
    got = _tiled_health.tiled_gradients(normalise(q, k, v, **in_torch(opts)), grad).numpy()
    arrays = [array(x) for x in (q, k, v)]
    r = lh.attention(*arrays, return_lse=True, **opts)
    want = lh.attention_backward(array(grad), *arrays, r.output, r.lse, return_health=True, **opts)
    rtol = 1e-11 if q.dtype is torch.float64 else 2e-4
    np.testing.assert_allclose(got, want.health.sums, rtol=rtol, atol=rtol * 1e-3)
    return lh.GradHealth(got)


@BOTH
def test_gradients_where_rows_are_empty_broken_or_absent(dtype):
    q, k, v = tensors(2, dtype=dtype)
    health = check_gradients(q, k, v, causal=True, query_offset=-3)
    assert (health.weight_grad_norm > 0).all()
    q[1, 2, 1] = torch.nan
    assert np.isnan(check_gradients(q, k, v).score_grad_norm).sum() == 1
    q, k, v = tensors(2, dtype=dtype)
    k[..., 3, :], v[..., 3, :] = torch.nan, torch.inf
    mask = np.zeros((5, 7))
    mask[:, 3] = -np.inf
    assert np.isfinite(check_gradients(q, k, v, mask=mask).survival).all()
    for sizes in ({"length": 0}, {"size": 0}):
        health = check_gradients(*tensors(2, dtype=dtype, **sizes))
        assert (health.weight_grad_norm == 0).all()


# ---------------------------------------------------------------- the whole call


@BOTH
@ALL_BUT_DROPOUT
@pytest.mark.parametrize("weights", [False, True])
def test_the_call_without_the_engine(name, dtype, weights):
    opts = every(name)
    q, k, v = (x.requires_grad_() for x in tensors(2, dtype=dtype, dv=3))
    given = normalise(q, k, v, **in_torch(opts))
    output, lse, matrix, sums = _tiled_health.attention(given, True, weights, 0, True)
    arrays = [array(x) for x in (q, k, v)]
    want = lh.attention(*arrays, return_lse=True, return_weights=True, **opts)
    error = 4 * score_error(arrays[0], arrays[1], opts.get("scale"))
    assert_close(array(output), want.output, 4 * error)
    assert_close(array(lse), want.lse, error)
    if weights:
        assert_close(array(matrix), want.weights, error)
    assert sums.shape[:-1] == (2, 4)
    grad = torch.linspace(-1, 1, output.numel(), dtype=dtype).reshape(output.shape)
    got = torch.autograd.grad(output, (q, k, v), grad)
    theirs = lh.attention_backward(array(grad), *arrays, want.output, want.lse, **opts)
    for a, b in zip(got, theirs[:3], strict=True):
        assert_close(array(a), b, 40 * error)
    assert not lse.requires_grad and not matrix.requires_grad


def test_the_call_in_halves_with_a_wide_mask():
    q, k, v = tensors(2, dtype=torch.bfloat16)
    mask = leaf(7).detach().float()
    given = normalise(q, k, v, mask=mask, causal=True)
    output, lse, matrix, sums = _tiled_health.attention(given, False, False, 0, False)
    want = _ops.attention_op(*given[:-1], False, False, 0)[0]
    torch.testing.assert_close(output, want, atol=0.03, rtol=0.03)
    assert lse.numel() == matrix.numel() == sums.numel() == 0


def test_dropout_elsewhere_is_pytorchs():
    q, k, v = tensors(2, length=64, size=64)
    for opts in ({}, {"softcap": 5.0}):
        given = normalise(q, k, torch.ones_like(v), dropout=0.5, **opts)
        torch.manual_seed(0)
        output = _tiled_health.attention(given, False, False, 0, False)[0]
        assert abs(output.mean() - 1) < 0.05 and output.std() > 0.05


def test_a_listener_elsewhere_hears_and_changes_nothing():
    q, k, v = tensors(2, grad=True)
    given, received = normalise(q, k, v, causal=True), []
    _ops.listeners[78] = lambda sums: received.append(sums) or sums
    try:
        output = _tiled_health.attention(given, False, False, 78, False)[0]
    finally:
        del _ops.listeners[78]  # whoever listened to the call gets its backward
    (dq,) = torch.autograd.grad(output.sum(), q)
    engine = _ops.attention_op(*given[:-1], False, False, 0)[0]
    torch.testing.assert_close(dq, torch.autograd.grad(engine.sum(), q)[0])
    want = _tiled_health.tiled_gradients(given, torch.ones_like(output))
    assert len(received) == 1 and torch.equal(received[0], want)


@EVERY_OPTION
def test_meta_tensors_have_shapes(name):
    opts = in_torch(every(name))
    opts = {key: x.to("meta") if torch.is_tensor(x) else x for key, x in opts.items()}
    given = normalise(*(x.to("meta") for x in tensors(2)), **opts)
    output, lse, matrix, sums = _tiled_health.attention(given, True, True, 0, True)
    assert output.shape == (2, 4, 5, 8) and lse.shape == (2, 4, 5) and matrix.shape == (2, 4, 5, 7)
    assert sums.shape == (2, 4, len(lh.Health.COLUMNS)) and sums.is_meta
    assert _tiled_health.tiled_gradients(given, output).shape == (2, 4, 2)


# ---------------------------------------------------------------- one head


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["3-D", "4-D", "5-D"])
def test_one_head_of_one_entry(lead):
    q, k, v = tensors(*lead)
    batch = max(1, int(np.prod(lead)))
    opts = {
        "scale": np.linspace(0.5, 1.5, 4),
        "sinks": np.linspace(-1, 1, 4),
        "key_lengths": np.arange(batch) % 7 + 1,
        "query_offset": np.arange(batch),
        "mask": (leaf(*lead, 4, 5, 7) > -0.5).numpy(),
    }
    given = normalise(q, k, v, causal=True, **in_torch(opts))
    whole = lh.attention(array(q), array(k), array(v), causal=True, return_weights=True, **opts)
    weights = whole.weights.reshape(batch, 4, 5, 7)
    for entry, head in [(0, 0), (batch - 1, 3), (batch - 1, 1)]:
        one = _tiled_health.head_of(given, entry, head)
        matrix = _tiled_health.attention(one, False, True, 0, False)[2]
        np.testing.assert_allclose(matrix.numpy().reshape(5, 7), weights[entry, head], atol=1e-6)
