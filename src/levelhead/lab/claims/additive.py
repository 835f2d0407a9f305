"""Claim 10: additive attention is bounded and needs no scale, but is slower."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import Health, additive_attention, attention, cpu_info
from .._experiment import Runs
from .._figures import Array, Figures, at, stack, table
from .._inputs import normal
from .._plot import BLUE, GREEN, ORANGE, RED, Spec, axis, band, guide, line, picture

CLAIM = 10
VERSION = 1
TITLE = "Additive attention is bounded and needs no scale, but is slower"
SAID = """
Additive (Bahdanau) attention, v·tanh(W_q q + W_k k), has bounded scores and needs no scale, but it
is slower, because it is not a matrix product.
"""
DONE = """
Both kinds of attention scored the same {keys} queries and keys of width {width} while these were
made up to {growth} times as long. Then the hidden layer of additive attention was widened from
{narrow} to {wide}. For time and memory, both were run on whole arrays in NumPy and float32, on the
same shapes, in turns, best of {repeats} rounds, with the engine beside them.
"""
FOUND = """
With vectors {growth} times as long, the largest additive score is {additive_max:.1f±}; its bound
|v|₁ is {bound:.1f}. The scaled dot product reaches {dot_max:,.0f}. The top weight is then
{additive_top:.2f±} for additive attention and {dot_top:.2f±} for the dot product, which started at
{dot_start:.2f}. For {length} queries and keys, additive attention needs {operations:.0f} million
tanh and {memory_additive:.0f} MiB at once, where the dot product needs {memory_dot:.1f} MiB; block
by block, it needs {memory_blocks:.0f} MiB.
"""
KEY = {
    "largest additive score, vectors {growth} times as long": "{additive_max:.1f±}",
    "largest dot product, likewise": "{dot_max:,.0f}",
    "top weight, hidden layer of {wide}, v of variance 1": "{raw_top:.2f±}",
    "top weight with v divided by √{wide}": "{fair_top:.2f±}",
    "memory for {length} queries and keys, additive": "{memory_additive:.0f} MiB",
    "memory, dot product": "{memory_dot:.1f} MiB",
}
CLOCK = """
At {longest} queries and keys, additive attention took {slow_ms:.0f} ms, the dot product in NumPy
{fast_ms:.1f} ms and the engine {engine_ms:.2f} ms: it took {slower:.0f} and {slower_engine:.0f}
times as long, with {threads} threads for the matrix products and one for tanh. On one thread each,
the tanh of all pairs alone took {slower_alone:.0f} times as long as the engine's whole attention.
"""
LIMITS = """
Bounded does not mean free of scale. The bound is |v|₁ and grows with the hidden layer: with v of
unit variance and a hidden layer of {wide}, the scores have a standard deviation of {raw_std:.1f}
and a top weight of {raw_top:.2f}; with v divided by √{wide}, {fair_std:.2f} and {fair_top:.2f}. So
there is a scale here, too, hidden in the initialisation of v, and it is the same square root. And
the bound has a price: with vectors {growth} times as long, tanh passes {slope:.1%} of the gradient
to W_q and W_k.
"""
SHOW = ("grown", "hidden", "memory_mib")
SEEDS = {"full": 5}
SECONDS = {"tiny": 0.4, "quick": 1.0, "full": 15.0}

WIDTH = 64
GROWTH = (1, 4, 16, 64)
HIDDEN = (16, 64, 256, 1024)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"keys": 64, "lengths": (32, 64, 128), "repeats": 3},
    "quick": {"keys": 64, "lengths": (32, 64, 128, 256), "repeats": 2},
    "full": {"keys": 256, "lengths": (64, 128, 256, 512, 1024), "repeats": 3},
}
WHOLE = 512  # the longest for which the hidden layer of all pairs is made at once
SLOWER = 2.0


def measure(size: str, seed: int) -> Figures:
    """Scores and sharpness as vectors grow and the hidden layer widens; memory and time."""
    sizes = SIZES[size]
    keys, lengths = sizes["keys"], sizes["lengths"]
    query, key = normal(seed, 2, keys, WIDTH)
    grown, hidden = [], []
    w_query, w_key, v_score = _network(seed, WIDTH)
    for growth in GROWTH:
        inner = _hidden(growth * query, growth * key, w_query, w_key)
        additive = _sharpness(inner @ v_score)
        dot = _sharpness(growth**2 * query @ key.T / np.float32(WIDTH**0.5))
        grown.append(
            {
                "growth": growth,
                **{f"additive_{name}": value for name, value in additive.items()},
                **{f"dot_{name}": value for name, value in dot.items()},
                "tanh_slope": float((1 - inner**2).mean()),
            }
        )
    for width in HIDDEN:
        w_query, w_key, v_score = _network(seed, width)
        inner = _hidden(query, key, w_query, w_key)
        for name, v in (("variance 1", v_score * width**0.5), ("variance 1/hidden", v_score)):
            found = _sharpness(inner @ v)
            hidden.append({"hidden": width, "v": name, "bound": float(np.abs(v).sum())} | found)
    w_query, w_key, v_score = _network(seed, WIDTH)
    return {
        "grown": table(grown),
        "hidden": table(hidden),
        "bound": float(np.abs(v_score).sum()),
        "memory_mib": table(_memory(seed, length) for length in lengths if length <= WHOLE),
        **{"keys": keys, "repeats": sizes["repeats"]},
        "timings": {
            "milliseconds": table(_times(seed, length, sizes["repeats"]) for length in lengths)
        },
    }


def _network(seed: int, hidden: int) -> tuple[Array, Array, Array]:
    """W_q, W_k and v, so that the hidden layer and the score have about unit variance."""
    w_query, w_key = normal(seed + 1000, 2, WIDTH, hidden) / np.float32((2 * WIDTH) ** 0.5)
    return w_query, w_key, normal(seed + 2000, hidden) / np.float32(hidden**0.5)


def _hidden(query: Array, key: Array, w_query: Array, w_key: Array) -> Array:
    inner: Array = np.tanh((query @ w_query)[:, None] + (key @ w_key)[None])
    return inner


def _sharpness(scores: Array) -> dict[str, float]:
    """The engine's statistics of any scores: they are the queries, and unit vectors the keys."""
    unit = np.eye(scores.shape[1], dtype=np.float32)
    query = np.ascontiguousarray(scores, np.float32)
    health: Health = attention(query, unit, unit, scale=1.0, return_health=True).health
    return {
        "max": float(max(health.score_max[0], -health.score_min[0])),
        "std": float(health.score_var[0]) ** 0.5,
        "top_weight": float(health.top_weight[0]),
    }


