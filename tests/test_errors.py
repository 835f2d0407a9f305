"""Bad input: an error before any work that names the argument, what was expected and what came."""

import warnings

import numpy as np
import pytest
import torch
from support import BFLOAT16
from torch._subclasses.fake_tensor import FakeTensorMode

import levelhead as lh
import levelhead.torch
from levelhead._options import GIVEN

FLOATS = "float32, float64, float16 or bfloat16"


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


Q, K, V = ones(2, 4, 5, 8), ones(2, 2, 6, 8), ones(2, 2, 6, 3)


def refuses(error, text, *arrays, **options):
    with pytest.raises(error) as caught:
        lh.attention(*(arrays or (Q, K, V)), **options)
    assert str(caught.value) == text
    assert type(caught.value) is error


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (
            (ones(3), ones(3), ones(3)),
            "query: expected at least 2 dimensions (..., heads, length, dim), got shape (3,)",
        ),
        (
            (Q, ones(3), V),
            "key: expected at least 2 dimensions (..., heads, length, dim), got shape (3,)",
        ),
        (
            (Q, K[0], V[0]),
            "key: expected 4 dimensions that begin with (2,) like query's (2, 4, 5, 8), "
            "got (2, 6, 8)",
        ),
        (
            (Q[0], K, V),
            "key: expected 3 dimensions like query's (4, 5, 8), got (2, 2, 6, 8)",
        ),
        (
            (Q, ones(3, 2, 6, 8), V),
            "key: expected 4 dimensions that begin with (2,) like query's (2, 4, 5, 8), "
            "got (3, 2, 6, 8)",
        ),
        (
            (Q, K, ones(3, 2, 6, 3)),
            "value: expected 4 dimensions that begin with (2,) like query's (2, 4, 5, 8), "
            "got (3, 2, 6, 3)",
        ),
        (
            (Q, ones(2, 2, 6, 7), V),
            "key: expected last dimension 8 like query's, got shape (2, 2, 6, 7)",
        ),
        (
            (ones(5, 0), ones(6, 0), ones(6, 3)),
            "query: expected a last dimension of at least 1, got shape (5, 0)",
        ),
        (
            (Q, K, ones(2, 2, 7, 3)),
            "value: expected 2 heads and 6 rows like key's, got shape (2, 2, 7, 3)",
        ),
        (
            (Q, K, ones(2, 4, 6, 3)),
            "value: expected 2 heads and 6 rows like key's, got shape (2, 4, 6, 3)",
        ),
        (
            (Q, ones(2, 3, 6, 8), ones(2, 3, 6, 3)),
            "key: expected a number of heads that divides query's 4, got 3",
        ),
        (
            (Q, ones(2, 0, 6, 8), ones(2, 0, 6, 3)),
            "key: expected a number of heads that divides query's 4, got 0",
        ),
        (
            (np.ones((1,) * 16, np.float32), K, V),
            "query: expected at most 15 dimensions, got 16",
        ),
    ],
)
def test_shapes(arrays, text):
    refuses(ValueError, text, *arrays)


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("int32", "int32"),
        ("uint16", "uint16"),
        ("complex64", "complex64"),
        ("bool", "bool"),
        ("longdouble", str(np.dtype("longdouble"))),
        (">f4", ">f4"),
        ("O", "object"),
        ("U1", "<U1"),
    ],
)
def test_dtypes_that_are_not_floating(dtype, name):
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    refuses(TypeError, f"query: expected dtype {FLOATS}, got {name}", *arrays)
    refuses(TypeError, f"value: expected dtype {FLOATS}, got {name}", Q, K, arrays[2])


@pytest.mark.parametrize("dtype", ["float64", "float16", BFLOAT16], ids=str)
def test_dtypes_that_differ(dtype):
    name = np.dtype(dtype).name
    refuses(
        TypeError, f"key: expected dtype float32 like query's, got {name}", Q, K.astype(dtype), V
    )
    refuses(
        TypeError, f"value: expected dtype float32 like query's, got {name}", Q, K, V.astype(dtype)
    )
    refuses(
        TypeError, f"key: expected dtype {name} like query's, got float32", Q.astype(dtype), K, V
    )


@pytest.mark.parametrize(("thing", "name"), [([[1.0]], "list"), (None, "NoneType"), (1.5, "float")])
def test_things_that_are_no_array(thing, name):
    text = f"expected a NumPy array or one that speaks DLPack, got {name}"
    hint = "; pass np.asarray(...)" if name == "list" else ""
    refuses(TypeError, f"query: {text}{hint}", thing, K, V)
    refuses(TypeError, f"key: {text}{hint}", Q, thing, V)
    refuses(TypeError, f"value: {text}{hint}", Q, K, thing)
    if thing is not None:
        refuses(TypeError, f"mask: {text}", mask=thing)


