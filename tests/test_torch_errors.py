"""levelhead.torch.attention given the wrong thing: what it says, word for word."""

import numpy as np
import pytest
import torch
from torch_support import same, tensors

import levelhead.torch as lt

Q, K, V = tensors(2)


@pytest.mark.parametrize(
    ("given", "opts", "error", "text"),
    [
        ((np.ones((5, 8)), K, V), {}, TypeError, "query: expected a torch.Tensor, got ndarray"),
        ((Q, None, V), {}, TypeError, "key: expected a torch.Tensor, got NoneType"),
        (
            (Q, K, V.to("meta")),
            {},
            ValueError,
            "value: expected a tensor on cpu like query, got meta",
        ),
        (
            (Q, K, V),
            {"mask": torch.ones(5, 7, device="meta")},
            ValueError,
            "mask: expected a tensor on cpu like query, got meta",
        ),
        ((Q, K, V), {"mask": [[True]]}, TypeError, "mask: expected a torch.Tensor, got list"),
        (
            (Q, K, V),
            {"mask": torch.ones(5, 7, dtype=torch.int64)},
            TypeError,
            "mask: expected dtype bool, float32, float64, float16 or bfloat16, got torch.int64",
        ),
        (
            (Q, K, V),
            {"mask": torch.ones(5, 6)},
            ValueError,
            "mask: expected a shape that broadcasts to (2, 4, 5, 7), got (5, 6)",
        ),
        (
            (torch.tensor(1.0), K, V),
            {},
            ValueError,
            "query: expected at least 2 dimensions (..., heads, length, dim), got shape ()",
        ),
        (
            (Q[0], K, V),
            {},
            ValueError,
            "key: expected 3 dimensions like query's (4, 5, 8), got (2, 2, 7, 8)",
        ),
        (
            (Q, K.double(), V),
            {},
            TypeError,
            "key: expected dtype float32 like query's, got float64",
        ),
        (
            (Q.int(), K, V),
            {},
            TypeError,
            "query: expected dtype float32, float64, float16 or bfloat16, got torch.int32",
        ),
        ((Q, K, V), {"causal": 1}, TypeError, "causal: expected True or False, got 1"),
        (
            (Q, K, V),
            {"return_lse": 1},
            TypeError,
            "return_lse: expected True or False, got 1",
        ),
        (
            (Q, K, V),
            {"window": 0},
            ValueError,
            "window: expected a width of at least 1, got 0",
        ),
        (
            (Q, K, V),
            {"query_offset": 1.5},
            TypeError,
            "query_offset: expected an integer, got 1.5",
        ),
        (
            (Q, K, V),
            {"query_offset": "a"},
            TypeError,
            "query_offset: expected an integer, got 'a'",
        ),
        (
            (Q, K, V),
            {"query_offset": torch.ones(2)},
            TypeError,
            "query_offset: expected integers, got dtype torch.float32",
        ),
        (
            (Q, K, V),
            {"query_offset": [1, 2, 3]},
            ValueError,
            "query_offset: expected one number per batch entry, 2 in all, got 3",
        ),
        (
            (Q, K, V),
            {"key_lengths": [True, False]},
            TypeError,
            "key_lengths: expected integers, got dtype torch.bool",
        ),
        (
            (Q, K, V),
            {"key_lengths": [9, 2]},
            ValueError,
            "key_lengths: expected integers from 0 to 7 (the number of keys), got 9 for batch "
            "entry 0",
        ),
        (
            (Q, K, V),
            {"key_lengths": ["a"]},
            TypeError,
            "key_lengths: expected numbers, got ['a']",
        ),
        ((Q, K, V), {"scale": "a"}, TypeError, "scale: expected a number, got 'a'"),
        (
            (Q, K, V),
            {"scale": torch.ones(2, 2)},
            ValueError,
            "scale: expected a number or one per query head, got shape (2, 2)",
        ),
        (
            (Q, K, V),
            {"scale": torch.ones(4, requires_grad=True)},
            ValueError,
            "scale: expected a tensor without requires_grad, as no gradient flows to it, got one "
            "with it; multiply query by it instead, or pass its detach()",
        ),
        (
            (Q, K, V),
            {"sinks": torch.ones(2, 2)},
            ValueError,
            "sinks: expected shape (query heads,), got (2, 2)",
        ),
        (
            (Q, K, V),
            {"sinks": torch.ones(3)},
            ValueError,
            "sinks: expected one number per query head, 4 in all, got 3",
        ),
        ((Q, K, V), {"softcap": 0}, ValueError, "softcap: expected a number above 0, got 0.0"),
        (
            (Q, K, V),
            {"dropout": 1.0},
            ValueError,
            "dropout: expected a number in [0, 1), got 1.0",
        ),
        (
            (Q, K, V),
            {"dropout": 0.5, "seed": 1.5},
            TypeError,
            "seed: expected an integer, got 1.5",
        ),
        ((Q, K, V), {"threads": 0}, ValueError, "threads: expected at least 1, got 0"),
    ],
)
def test_errors(given, opts, error, text):
    with pytest.raises(error) as caught:
        lt.attention(*given, **opts)
    assert str(caught.value) == text and type(caught.value) is error


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    nested = torch.nested.nested_tensor([*Q], layout=layout)
    given = {"query": Q, "key": Q, "value": Q, "mask": None, "scale": None, "sinks": None}
    for name in given:
        with pytest.raises(TypeError) as caught:
            lt.attention(**{**given, name: nested})
        assert str(caught.value) == f"{name}: expected a dense tensor, got a nested one"
    with pytest.raises(TypeError, match=r"^query: expected a dense tensor, got a nested one$"):
        lt.scaled_dot_product_attention(nested, nested, nested)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_numbers_of_any_kind(kind):
    want = lt.attention(Q, K, V, causal=True, query_offset=[1, 3], key_lengths=[5, 2])
    got = lt.attention(Q, K, V, causal=True, query_offset=kind([1, 3]), key_lengths=kind([5, 2]))
    assert same(got, want)
    per_head = [0.1, 0.2, 0.3, 0.4]
    assert same(lt.attention(Q, K, V, scale=kind(per_head)), lt.attention(Q, K, V, scale=per_head))


def test_a_number_in_a_tensor_is_for_all():
    for opts in ({"scale": 0.3}, {"query_offset": 2, "causal": True}):
        tensor = {k: x if k == "causal" else torch.tensor(x) for k, x in opts.items()}
        atol = 1e-7  # scale: a float32 tensor holds another 0.3
        torch.testing.assert_close(
            lt.attention(Q, K, V, **tensor), lt.attention(Q, K, V, **opts), atol=atol, rtol=1e-6
        )
    assert lt.attention(Q[:0], K[:0], V[:0], key_lengths=[]).shape == (0, 4, 5, 8)