def _contenders(seed: int, length: int) -> dict[str, Callable[[], Array]]:
    """The same shapes for all: length queries, keys and values of one width."""
    query, key, value = normal(seed, 3, length, WIDTH)
    network = _network(seed, WIDTH)

    def softmax(scores: Array) -> Array:
        weights: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def dot() -> Array:
        output: Array = softmax(query @ key.T * np.float32(WIDTH**-0.5)) @ value
        return output

    def whole() -> Array:
        output: Array = softmax(_hidden(query, key, *network[:2]) @ network[2]) @ value
        return output

    return {
        "dot": dot,
        "additive_whole": whole,
        "additive_blocks": lambda: additive_attention(query, key, value, *network),
        "engine": lambda: attention(query, key, value),
    }


def _memory(seed: int, length: int) -> dict[str, float]:
    """The most that is held at a time beyond the inputs."""
    row: dict[str, float] = {"length": length}
    for name, compute in _contenders(seed, length).items():
        if name == "engine":
            continue  # its memory is not Python's, and cannot be seen from here
        compute()
        tracemalloc.start()
        compute()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        row[name] = float(f"{peak / 2**20:.2g}")
    return row


def _times(seed: int, length: int, repeats: int) -> dict[str, float]:
    """Milliseconds, the best of some rounds in which all take turns.

    By the clock on the wall, and, for what a busy machine does not change, by that of one thread:
    the engine on one thread against nothing but the tanh of all pairs, block by block in cache.
    """
    contenders = _contenders(seed, length)
    if length > WHOLE:
        del contenders["additive_whole"]
    query, key, value = normal(seed, 3, length, WIDTH)
    block = normal(seed, max(1, 2**14 // length), length, WIDTH)

    def tanh_alone() -> None:
        for _ in range(length // len(block)):
            np.tanh(block, out=block)

    best = dict.fromkeys([*contenders, "engine_one_thread", "tanh_one_thread"], float("inf"))
    for _ in range(repeats):
        for name, compute in contenders.items():
            best[name] = min(best[name], _milliseconds(time.perf_counter, compute))
        for name, work in (
            ("engine_one_thread", lambda: attention(query, key, value, threads=1)),
            ("tanh_one_thread", tanh_alone),
        ):
            best[name] = min(best[name], _milliseconds(time.thread_time, work))
    additive = min(best.pop("additive_whole", float("inf")), best.pop("additive_blocks"))
    return {"length": length, "threads": cpu_info()["threads"], "additive": additive, **best}


def _milliseconds(clock: Callable[[], float], work: Callable[[], object]) -> float:
    start = clock()
    work()
    return 1000 * (clock() - start)


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes; the last ones only the clock's."""
    figures = stack(runs)
    grown, hidden, memory = figures["grown"], figures["hidden"], figures["memory_mib"]
    # The best of all seeds: whatever else the machine did can only have made it slower.
    times = {
        name: values[:, -1].min() for name, values in figures["timings"]["milliseconds"].items()
    }
    long, wide, largest = GROWTH[-1], HIDDEN[-1], memory["length"][0].max()
    raw, fair = {"hidden": wide, "v": "variance 1"}, {"hidden": wide, "v": "variance 1/hidden"}
    return {
        **{"keys": int(figures["keys"][0]), "width": WIDTH, "repeats": int(figures["repeats"][0])},
        **{"growth": long, "narrow": HIDDEN[0], "wide": wide, "length": int(largest)},
        "bound": figures["bound"].mean(),
        "bound_kept": bool((grown["additive_max"] <= 1.001 * figures["bound"][:, None]).all()),
        "additive_max": at(grown, "additive_max", growth=long),
        "additive_top": at(grown, "additive_top_weight", growth=long),
        "dot_max": at(grown, "dot_max", growth=long),
        "dot_start": at(grown, "dot_top_weight", growth=1),
        "dot_top": at(grown, "dot_top_weight", growth=long),
        "slope": at(grown, "tanh_slope", growth=long),
        "operations": largest**2 * WIDTH / 1e6,
        "memory_dot": at(memory, "dot", length=largest),
        "memory_additive": at(memory, "additive_whole", length=largest),
        "memory_blocks": at(memory, "additive_blocks", length=largest),
        **{"raw_std": at(hidden, "std", **raw), "raw_top": at(hidden, "top_weight", **raw)},
        **{"fair_std": at(hidden, "std", **fair), "fair_top": at(hidden, "top_weight", **fair)},
        **{"slow_ms": times["additive"], "fast_ms": times["dot"], "engine_ms": times["engine"]},
        **{"longest": int(times["length"]), "threads": int(times["threads"])},
        "slower": times["additive"] / times["dot"],
        "slower_engine": times["additive"] / times["engine"],
        "slower_alone": times["tanh_one_thread"] / times["engine_one_thread"],
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if additive scores are bounded, spread at any width without a scale, and slower.

    Times are compared thread for thread. Partly true if only some of this is so.
    """
    found = numbers(runs)
    slow = found["slower_alone"] > SLOWER
    unscaled = found["raw_top"] < 2 * found["fair_top"]
    why = (
        f"{'bounded' if found['bound_kept'] else 'not bounded'} by {found['bound']:.0f} and "
        f"{'slower' if slow else 'not clearly slower'}, {'and' if unscaled else 'but'} without a "
        f"scale in v the top weight is {found['raw_top']:.2f}, with one {found['fair_top']:.2f}. "
        f"That is with a hidden layer of {found['wide']}: it needs "
        f"{'no scale' if unscaled else 'a scale, too'}. The dot product reaches "
        f"{found['dot_max']:,.0f}; additive attention takes "
        f"{found['memory_additive'] / found['memory_dot']:.0f} times its memory, and timings.json "
        f"says how much slower it is."
    )
    parts = (found["bound_kept"], slow, unscaled)
    return ("holds" if all(parts) else "holds partly" if any(parts) else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """Sharpness by length of the vectors and by hidden layer; time by length."""
    figures = stack(runs)
    grown, hidden = figures["grown"], figures["hidden"]
    times = figures["timings"]["milliseconds"]
    lengths = times["length"][0]
    widths = []
    for name, colour in (("variance 1", RED), ("variance 1/hidden", BLUE)):
        chosen = hidden["v"][0] == name
        widths += band(f"v of {name}", HIDDEN, hidden["top_weight"][:, chosen], colour)
    clock = [  # the best of all seeds, as in the text
        line("additive, NumPy", lengths, times["additive"].min(axis=0), ORANGE),
        line("dot product, NumPy", lengths, times["dot"].min(axis=0), BLUE),
        line("dot product, engine", lengths, times["engine"].min(axis=0), GREEN),
    ]
    return [
        picture(
            "Largest |score| as vectors grow",
            [
                *band("additive", GROWTH, grown["additive_max"], ORANGE),
                guide("additive, bound |v|₁", GROWTH, figures["bound"].mean()),
                *band("scaled dot product", GROWTH, grown["dot_max"], BLUE),
            ],
            axis("times as long", log=True, ticks=GROWTH),
            axis("|score|", log=True),
        ),
        picture(
            "The scale hidden in v",
            widths,
            axis("hidden layer", log=True, ticks=HIDDEN),
            axis("top weight"),
        ),
        picture(
            "Time",
            clock,
            axis("queries and keys", log=True, ticks=lengths),
            axis("milliseconds", log=True),
        ),
    ]
