"""The options in one place: their order is the engine's, and wrong ones get the usual sentence.

A wrong option is refused by NumPy's and by torch's attention alike, with a TypeError or ValueError
that names it, whatever it is: never with an error of another library.
"""

import collections
import inspect
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from support import BFLOAT16, inputs, options, same_bits

import levelhead as lh
import levelhead.torch
from levelhead import _engine
from levelhead._options import GIVEN, OPEN, ORDER, AttentionOptions, normalise

Q, K, V = inputs(2, kv_heads=2)  # 4 query heads, 7 keys
TENSORS = [torch.from_numpy(x) for x in (Q, K, V)]
HUGE = 10**400
LONGER = 10**5000  # Python refuses to print it


def test_the_order_is_the_engines():
    for function, last in ((_engine.forward, "lse"), (_engine.backward, "health")):
        names = re.findall(r"(\w+):", function.__doc__.splitlines()[0])
        start = names.index("mask") + 1
        assert tuple(names[start : names.index(last, start)]) == ORDER
    assert tuple(inspect.signature(normalise).parameters) == (*GIVEN, "draw", "several")
    assert tuple(AttentionOptions.__annotations__) == ("mask", *GIVEN)
    given = {name: x for some in options(2, 4, 5, 7).values() for name, x in some.items()}
    given |= {"window": None, "causal": False, "threads": 3}
    given.pop("mask")
    taken = dict(zip(ORDER, normalise(**given), strict=True))
    assert taken.pop("left") == taken.pop("right") == OPEN
    for name, value in taken.items():
        np.testing.assert_array_equal(value, given[name], err_msg=name)


# ---------------------------------------------------------------- what is wrong, word for word


class NoArray:
    def __array__(self, *_, **__):
        raise RuntimeError("no memory")

    def __repr__(self):
        return "<NoArray>"


