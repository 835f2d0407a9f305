"""The options of `attention`: their order and their checks, for NumPy and for torch.

`normalise` brings them to the form and the order in which the engine takes them. Options that may
be several numbers become arrays here and tensors in levelhead.torch; all else is the same there.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _engine
from ._hints import shown

OPEN = _engine.OPEN
ORDER = (
    "left",  # of the window; causal closes the right side
    "right",
    "query_offset",  # one for all, one per batch entry, or None
    "key_lengths",  # one per batch entry, or None
    "scale",  # one for all, one per query head, or None
    "softcap",  # 0: none
    "sinks",  # one per query head, or None
    "dropout",
    "seed",  # from 0 to 2**64 - 1
    "threads",  # 0: all that there are
)
GIVEN = ("causal", "window", *ORDER[2:])  # as the caller gives them; causal and window make two
Window = int | tuple[int | None, int | None] | None


class AttentionOptions(TypedDict, total=False):
    """The options as the caller gives them, for the overloads of `attention`."""

    mask: Any
    causal: bool
    window: Window
    query_offset: Any
    key_lengths: Any
    scale: Any
    softcap: float | None
    sinks: Any
    dropout: float
    seed: int | None
    threads: int | None


Options = tuple[int, int, Any, Any, Any, float, Any, float, Any, int]

INTEGERS = ("query_offset", "key_lengths")  # of the options that may be several numbers
_FURTHEST = 2**60  # with a larger offset, a position plus a window could overflow in the engine
Masked = np.ma.MaskedArray
_READABLE = {list, tuple, np.ndarray}
TEXT = (str, bytes, bytearray, memoryview)  # sequences, but of no numbers


# ---------------------------------------------------------------- one number


def flag(name: str, value: Any) -> bool:
    """A bool, and nothing that only could be taken for one."""
    if type(value) is bool:
        return value
    if type(value) is not np.bool_:
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def integer(name: str, value: Any) -> int:
    """An int, or what can be used as one without loss."""
    try:
        return index(value)
    except Exception:  # also of a tensor that has no value
        raise TypeError(f"{name}: expected an integer, got {shown(value)}") from None


def number(name: str, value: Any) -> float:
    """A float, or what can be used as one."""
    if type(value) is float:
        return value
    if type(value) is not int and _is_tensor(value):
        value = _without_gradient(name, value)
    # float() would read text, take an array with one number in it, and one that is masked as NaN.
    if not isinstance(value, (*TEXT, Masked)) and not getattr(value, "shape", ()):
        try:
            return float(value)
        except OverflowError:
            text = f"expected a number that a float can hold, got {shown(value)}"
            raise ValueError(f"{name}: {text}") from None
        except Exception:  # also of a tensor that has no value
            pass
    raise TypeError(f"{name}: expected a number, got {shown(value)}")


def _sides(window: Window) -> tuple[int, int]:
    if type(window) is tuple or isinstance(window, Sequence):  # to ask for the latter takes long
        if type(window) is not tuple and isinstance(window, TEXT):
            raise TypeError(f"window: expected an int or (left, right), got {shown(window)}")
        if len(window) != 2:
            raise ValueError(f"window: expected an int or (left, right), got {shown(window)}")
        left, right = (OPEN if side is None else integer("window", side) for side in window)
        if left < 0 or right < 0:
            raise ValueError(f"window: expected sides of 0 or more, got {shown(window)}")
        return min(left, OPEN), min(right, OPEN)
    width = integer("window", window)
    if width < 1:
        raise ValueError(f"window: expected a width of at least 1, got {shown(width)}")
    return min(width - 1, OPEN), 0


# ---------------------------------------------------------------- several numbers


def array_of(name: str, value: Any) -> Any:
    """An int or float for all, or an array of int64 or float64 as the engine takes it."""
    if type(value) not in _READABLE:
        value = _readable(name, value)
    try:
        array = np.asarray(value)
    except Exception:  # lists of different lengths, a tensor that has no values, ...
        raise TypeError(f"{name}: expected {_kind(name)}, got {shown(value)}") from None
    return _integers(name, array) if name in INTEGERS else _numbers(name, array)


def _readable(name: str, value: Any) -> Any:
    """What NumPy can read, and not otherwise than it is meant."""
    if _is_tensor(value):
        value = _without_gradient(name, value).resolve_neg()
        if value.device.type != "cpu":
            raise ValueError(f"{name}: expected an array on the CPU, got one on {value.device}")
        # NumPy has no bfloat16.
        return value.double() if value.is_floating_point() and name not in INTEGERS else value
    if isinstance(value, Masked):
        text = f"expected {_kind(name)}, got a masked array; pass its filled(...)"
        raise TypeError(f"{name}: {text}")
    if isinstance(value, bytearray | memoryview):  # their bytes
        raise TypeError(f"{name}: expected {_kind(name)}, got {shown(value)}")
    return value


def _kind(name: str) -> str:
    return "integers" if name in INTEGERS else "numbers"


def _integers(name: str, array: NDArray[Any]) -> Any:
    if array.dtype.kind != "i":
        # NumPy takes ints of 64 bits for uint64, and of more for objects.
        large = [x for x in array.flat if isinstance(x, int | np.uint64) and not x < 2**63]
        if large:
            raise ValueError(f"{name}: expected integers below 2**63, got {shown(int(large[0]))}")
        if array.dtype.kind != "u" and array.size:
            raise TypeError(f"{name}: expected integers, got dtype {array.dtype}")
    if array.ndim == 0 and name == "query_offset":
        return int(array)
    return np.ascontiguousarray(array, np.int64).reshape(-1)


def _numbers(name: str, array: NDArray[Any]) -> Any:
    kind = array.dtype.kind
    if kind == "O" and array.ndim == 0:  # a Fraction, an int of more than 64 bits
        array = np.asarray(number(name, array[()]))
    # bfloat16 and the like (ml_dtypes) are of the same kind as records, which are no numbers.
    elif kind not in "fiuV" or (kind == "V" and issubclass(array.dtype.type, np.void)):
        raise TypeError(f"{name}: expected numbers, got dtype {array.dtype}")
    if array.dtype.char == "g":  # a long double may be more than a double can hold
        with np.errstate(over="ignore"):
            array = array.astype(np.float64)
    if array.ndim == 1:
        return np.asarray(array, np.float64, order="C")
    if array.ndim == 0 and name == "scale":
        return float(array)
    wanted = "a number or one per query head" if name == "scale" else "shape (query heads,)"
    raise ValueError(f"{name}: expected {wanted}, got {array.shape}")


# ---------------------------------------------------------------- tensors of torch


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # not imported for this
    return torch is not None and isinstance(value, torch.Tensor)


def _without_gradient(name: str, tensor: Any) -> Any:
    """A tensor whose numbers may be read, as nobody waits for their gradient."""
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor without requires_grad, as no gradient is recorded here, "
            "got one with it; pass its detach()"
        )
    return tensor.detach()


# ---------------------------------------------------------------- all of them


def _draw() -> int:
    return secrets.randbits(64)


def normalise(
    causal: bool = False,
    window: Window = None,
    query_offset: int | ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    threads: int | None = None,
    *,
    draw: Callable[[], Any] = _draw,
    several: Callable[[str, Any], Any] = array_of,
) -> Options:
    """The options in their ORDER. How many numbers there must be is the engine's to check.

    draw:    gives the seed where dropout has none
    several: takes an option that may be several numbers, with its name
    """
    left = right = OPEN
    if window is not None:
        left, right = _sides(window)
    if causal is not False and flag("causal", causal):
        right = min(right, 0)
    if query_offset is not None:
        if type(query_offset) is not int:
            query_offset = several("query_offset", query_offset)
        if type(query_offset) is int and not -_FURTHEST <= query_offset <= _FURTHEST:
            text = f"expected integers from -2**60 to 2**60, got {shown(query_offset)}"
            raise ValueError(f"query_offset: {text}")
    if key_lengths is not None:
        key_lengths = several("key_lengths", key_lengths)
    if scale is not None and type(scale) is not float:
        scale = several("scale", scale)
    if softcap is None:
        softcap = 0.0
    elif not 0 < (softcap := number("softcap", softcap)) < math.inf:
        raise ValueError(f"softcap: expected a number above 0, got {softcap}")
    if sinks is not None:
        sinks = several("sinks", sinks)
    if type(dropout) is not float:
        dropout = number("dropout", dropout)
    if seed is not None:
        seed = integer("seed", seed) % 2**64
    elif not dropout:
        seed = 0
    if dropout:
        if not 0 < dropout < 1:
            raise ValueError(f"dropout: expected a number in [0, 1), got {dropout}")
        if seed is None:
            seed = draw()
    if threads is None:
        threads = 0
    elif (threads := min(integer("threads", threads), 1024)) < 1:
        raise ValueError(f"threads: expected at least 1, got {shown(threads)}")
    return (
        left, right, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads,
    )  # fmt: skip
