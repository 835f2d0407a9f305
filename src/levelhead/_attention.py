"""The operator: options normalised, shapes checked and the work done by the engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _engine
from ._health import GradHealth
from ._hints import refuse_options
from ._options import AttentionOptions, Masked, Window, flag, normalise
from ._result import AttentionGradients, AttentionResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = TypeVar("Array")


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_lse: Literal[False] = False,
    return_health: Literal[False] = False,
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Array: ...
@overload
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    return_lse: bool = False,
    return_health: bool = False,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> AttentionResult: ...
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
    >>> result.health.score_max.shape  # one number per head
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
    # By name: to pass them on as *options takes longer, which a tiny call would feel.
    left, right, offset, lengths, scale, cap, sinks, dropout, seed, threads = normalise(
        causal, window, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads
    )
    if not type(return_lse) is type(return_health) is type(return_weights) is bool:
        return_lse = flag("return_lse", return_lse)
        return_health = flag("return_health", return_health)
        return_weights = flag("return_weights", return_weights)
    if (
        type(query) is Masked
        or type(key) is Masked
        or type(value) is Masked
        or (mask is not None and isinstance(mask, Masked))
    ):
        _refuse_masked(query=query, key=key, value=value, mask=mask)
    try:
        result = _engine.forward(
            query, key, value, mask, left, right, offset, lengths, scale, cap, sinks, dropout,
            seed, threads, return_lse, return_health, return_weights,
        )  # fmt: skip
    except TypeError as error:
        raise _hinted(error, query=query, key=key, value=value) from None
    output = result[0] if type(result) is AttentionResult else result
    if type(output) is type(query) and output.dtype is query.dtype:
        return result  # most calls: to ask _like() takes longer
    if output is result:
        return _like(query, output)
    _, lse, weights, health = result
    return AttentionResult(
        _like(query, output),
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
    >>> dq.shape, health.survival.shape  # the share of gradient that passes the softmax, per head
    ((8, 100, 64), (8,))

    grad_output: (..., Hq, L, Dv), the gradient of the output.
    output, lse: as the forward pass returned them, with the same options as are given here.
    return_health: also measure how much gradient gets through the softmax, per head.
    The weights are recomputed tile by tile; there is no L×S matrix here either.
    """
    if unknown:
        refuse_options(attention_backward, unknown)
    options = normalise(
        causal, window, query_offset, key_lengths, scale, softcap, sinks, dropout, seed, threads,
        draw=_miss_seed,
    )  # fmt: skip
    return_health = flag("return_health", return_health)
    _refuse_masked(query=query, key=key, value=value, mask=mask)
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


def _miss_seed() -> NoReturn:
    raise ValueError("seed: expected the seed of the forward pass with dropout, got None")


def _refuse_masked(**arrays: Any) -> None:
    """The engine would read what is masked as if it was not."""
    for name, array in arrays.items():
        if isinstance(array, Masked):
            text = "expected an array without masked elements, got a masked array"
            raise TypeError(f"{name}: {text}; pass its filled(...), or its data and a mask")


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
