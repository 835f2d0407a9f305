"""The operator: options normalised here, shapes checked and the work done by the engine."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from operator import index
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _engine
from ._health import GradHealth
from ._hints import refuse_options
from ._result import AttentionGradients, AttentionResult

OPEN = _engine.OPEN
Window = int | tuple[int | None, int | None] | None
Options = tuple[int, int, Any, Any, Any, float, Any, float, int, int]


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    window: Window = None,
    query_offset: int | ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    return_health: bool = False,
    return_weights: bool = False,
    threads: int | None = None,
    **unknown: NoReturn,
) -> Any:
    """Scaled dot-product attention, softmax(QKᵀ·scale + mask)V, exact and in linear memory.

    >>> import numpy as np, levelhead as lh
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), np.float32)
    >>> lh.attention(q, k, v, causal=True).shape
    (8, 100, 64)
    >>> result = lh.attention(q, k, v, return_health=True)
    >>> result.health.score_max.shape  # one number a head
    (8,)

    query, key, value: (..., Hq, L, Dk), (..., Hkv, S, Dk), (..., Hkv, S, Dv), NumPy arrays or any
        that speak DLPack on the CPU, of one dtype: float32, float64, float16 or bfloat16. Hq is a
        multiple of Hkv. Two dimensions are one head, three are heads without a batch. Nothing is
        copied; the results are arrays of the query's kind.
    mask: broadcastable to (..., Hq, L, S). bool: True may attend. float: added to the scores.
    causal: a query sees the keys at or before its own position.
    window: (left, right): a query at position p sees keys p - left ... p + right; None leaves a
        side open. An int w means (w - 1, 0).
    query_offset: the position of the first query among the keys, one for all or one per batch
        entry. None = S - L: the queries are the last L positions.
    key_lengths: one int per batch entry: keys at or past it do not exist and cost nothing.
    scale: None = 1/√Dk, a number, or one per query head.
    softcap: c·tanh(score/c) before the mask.
    sinks: (Hq,): a logit per head that joins the softmax's denominator and has no value.
    dropout, seed: on the weights; the same seed drops the same weights, whatever the threads.
    return_lse, return_health, return_weights: any of them makes the result an AttentionResult.
    threads: None = all that the process may use.
    """
    if unknown:
        refuse_options(attention, unknown)
    options = _options(
        causal, window, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads
    )
    if not type(return_lse) is type(return_health) is type(return_weights) is bool:
        return_lse = _flag("return_lse", return_lse)
        return_health = _flag("return_health", return_health)
        return_weights = _flag("return_weights", return_weights)
    try:
        result = _engine.forward(
            query, key, value, mask, *options, return_lse, return_health, return_weights
        )
    except TypeError as error:
        raise _hinted(error, query=query, key=key, value=value) from None
    if type(result) is not AttentionResult:
        return _like(query, result)
    if (output := _like(query, result[0])) is result[0]:
        return result
    _, lse, weights, health = result
    return AttentionResult(
        output,
        None if lse is None else _like(query, lse),
        None if weights is None else _like(query, weights),
        health,
    )


def attention_backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    lse: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    window: Window = None,
    query_offset: int | ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_health: bool = False,
    threads: int | None = None,
    **unknown: NoReturn,
) -> AttentionGradients:
    """Gradients of `attention` with respect to query, key and value.

    >>> import numpy as np, levelhead as lh
    >>> q, k, v, g = np.random.default_rng(0).standard_normal((4, 8, 100, 64), np.float32)
    >>> r = lh.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv, health = lh.attention_backward(
    ...     g, q, k, v, r.output, r.lse, causal=True, return_health=True)
    >>> dq.shape, health.survival.shape  # the share of gradient that passes the softmax, a head
    ((8, 100, 64), (8,))

    grad_output: (..., Hq, L, Dv), the gradient of the output.
    output, lse: as the forward pass returned them, with the same options as are given here.
    return_health: also measure how much gradient gets through the softmax, per head.
    The weights are recomputed tile by tile; there is no L×S matrix here either.
    """
    if unknown:
        refuse_options(attention_backward, unknown)
    if dropout and seed is None:
        raise ValueError("seed: expected the seed of the forward pass with dropout, got None")
    options = _options(
        causal, window, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads
    )
    return_health = _flag("return_health", return_health)
    try:
        dq, dk, dv, sums, _ = _engine.backward(
            grad_output, query, key, value, output, lse, mask, *options, return_health, False
        )
    except TypeError as error:
        raise _hinted(error, query=query, key=key, value=value) from None
    return AttentionGradients(
        _like(query, dq),
        _like(query, dk),
        _like(query, dv),
        None if sums is None else GradHealth(sums),
    )


def cpu_info() -> dict[str, Any]:
    """Which build of the kernels runs here, and on how many threads.

    >>> import levelhead as lh
    >>> sorted(lh.cpu_info())
    ['isa', 'threads', 'vector_bits']

    The environment variable LEVELHEAD_ISA ("avx2", "portable") chooses another build.
    """
    return _engine.cpu_info()


def _options(
    causal: bool,
    window: Window,
    query_offset: int | ArrayLike | None,
    key_lengths: ArrayLike | None,
    scale: float | ArrayLike | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    dropout: float,
    seed: int | None,
    threads: int | None,
) -> Options:
    """Options as the engine takes them: left, right, query_offset, ... threads."""
    left = right = OPEN
    if window is not None:
        left, right = _window(window)
    if causal is not False:
        right = min(right, 0) if _flag("causal", causal) else right
    if query_offset is not None and type(query_offset) is not int:
        query_offset = _integers("query_offset", query_offset)
    if key_lengths is not None:
        key_lengths = np.atleast_1d(_integers("key_lengths", key_lengths))
    if scale is not None and type(scale) is not float:
        scale = _numbers("scale", scale)
        if scale.ndim == 0:
            scale = float(scale)
        elif scale.ndim != 1:
            raise ValueError(f"scale: expected a number or one per query head, got {scale.shape}")
    if sinks is not None:
        sinks = _numbers("sinks", sinks)
        if sinks.ndim != 1:
            raise ValueError(f"sinks: expected shape (query heads,), got {sinks.shape}")
    if softcap is None:
        softcap = 0.0
    else:
        softcap = _number("softcap", softcap)
        if not 0 < softcap < np.inf:
            raise ValueError(f"softcap: expected a number above 0, got {softcap}")
    if dropout != 0.0:
        dropout = _number("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected a number in [0, 1), got {dropout}")
        seed = secrets.randbits(64) if seed is None else _integer("seed", seed) % 2**64
    else:
        dropout, seed = 0.0, 0
    if threads is None:
        threads = 0
    elif (threads := min(_integer("threads", threads), 1024)) < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")
    return (
        left,
        right,
        query_offset,
        key_lengths,
        scale,
        softcap,
        sinks,
        dropout,
        seed,
        threads,
    )


def _window(window: Window) -> tuple[int, int]:
    if type(window) is tuple or isinstance(window, Sequence):  # to ask for the latter takes long
        if len(window) != 2:
            raise ValueError(f"window: expected an int or (left, right), got {window!r}")
        sides = tuple(OPEN if side is None else _integer("window", side) for side in window)
        if min(sides) < 0:
            raise ValueError(f"window: expected sides of 0 or more, got {window!r}")
        return min(sides[0], OPEN), min(sides[1], OPEN)
    width = _integer("window", window)
    if width < 1:
        raise ValueError(f"window: expected a width of at least 1, got {width}")
    return min(width - 1, OPEN), 0


def _flag(name: str, value: Any) -> bool:
    if type(value) not in (bool, np.bool_):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def _integer(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):  # float() would read them
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name}: expected a number, got {value!r}")


def _integers(name: str, value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype}")
    if array.ndim == 0:
        return int(array)
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(f"{name}: expected integers below 2**63, got {array.max()}")
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def _numbers(name: str, value: Any) -> NDArray[np.float64]:
    array = np.asarray(value)
    if array.dtype.kind not in "fiuV":
        raise TypeError(f"{name}: expected numbers, got dtype {array.dtype}")
    return np.asarray(array, np.float64, order="C")


def _hinted(error: TypeError, **arrays: Any) -> TypeError:
    """The engine's error about an array; of one that is a list, with what to do."""
    name = str(error).partition(":")[0]
    if isinstance(arrays.get(name), list | tuple):
        return TypeError(f"{error}; pass np.asarray(...)")
    return error


def _like(query: Any, array: NDArray[Any]) -> Any:
    """A result of the engine as an array of the query's kind, without a copy."""
    bfloat16 = array.dtype.char == "H"  # uint16: how the engine makes what NumPy has no name for
    if isinstance(query, np.ndarray):
        return array.view(query.dtype) if bfloat16 else array
    if type(query).__module__.partition(".")[0] == "torch":
        torch = sys.modules["torch"]
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if bfloat16 else tensor
    if not hasattr(query, "__array_namespace__"):
        return array
    other = query.__array_namespace__().from_dlpack(array)
    return other.view("bfloat16") if bfloat16 else other