def test_masked_arrays():
    text = (
        "expected an array without masked elements, got a masked array; pass its filled(...), or "
        "its data and a mask"
    )
    for place, name in enumerate(("query", "key", "value")):
        arrays = [Q, K, V]
        arrays[place] = np.ma.array(arrays[place], mask=False)
        refuses(TypeError, f"{name}: {text}", *arrays)
        with pytest.raises(TypeError, match=f"^{name}: expected an array without masked"):
            lh.attention_backward(OUT, *arrays, OUT, LSE)
    refuses(TypeError, f"mask: {text}", mask=np.ma.masked_less(ones(5, 6), 2))


def test_views_between_elements():
    fields = np.zeros((5, 8), dtype=[("a", "f4"), ("b", "i1")])["a"]
    refuses(
        ValueError,
        "query: expected strides in whole elements, got a view between elements",
        *(fields, fields, fields),
    )


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("shape", [(5, 7), (4, 6), (3, 1, 5, 6), (1, 2, 4, 5, 6), (0,), (2, 5, 6)])
def test_masks_that_do_not_broadcast(shape):
    text = f"mask: expected a shape that broadcasts to (2, 4, 5, 6), got {shape}"
    refuses(ValueError, text, mask=ones(*shape, dtype=bool))
    refuses(ValueError, text, mask=ones(*shape))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "complex64"])