GRADIENT = "expected a tensor without requires_grad, as no gradient is recorded here, got one with"
LEARNT = torch.ones(4, requires_grad=True)
MASKED = np.ma.array([1, 2], mask=[False, True])
META = "got tensor(..., device='meta', size=()"
DIGITS = "1" + "0" * 96 + "..."


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scale": LEARNT}, ValueError, f"scale: {GRADIENT} it; pass its detach()"),
        ({"scale": LEARNT[0]}, ValueError, f"scale: {GRADIENT} it; pass its detach()"),
        ({"sinks": LEARNT}, ValueError, f"sinks: {GRADIENT} it; pass its detach()"),
        ({"softcap": LEARNT[0]}, ValueError, f"softcap: {GRADIENT} it; pass its detach()"),
        (
            {"scale": HUGE},
            ValueError,
            f"scale: expected a number that a float can hold, got {DIGITS}",
        ),
        (
            {"softcap": HUGE},
            ValueError,
            f"softcap: expected a number that a float can hold, got {DIGITS}",
        ),
        (
            {"softcap": LONGER},
            ValueError,
            "softcap: expected a number that a float can hold, got an object of type int that "
            "cannot be printed",
        ),
        (
            {"dropout": -HUGE},
            ValueError,
            f"dropout: expected a number that a float can hold, got -{DIGITS[:-4]}...",
        ),
        (
            {"query_offset": 2**70},
            ValueError,
            "query_offset: expected integers from -2**60 to 2**60, got 1180591620717411303424",
        ),
        (
            {"query_offset": LONGER},
            ValueError,
            "query_offset: expected integers from -2**60 to 2**60, got an object of type int that "
            "cannot be printed",
        ),
        (
            {"query_offset": [2**70, 0]},
            ValueError,
            "query_offset: expected integers below 2**63, got 1180591620717411303424",
        ),
        (
            {"key_lengths": [1, LONGER]},
            ValueError,
            "key_lengths: expected integers below 2**63, got an object of type int that cannot be "
            "printed",
        ),
        (
            {"key_lengths": np.array([1, 2], object)},
            TypeError,
            "key_lengths: expected integers, got dtype object",
        ),
        (
            {"scale": np.array([1.0] * 4, object)},
            TypeError,
            "scale: expected numbers, got dtype object",
        ),
        ({"scale": [[1], [1, 2]]}, TypeError, "scale: expected numbers, got [[1], [1, 2]]"),
        ({"sinks": [[1.0] * 4]}, ValueError, "sinks: expected shape (query heads,), got (1, 4)"),
        ({"sinks": np.zeros(4, "V4")}, TypeError, "sinks: expected numbers, got dtype |V4"),
        ({"sinks": NoArray()}, TypeError, "sinks: expected numbers, got <NoArray>"),
        (
            {"sinks": torch.ones(4, device="meta")},
            ValueError,
            "sinks: expected an array on the CPU, got one on meta",
        ),
        (
            {"scale": MASKED},
            TypeError,
            "scale: expected numbers, got a masked array; pass its filled(...)",
        ),
        (
            {"key_lengths": MASKED},
            TypeError,
            "key_lengths: expected integers, got a masked array; pass its filled(...)",
        ),
        ({"softcap": np.ma.masked}, TypeError, "softcap: expected a number, got masked"),
        ({"softcap": np.ones(1)}, TypeError, "softcap: expected a number, got array([1.])"),
        ({"dropout": np.zeros(2)}, TypeError, "dropout: expected a number, got array([0., 0.])"),
        (
            {"dropout": torch.zeros(2)},
            TypeError,
            "dropout: expected a number, got tensor([0., 0.])",
        ),
        ({"dropout": b"0"}, TypeError, "dropout: expected a number, got b'0'"),
        (
            {"query_offset": bytearray(b"ab")},
            TypeError,
            "query_offset: expected integers, got bytearray(b'ab')",
        ),
        ({"window": b"ab"}, TypeError, "window: expected an int or (left, right), got b'ab'"),
        ({"window": "ab"}, TypeError, "window: expected an int or (left, right), got 'ab'"),
        ({"window": np.ones(2)}, TypeError, "window: expected an integer, got array([1., 1.])"),
        ({"seed": "ab"}, TypeError, "seed: expected an integer, got 'ab'"),
        (
            {"threads": torch.tensor(2, device="meta")},
            TypeError,
            f"threads: expected an integer, {META}, dtype=torch.int64)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numpy(options, error, text):
    with pytest.raises(error) as caught:
        lh.attention(Q, K, V, **options)
    assert str(caught.value) == text and type(caught.value) is error
    forward = lh.attention(Q, K, V, return_lse=True)
    with pytest.raises(error) as caught:
        lh.attention_backward(
            forward.output, Q, K, V, forward.output, forward.lse, **{"seed": 1, **options}
        )
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"scale": [LEARNT[0]] * 4},
            ValueError,
            "scale: expected a tensor without requires_grad, as no gradient flows to it, got one "
            "with it; multiply query by it instead, or pass its detach()",
        ),
        (
            {"scale": HUGE},
            ValueError,
            f"scale: expected a number that a float can hold, got {DIGITS}",
        ),
        (
            {"softcap": HUGE},
            ValueError,
            f"softcap: expected a number that a float can hold, got {DIGITS}",
        ),
        ({"softcap": LEARNT[0]}, ValueError, f"softcap: {GRADIENT} it; pass its detach()"),
        (
            {"query_offset": -(2**70)},
            ValueError,
            "query_offset: expected integers from -2**60 to 2**60, got -1180591620717411303424",
        ),
        ({"key_lengths": [1, None]}, TypeError, "key_lengths: expected numbers, got [1, None]"),
        ({"key_lengths": {1}}, TypeError, "key_lengths: expected numbers, got {1}"),
        (
            {"key_lengths": 1j},
            TypeError,
            "key_lengths: expected integers, got dtype torch.complex64",
        ),
        (
            {"key_lengths": np.array([2**64 - 1, 1], np.uint64)},
            ValueError,
            "key_lengths: expected integers below 2**63, got 18446744073709551615",
        ),
        (
            {"query_offset": torch.ones(2, device="meta", dtype=torch.int64)},
            ValueError,
            "query_offset: expected a tensor on cpu like query, got meta",
        ),
        (
            {"scale": torch.ones(4, device="meta")},
            ValueError,
            "scale: expected a tensor on cpu like query, got meta",
        ),
        (
            {"scale": MASKED},
            TypeError,
            "scale: expected numbers, got a masked array; pass its filled(...)",
        ),
        (
            {"scale": torch.ones(4).bool()},
            TypeError,
            "scale: expected numbers, got dtype torch.bool",
        ),
        (
            {"sinks": torch.ones(4) * 1j},
            TypeError,
            "sinks: expected numbers, got dtype torch.complex64",
        ),
        (
            {"sinks": torch.ones(4).to_sparse()},
            TypeError,
            "sinks: expected a dense tensor, got one of layout torch.sparse_coo",
        ),
        ({"sinks": [[1.0] * 4]}, TypeError, "sinks: expected a torch.Tensor, got list"),
        (
            {"dropout": torch.zeros(2)},
            TypeError,
            "dropout: expected a number, got tensor([0., 0.])",
        ),
        (
            {"softcap": torch.tensor(1.0, device="meta")},
            TypeError,
            f"softcap: expected a number, {META})",
        ),
        ({"window": b"ab"}, TypeError, "window: expected an int or (left, right), got b'ab'"),
        ({"seed": "ab"}, TypeError, "seed: expected an integer, got 'ab'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_torch(options, error, text):
    with pytest.raises(error) as caught:
        levelhead.torch.attention(*TENSORS, **options)
    assert str(caught.value) == text and type(caught.value) is error


def test_lists_as_tensors():
    for place, name in enumerate(("query", "key", "value")):
        given = [*TENSORS]
        given[place] = given[place].tolist()
        with pytest.raises(TypeError) as caught:
            levelhead.torch.attention(*given)
        said = f"{name}: expected a torch.Tensor, got list; pass torch.as_tensor(...)"
        assert str(caught.value) == said


# ---------------------------------------------------------------- whatever is given


class Odd:
    def __float__(self):
        raise RuntimeError("no float")

    __index__ = __len__ = __float__
    __repr__ = object.__repr__


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no name")


THINGS = {
    "huge": HUGE, "-huge": -HUGE, "longer": LONGER, "2**63": 2**63, "-2**70": -(2**70),
    "[2**70]": [2**70] * 2, "[huge]": [HUGE] * 4, "[huge, .5]": [HUGE, 0.5, 0.5, 0.5],
    "nan": float("nan"), "complex": 1j, "str": "ab", "no str": "", "surrogate": "\ud800",
    "bytes": b"ab", "bytearray": bytearray(b"ab"), "memoryview": memoryview(b"ab"), "...": ...,
    "[]": [], "()": (), "{}": {}, "dict": {1: 2}, "set": {1, 2}, "range": range(3),
    "iterator": iter([1, 2]), "slice": slice(1, 2), "type": int, "function": len,
    "nested": [(1, 2, 3)], "[None]": [None] * 2, "ragged": [[1], [1, 2]], "mixed": ["a", 1],
    "triple": (1, 2, 3), "deque": collections.deque("abc"), "odd": Odd(), "[odd]": [Odd()] * 4,
    "unprintable": Unprintable(), "no array": NoArray(), "fractions": [Fraction(1, 2)] * 3,
    "decimals": [Decimal(1)] * 3, "array": np.ones(3), "matrix": np.ones((2, 2)),
    "complexes": np.ones(4, complex), "strings": np.array(["a"] * 4),
    "objects": np.array([Odd()] * 4), "void": np.zeros(4, "V4"),
    "records": np.zeros(4, [("a", "f4")]), "times": np.zeros(2, "m8[s]"), "masked": np.ma.masked,
    "masked array": MASKED, "uint64": np.array([2**64 - 1] * 2, np.uint64),
    "tensor": torch.ones(3), "2-D tensor": torch.ones(2, 2), "complex tensor": torch.ones(4) * 1j,
    "sparse": torch.ones(4).to_sparse(), "meta": torch.tensor(0.5, device="meta"),
    "ints on meta": torch.ones(2, device="meta").long(), "tensors": [torch.ones(4)] * 4,
}  # fmt: skip
TAKEN = {  # what is right for an option after all
    "window": {"huge", "longer", "2**63", "[2**70]", "[None]"},
    "scale": {"2**63", "-2**70", "nan"},
    "softcap": {"2**63"},
    "seed": {"huge", "-huge", "longer", "2**63", "-2**70"},
    "threads": {"huge", "longer", "2**63"},
}


@pytest.mark.parametrize("option", [*GIVEN, "mask", "return_health"])
@pytest.mark.parametrize("thing", THINGS)
def test_no_error_of_another_kind(option, thing):
    options = {option: THINGS[thing], **({"dropout": 0.5} if option == "seed" else {})}
    for attend, arrays in ((lh.attention, (Q, K, V)), (levelhead.torch.attention, TENSORS)):
        if thing in TAKEN.get(option, ()):
            assert attend(*arrays, **options).shape == (2, 4, 5, 8)
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            attend(*arrays, **options)
        assert type(caught.value) in (TypeError, ValueError)
        assert re.match(rf"{option}: expected .*, got .+", str(caught.value)), str(caught.value)
        assert len(str(caught.value)) < 250


# ---------------------------------------------------------------- what is taken


def test_numbers_of_16_bits_and_other_kinds():
    per_head = [0.5, 0.25, -1.0, 2.0]  # each a bfloat16
    want = lh.attention(Q, K, V, scale=per_head, sinks=per_head)
    kinds = [
        np.array(per_head).astype(BFLOAT16),
        np.array(per_head, np.float16),
        np.array(per_head, np.longdouble),
        torch.tensor(per_head).bfloat16(),
        torch.tensor(per_head).half(),
        torch.complex(torch.ones(4), -torch.tensor(per_head)).conj().imag,
    ]
    assert kinds[-1].is_neg()
    for kind in kinds:
        assert same_bits(lh.attention(Q, K, V, scale=kind, sinks=kind), want)
        theirs = levelhead.torch.attention(*TENSORS, scale=kind, sinks=torch.tensor(per_head))
        assert same_bits(theirs.numpy(), want)
    one = lh.attention(Q, K, V, scale=0.5)
    for half in (Fraction(1, 2), Decimal("0.5"), np.array(0.5, BFLOAT16), BFLOAT16.type(0.5)):
        assert same_bits(lh.attention(Q, K, V, scale=half), one)
        assert same_bits(levelhead.torch.attention(*TENSORS, scale=half).numpy(), one)
    assert same_bits(lh.attention(Q, K, V, scale=torch.tensor(0.5).bfloat16()), one)


def test_a_tensor_with_a_gradient_that_nobody_wants():
    want = lh.attention(Q, K, V, scale=[1.0] * 4, sinks=[1.0] * 4)
    with torch.no_grad():
        assert same_bits(lh.attention(Q, K, V, scale=LEARNT, sinks=LEARNT), want)


def test_large_ints_that_mean_something():
    assert same_bits(lh.attention(Q, K, V, window=HUGE), lh.attention(Q, K, V, window=99))
    seeded = [lh.attention(Q, K, V, dropout=0.5, seed=seed) for seed in (7, 7 + 2**64, 8)]
    assert same_bits(seeded[0], seeded[1]) and not same_bits(seeded[0], seeded[2])
    assert same_bits(lh.attention(Q, K, V, dropout=False), lh.attention(Q, K, V))