def test_masks_of_another_dtype(dtype):
    text = f"mask: expected dtype bool, {FLOATS}, got {dtype}"
    refuses(TypeError, text, mask=ones(5, 6, dtype=dtype))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"key_lengths": [6, 7]},
            ValueError,
            "key_lengths: expected integers from 0 to 6 (the number of keys), "
            "got 7 for batch entry 1",
        ),
        (
            {"key_lengths": [-1, 6]},
            ValueError,
            "key_lengths: expected integers from 0 to 6 (the number of keys), "
            "got -1 for batch entry 0",
        ),
        (
            {"key_lengths": [6]},
            ValueError,
            "key_lengths: expected one number per batch entry, 2 in all, got 1",
        ),
        (
            {"key_lengths": 3},
            ValueError,
            "key_lengths: expected one number per batch entry, 2 in all, got 1",
        ),
        (
            {"key_lengths": [1.0, 2.0]},
            TypeError,
            "key_lengths: expected integers, got dtype float64",
        ),
        (
            {"key_lengths": [True, True]},
            TypeError,
            "key_lengths: expected integers, got dtype bool",
        ),
        (
            {"key_lengths": np.array([2**64 - 1, 1], np.uint64)},
            ValueError,
            "key_lengths: expected integers below 2**63, got 18446744073709551615",
        ),
        (
            {"query_offset": [1, 2, 3]},
            ValueError,
            "query_offset: expected one number per batch entry, 2 in all, got 3",
        ),
        ({"query_offset": 1.5}, TypeError, "query_offset: expected integers, got dtype float64"),
        ({"query_offset": "a"}, TypeError, "query_offset: expected integers, got dtype <U1"),
        (
            {"query_offset": 2**62},
            ValueError,
            "query_offset: expected integers from -2**60 to 2**60, got 4611686018427387904",
        ),
        (
            {"query_offset": -(10**30)},
            ValueError,
            "query_offset: expected integers from -2**60 to 2**60, got -1" + "0" * 30,
        ),
        (
            {"query_offset": [0, 2**62]},
            ValueError,
            "query_offset: expected integers from -2**60 to 2**60, got 4611686018427387904",
        ),
        (
            {"scale": [1.0, 2.0]},
            ValueError,
            "scale: expected one number per query head, 4 in all, got 2",
        ),
        (
            {"scale": ones(4, 1)},
            ValueError,
            "scale: expected a number or one per query head, got (4, 1)",
        ),
        ({"scale": "big"}, TypeError, "scale: expected numbers, got dtype <U3"),
        ({"scale": 1j}, TypeError, "scale: expected numbers, got dtype complex128"),
        ({"softcap": 0}, ValueError, "softcap: expected a number above 0, got 0.0"),
        ({"softcap": -2.5}, ValueError, "softcap: expected a number above 0, got -2.5"),
        ({"softcap": np.nan}, ValueError, "softcap: expected a number above 0, got nan"),
        ({"softcap": np.inf}, ValueError, "softcap: expected a number above 0, got inf"),
        ({"softcap": "1"}, TypeError, "softcap: expected a number, got '1'"),
        (
            {"sinks": [1.0]},
            ValueError,
            "sinks: expected one number per query head, 4 in all, got 1",
        ),
        ({"sinks": 1.0}, ValueError, "sinks: expected shape (query heads,), got ()"),
        ({"sinks": ones(4, 1)}, ValueError, "sinks: expected shape (query heads,), got (4, 1)"),
        ({"sinks": [True] * 4}, TypeError, "sinks: expected numbers, got dtype bool"),
        ({"dropout": 1.0}, ValueError, "dropout: expected a number in [0, 1), got 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout: expected a number in [0, 1), got -0.1"),
        ({"dropout": np.nan}, ValueError, "dropout: expected a number in [0, 1), got nan"),
        ({"dropout": None}, TypeError, "dropout: expected a number, got None"),
        ({"dropout": 0.5, "seed": 1.5}, TypeError, "seed: expected an integer, got 1.5"),
        ({"threads": 0}, ValueError, "threads: expected at least 1, got 0"),
        ({"threads": -3}, ValueError, "threads: expected at least 1, got -3"),
        ({"threads": 1.5}, TypeError, "threads: expected an integer, got 1.5"),
        ({"window": 0}, ValueError, "window: expected a width of at least 1, got 0"),
        ({"window": -2}, ValueError, "window: expected a width of at least 1, got -2"),
        ({"window": (-1, 0)}, ValueError, "window: expected sides of 0 or more, got (-1, 0)"),
        ({"window": (0, -1)}, ValueError, "window: expected sides of 0 or more, got (0, -1)"),
        (
            {"window": (1, 2, 3)},
            ValueError,
            "window: expected an int or (left, right), got (1, 2, 3)",
        ),
        ({"window": 1.5}, TypeError, "window: expected an integer, got 1.5"),
        ({"window": (1.5, 0)}, TypeError, "window: expected an integer, got 1.5"),
        ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
        ({"causal": None}, TypeError, "causal: expected True or False, got None"),
        ({"return_lse": 3}, TypeError, "return_lse: expected True or False, got 3"),
        ({"return_health": None}, TypeError, "return_health: expected True or False, got None"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_options(options, error, text):
    refuses(error, text, **options)


OPTIONS = ", ".join(
    ("mask", *GIVEN[:-1], "return_lse", "return_health", "return_weights", "threads")
)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("is_causal", "did you mean causal?"),
        ("attn_mask", "did you mean mask?"),
        ("dropout_p", "did you mean dropout?"),
        ("attention_mask", "did you mean mask?"),
        ("softmax_scale", "did you mean scale?"),
        ("window_size", "did you mean window?"),
        ("retrun_health", "did you mean return_health?"),
        ("enable_gqa", f"there are: {OPTIONS}"),
    ],
)
def test_options_that_there_are_not(name, hint):
    refuses(TypeError, f"attention has no option {name}; {hint}", **{name: True})
    with pytest.raises(TypeError) as caught:
        levelhead.torch.attention(*map(torch.from_numpy, (Q, K, V)), **{name: True})
    assert str(caught.value) == f"attention has no option {name}; {hint}"
    with pytest.raises(TypeError, match=f"^attention has no option {name}; "):
        lh.unscaled_attention(Q, K, V, **{name: True})
    with pytest.raises(TypeError, match=f"^attention_backward has no option {name}; "):
        lh.attention_backward(OUT, Q, K, V, OUT, LSE, **{name: True})


def test_the_limits_themselves_are_fine():
    lh.attention(Q, K, V, key_lengths=[0, 6], query_offset=2**60, dropout=0.999, threads=1)
    lh.attention(Q, K, V, query_offset=[-(2**60), 2**60], window=(0, 0), causal=True)
    lh.attention(Q, K, V, scale=np.float32(2), softcap=1e-3, threads=10**9, window=10**30)


# ---------------------------------------------------------------- other libraries and devices


class Elsewhere:
    def __dlpack__(self, **_):
        raise AssertionError("nothing may be exported from there")

    def __dlpack_device__(self):
        return (2, 0)


class Named(Elsewhere):
    device = "cuda:0"


class Broken:
    def __dlpack__(self, **_):
        raise RuntimeError("no memory left to lend")

    def __dlpack_device__(self):
        return (1, 0)


def test_arrays_on_another_device():
    text = "expected an array on the CPU, got one on"
    refuses(ValueError, f"query: {text} another device", Elsewhere(), K, V)
    refuses(ValueError, f"key: {text} cuda:0", Q, Named(), V)
    refuses(ValueError, f"mask: {text} cuda:0", mask=Named())
    refuses(ValueError, f"value: {text} meta", Q, K, torch.ones(V.shape, device="meta"))


def test_an_export_that_fails():
    refuses(
        ValueError,
        "key: expected an array that DLPack can pass on, got the error: no memory left to lend",
        *(Q, Broken(), V),
    )


def test_tensors_that_require_grad():
    q, k, v = (torch.from_numpy(x.copy()) for x in (Q, K, V))
    text = (
        "value: expected a tensor without requires_grad, as no gradient is recorded here, "
        "got one with it; pass its detach()"
    )
    refuses(ValueError, text, q, k, v.requires_grad_())
    assert lh.attention(q, k, v.detach()).shape == (2, 4, 5, 3)


def test_tensors_without_values_of_their_own():
    q, k, v = (torch.from_numpy(x.copy()) for x in (Q, K, V))
    negated = torch.complex(q, -q).conj().imag
    assert negated.is_neg() and torch.equal(negated, q)
    text = (
        "query: expected a tensor of values as they lie in memory, got one that is to be negated; "
        "pass its resolve_neg()"
    )
    refuses(ValueError, text, negated, k, v)
    assert torch.equal(lh.attention(negated.resolve_neg(), k, v), lh.attention(q, k, v))
    mode = FakeTensorMode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of asking a stand-in for its data
        text = "query: expected an array with data, got a FakeTensor without"
        refuses(ValueError, text, *(mode.from_tensor(x) for x in (q, k, v)))
    mapped = torch.func.vmap(lambda x: lh.attention(x, x, x))
    with pytest.raises(ValueError, match="query: expected an array on the CPU"):
        mapped(q)
    none = lh.attention(*(x[:0] for x in (q, k, v)))
    assert none.shape == (0, 4, 5, 3)


def test_tensors_of_another_dtype():
    q, k, v = (torch.from_numpy(x.copy()) for x in (Q, K, V))
    refuses(TypeError, f"query: expected dtype {FLOATS}, got torch.int32", q.int(), k, v)
    refuses(TypeError, "key: expected dtype float32 like query's, got float64", q, k.double(), v)
    refuses(
        TypeError,
        f"mask: expected dtype bool, {FLOATS}, got torch.int64",
        *(q, k, v),
        mask=torch.ones(5, 6, dtype=torch.int64),
    )


# ---------------------------------------------------------------- backward


FORWARD = lh.attention(Q, K, V, return_lse=True)
OUT, LSE = FORWARD.output, FORWARD.lse


@pytest.mark.parametrize(
    ("arrays", "error", "text"),
    [
        (
            (ones(2, 4, 5, 4), Q, K, V, OUT, LSE),
            ValueError,
            "grad_output: expected shape (2, 4, 5, 3), got (2, 4, 5, 4)",
        ),
        (
            (OUT.astype("f8"), Q, K, V, OUT, LSE),
            TypeError,
            "grad_output: expected dtype float32 like query's, got float64",
        ),
        (
            (OUT, Q, K, V, OUT[0], LSE),
            ValueError,
            "output: expected shape (2, 4, 5, 3), got (4, 5, 3)",
        ),
        ((OUT, Q, K, V, OUT, LSE[0]), ValueError, "lse: expected shape (2, 4, 5), got (4, 5)"),
        (
            (OUT, Q, K, V, OUT, LSE.astype("f8")),
            TypeError,
            "lse: expected dtype float32, got float64",
        ),
        (
            (OUT, Q, K, V, OUT, np.asfortranarray(LSE)),
            ValueError,
            "lse: expected a contiguous array as the forward pass returns it, "
            "got strides (1, 2, 8)",
        ),
        (
            (OUT, Q, K, V, OUT, None),
            TypeError,
            "lse: expected a NumPy array or one that speaks DLPack, got NoneType",
        ),
        (
            (None, Q, K, V, OUT, LSE),
            TypeError,
            "grad_output: expected a NumPy array or one that speaks DLPack, got NoneType",
        ),
        (
            (OUT, Q, ones(2, 2, 6, 7), V, OUT, LSE),
            ValueError,
            "key: expected last dimension 8 like query's, got shape (2, 2, 6, 7)",
        ),
    ],
)
def test_backward(arrays, error, text):
    with pytest.raises(error) as caught:
        lh.attention_backward(*arrays)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"dropout": 0.5},
            ValueError,
            "seed: expected the seed of the forward pass with dropout, got None",
        ),
        ({"threads": 0}, ValueError, "threads: expected at least 1, got 0"),
        ({"return_health": 1}, TypeError, "return_health: expected True or False, got 1"),
    ],
)
def test_backward_options(options, error, text):
    with pytest.raises(error) as caught:
        lh.attention_backward(OUT, Q, K, V, OUT, LSE, **options)
    assert str(caught.value) == text
