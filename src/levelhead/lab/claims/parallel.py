"""Claim 18: attention computes a long sequence in parallel, efficiently in many heads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import attention, cpu_info
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._inputs import normal
from .._machine import cpu_name
from .._operations import attention_steps, longest_chain, lstm_steps
from .._plot import BLUE, GREEN, ORANGE, Spec, axis, band, guide, line, picture
from .._threads import one_thread

if TYPE_CHECKING:
    from torch import nn

CLAIM = 18
VERSION = 1
TITLE = "Attention computes a long sequence in parallel, efficiently in many heads"
SAID = """
Attention lets a long sequence be computed in parallel, where a recurrent layer must go through it
step by step; and it stays efficient with many heads, because each of them is narrower.
"""
DONE = """
On this machine ({cpu}, {cores}) an attention layer of width {width} with {layer_heads} heads was
put beside an LSTM of the same width. Both were computed operation by operation, and in PyTorch's
graph of that the longest chain was counted in which every operation waits for the one before;
their matrix products were counted, too. Then the layers themselves were timed in turns, more often
the shorter the sequence, and the best of each was taken: on one thread by that thread's CPU time,
which other programs hardly change, and on all threads by the clock on the wall. Last, one head of
width {split} was put beside {most} heads that share this width.
"""
FOUND = """
The longest chain has {chain_attention:.0f} operations for attention at every length from {first} to
{last} positions. For the LSTM it has {chain_first:,.0f} at {first} and {chain_last:,.0f} at {last}:
{per_step:.1f} for each position. Written out like this, they differ from the layers by at most
{differs:.0e}. But attention's work grows faster: from {first} to {last} positions the
multiplications grow {work_attention:.0f}-fold, those of the LSTM {work_lstm:.0f}-fold. Many heads
multiply no more than one: {flop_many:,.0f} million multiplications and additions with {most} heads,
{flop_one:,.0f} million with one, at {heads_length} positions; but the softmax has
{exponentials:.0f} times as many weights to compute.
"""
CLOCK = """
On one thread ({cpu}), one sequence of {shortest} positions took {attention_short:.2f} ms with
attention and {lstm_short:.2f} ms with the LSTM, {longest} positions {attention_long:.0f} ms and
{lstm_long:.0f} ms: attention is {faster_short:.1f±} times as fast at first and {faster_long:.2f±}
times at last. They are equally fast {crossover}. Forward and backward together, attention is
{trained_short:.1f±} times as fast at {shortest} and {trained_long:.2f±} times at {longest_trained};
they are equal {crossover_trained}. With {batch} sequences of {batch_length} at once, which the LSTM
can compute side by side, attention is {faster_batch:.2f±} times as fast, with one of them
{faster_alone:.2f±} times. On {all_threads} threads instead of one, by the clock on the wall,
attention at {longest_threads} positions gets {gain_attention:.2f} times as fast and the LSTM
{gain_lstm:.2f} times. The machine had a load average of {load:.1f} at the time, on {cores}{busy}.
{many} heads of width {many_width} take {cost_many:.2f±} times as long as one of width {split},
{most} heads of width {most_width} {cost_most:.2f±} times (one thread, {heads_length} positions).
"""
LIMITS = """
Parallel means that nothing has to wait, not that there is less to do. Each position meets each
other one, so the work grows with the square of the length: here it takes as many multiplications
as the LSTM at {equal_work:.0f} positions, {equal_widths:g} times the width. Beyond that, attention
is faster only as long as its large matrix products use the machine better than {per_step:.0f} small
operations per position, or as there are cores enough; this machine has {cores}. A GPU has
thousands, and is not measured here. A recurrent layer has parallelism of its own, across the
sequences of a batch. And when a text is written word by word, attention has to wait for every word
as well.
"""
KEY = {
    "longest chain of operations, attention, {first} to {last} positions": "{chain_attention:.0f}",
    "longest chain, LSTM, {last} positions": "{chain_last:,.0f}",
    "multiplications, {last} positions instead of {first}, attention": "times {work_attention:.0f}",
    "multiplications, likewise, LSTM": "times {work_lstm:.0f}",
    "weights to compute with {most} heads instead of one": "times {exponentials:.0f}",
}
NEEDS = ("torch",)
SHOW = ("chains", "heads")
SEEDS = {"full": 5}
SECONDS = {"tiny": 1.0, "quick": 2.0, "full": 8.0}

WIDTH, HEADS = 256, 4
SPLIT = 512  # the width that heads share
SPLITS, MANY = (1, 2, 4, 8, 16, 32), 8
BATCH, BATCH_LENGTH = 16, 256
# chains: lengths at which operations are counted; the others are timed.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        **{"chains": (16, 256), "lengths": (64, 4096), "threads": (64, 256)},
        **{"trained": (64, 256), "split": 128, "rounds": 1},
    },
    "quick": {
        **{"chains": (16, 64, 256), "lengths": (64, 512, 4096), "threads": (64, 512)},
        **{"trained": (64, 512), "split": 512, "rounds": 1},
    },
    "full": {
        **{"chains": (16, 64, 256, 1024), "lengths": (64, 256, 1024, 4096)},
        **{"threads": (64, 256, 1024), "trained": (64, 256, 1024), "split": 1024, "rounds": 2},
    },
}
SHORT = 512  # what is over sooner is disturbed more easily, and gets more rounds
CLEARLY = 1.25  # times as long


def measure(size: str, seed: int) -> Figures:
    """What waits for what, how much there is to do, and how long it takes."""
    import torch  # noqa: PLC0415 - an extra

    sizes = SIZES[size]
    rounds, threads = sizes["rounds"], cpu_info()["threads"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = _layers()
        chains = [_chains(layers, length) for length in sizes["chains"]]
        timings = {
            "forward": table(_times(layers, length, rounds) for length in sizes["lengths"]),
            "trained": table(
                _times(layers, length, rounds, train=True) for length in sizes["trained"]
            ),
            "threads": table(
                _walls(layers, length, rounds, threads) for length in sizes["threads"]
            ),
            "batches": table(
                {"batch": batch} | _times(layers, BATCH_LENGTH, rounds, batch=batch)
                for batch in (1, BATCH)
            ),
            "heads": table(_split_times(seed, sizes["split"], rounds)),
        }
    return {
        "chains": table(chains),
        "heads": table(_split_work(heads, sizes["split"]) for heads in SPLITS),
        **{"cpu": cpu_name(), "threads": threads},
        **{"rounds": rounds, "heads_length": sizes["split"], "timings": timings},
    }


def _layers() -> dict[str, Any]:
    from torch import nn  # noqa: PLC0415

    from ...torch.nn import MultiHeadAttention  # noqa: PLC0415

    return {
        "attention": MultiHeadAttention(WIDTH, HEADS),
        "lstm": nn.LSTM(WIDTH, WIDTH, batch_first=True),
    }


# ---------------------------------------------------------------- operations


def _chains(layers: dict[str, Any], length: int) -> dict[str, float]:
    """The longest chain and the products of each layer, and that it is the same layer."""
    import torch  # noqa: PLC0415
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    x = torch.randn(1, length, WIDTH)
    row: dict[str, float] = {"length": length}
    with one_thread():
        for name, steps in (("attention", attention_steps), ("lstm", lstm_steps)):
            with FlopCounterMode(display=False) as counter:
                output = steps(layers[name], x)
            with torch.no_grad():
                differs = float((layers[name](x)[0] - output).abs().max())
            row |= {
                f"{name}_chain": longest_chain(output),
                f"{name}_mflop": counter.get_total_flops() / 1e6,
                f"{name}_differs": differs,
            }
    return row


def _split_work(heads: int, length: int) -> dict[str, float]:
    """What heads that share one width have to compute."""
    import torch  # noqa: PLC0415
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    query = torch.empty(heads, length, SPLIT // heads, device="meta")
    with FlopCounterMode(display=False) as counter:
        weights = (query @ query.transpose(-1, -2)).softmax(-1)
        weights @ query
    return {
        **{"heads": heads, "width": SPLIT // heads},
        **{"mflop": counter.get_total_flops() / 1e6, "weights": weights.numel()},
    }


# ---------------------------------------------------------------- the clock


class Turn(NamedTuple):
    """One of the things that are timed in turns."""

    work: Callable[[], Any]
    threads: int = 1


def _best(turns: dict[str, Turn], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of each, by the calling thread's CPU time and by the wall's clock.

    The best of some rounds in which all take turns, so that whatever else the machine does at the
    time hits all of them.
    """
    import torch  # noqa: PLC0415

    best = dict.fromkeys(turns, np.full(2, np.inf))
    with one_thread():
        for _ in range(rounds):
            for name, (work, threads) in turns.items():
                torch.set_num_threads(threads)
                start = np.array([time.thread_time(), time.perf_counter()])
                work()
                end = np.array([time.thread_time(), time.perf_counter()])
                best[name] = np.minimum(best[name], 1000 * (end - start))
    return {name: (float(cpu), float(wall)) for name, (cpu, wall) in best.items()}


def _turns(
    layers: dict[str, Any], length: int, *, batch: int = 1, train: bool = False, threads: int = 1
) -> dict[str, Turn]:
    import torch  # noqa: PLC0415

    x = torch.randn(batch, length, WIDTH)

    def run(layer: nn.Module) -> None:
        with torch.set_grad_enabled(train):
            output = layer(x)[0]
            if train:
                output.sum().backward()

    return {name: Turn(partial(run, layer), threads) for name, layer in layers.items()}


def _times(layers: dict[str, Any], length: int, rounds: int, **how: Any) -> dict[str, float]:
    """CPU time on one thread."""
    found = _best(_turns(layers, length, **how), rounds * max(1, SHORT // length))
    return {"length": length} | {name: cpu for name, (cpu, _) in found.items()}


def _walls(layers: dict[str, Any], length: int, rounds: int, threads: int) -> dict[str, float]:
    """The wall's clock on one thread and on all, and how busy the machine was."""
    turns = {
        f"{name}_{words}": turn
        for words, count in (("one", 1), ("all", threads))
        for name, turn in _turns(layers, length, threads=count).items()
    }
    found = _best(turns, rounds + 1)  # no more: threads that wait are costly on a busy machine
    row = {"length": length} | {name: wall for name, (_, wall) in found.items()}
    return row | {"load": os.getloadavg()[0]}


def _split_times(seed: int, length: int, rounds: int) -> list[dict[str, float]]:
    """The engine's CPU time on one thread, for heads that share one width."""
    inputs = {heads: normal(seed, 3, heads, length, SPLIT // heads) for heads in SPLITS}
    turns = {
        str(heads): Turn(partial(attention, *arrays, threads=1)) for heads, arrays in inputs.items()
    }
    found = _best(turns, rounds + 1)
    return [{"heads": heads, "milliseconds": found[str(heads)][0]} for heads in SPLITS]


# ---------------------------------------------------------------- what comes out


def _faster(times: dict[str, Array], row: int) -> Spread:
    """How many times as fast attention is, by seed."""
    return Spread(times["lstm"][:, row] / times["attention"][:, row])


def _crossover(times: dict[str, Array]) -> str:
    """Where attention's time passes the LSTM's, on a straight line between logarithms."""
    # The best of all seeds: whatever else the machine did can only have made it slower.
    lengths, behind = (
        times["length"][0],
        np.log(times["attention"].min(axis=0) / times["lstm"].min(axis=0)),
    )
    passes = np.flatnonzero((behind[:-1] < 0) & (behind[1:] >= 0))
    if not passes.size:
        return f"nowhere between {lengths[0]:.0f} and {lengths[-1]:.0f} positions"
    i = passes[-1]
    share = behind[i] / (behind[i] - behind[i + 1])
    x = np.exp((1 - share) * np.log(lengths[i]) + share * np.log(lengths[i + 1]))
    return f"at about {float(f'{x:.2g}'):,.0f} positions"


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _clock(timings: dict[str, Any]) -> dict[str, Any]:
    """What the clock said."""
    forward, trained, batches, threads, split = (
        timings[name] for name in ("forward", "trained", "batches", "threads", "heads")
    )
    cost = split["milliseconds"] / split["milliseconds"][:, :1]
    gain = {
        name: threads[f"{name}_one"][:, -1].min() / threads[f"{name}_all"][:, -1].min()
        for name in ("attention", "lstm")
    }
    return {
        **{"shortest": int(forward["length"].min()), "longest": int(forward["length"].max())},
        "longest_trained": int(trained["length"].max()),
        **{f"{name}_short": forward[name][:, 0].min() for name in gain},
        **{f"{name}_long": forward[name][:, -1].min() for name in gain},
        **{"faster_short": _faster(forward, 0), "faster_long": _faster(forward, -1)},
        **{"trained_short": _faster(trained, 0), "trained_long": _faster(trained, -1)},
        **{"faster_alone": _faster(batches, 0), "faster_batch": _faster(batches, -1)},
        **{f"gain_{name}": value for name, value in gain.items()},
        **{"crossover": _crossover(forward), "crossover_trained": _crossover(trained)},
        **{"longest_threads": int(threads["length"].max()), "load": threads["load"].mean()},
        **{"cost_many": Spread(cost[:, SPLITS.index(MANY)]), "cost_most": Spread(cost[:, -1])},
    }


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    chains, heads = figures["chains"], figures["heads"]
    lengths, lstm = chains["length"][0], chains["lstm_chain"][0]
    threads, most = int(figures["threads"][0]), SPLITS[-1]

    # Of attention per position: a part that is always the same, and one that grows as the length.
    attention_work, lstm_work = (
        chains[f"{name}_mflop"][0] / lengths for name in ("attention", "lstm")
    )
    slope, constant = np.polyfit(lengths, attention_work, 1)
    equal = float((lstm_work[-1] - constant) / slope)

    clock = _clock(figures["timings"])
    # Threads that wait for each other at every position wait for whatever else is running, too.
    busy = ", too much to say what threads gain" if clock["load"] > threads else ""

    def growth(name: str) -> float:
        return float(chains[f"{name}_mflop"][0, -1] / chains[f"{name}_mflop"][0, 0])

    return {
        **{"cpu": str(figures["cpu"][0]), "cores": _cores(threads), "all_threads": threads},
        "busy": busy,
        **{"width": WIDTH, "layer_heads": HEADS, "split": SPLIT, "most": most, "many": MANY},
        **{"many_width": SPLIT // MANY, "most_width": SPLIT // most},
        **{"batch": BATCH, "batch_length": BATCH_LENGTH},
        "heads_length": int(figures["heads_length"][0]),
        **{"first": int(lengths[0]), "last": int(lengths[-1])},
        "chain_attention": chains["attention_chain"].max(),
        **{"chain_first": lstm[0], "chain_last": lstm[-1]},
        "per_step": (lstm[-1] - lstm[0]) / (lengths[-1] - lengths[0]),
        "differs": max(chains[f"{name}_differs"].max() for name in ("attention", "lstm")),
        **{"work_attention": growth("attention"), "work_lstm": growth("lstm")},
        **{"equal_work": equal, "equal_widths": round(equal / WIDTH, 2)},
        "flop_one": at(heads, "mflop", heads=1),
        "flop_many": at(heads, "mflop", heads=most),
        "exponentials": at(heads, "weights", heads=most) / at(heads, "weights", heads=1),
        **clock,
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if nothing waits, attention is the faster one at every length, and heads cost little.

    Nothing waits if its longest chain is the same at every length while the LSTM's grows with the
    length. Faster: clearly so at the shortest length, and not clearly slower at the longest, in CPU
    time on one thread. Heads: eight take at most 1.25 times as long as one. Partly true if only
    some of this is so.
    """
    chains, found = stack(runs)["chains"], numbers(runs)
    grown = chains["lstm_chain"][:, -1] / chains["lstm_chain"][:, 0]
    longer = chains["length"][:, -1] / chains["length"][:, 0]
    parallel = bool(np.ptp(chains["attention_chain"]) == 0 and (grown > longer / 2).all())
    short, long = found["faster_short"] > CLEARLY, found["faster_long"] > 1 / CLEARLY
    cheap = found["cost_many"] < CLEARLY
    why = (
        f"{found['chain_attention']:.0f} operations in a row at {'any' if parallel else 'most'} "
        f"length, an LSTM {found['chain_last']:,.0f} at {found['last']}; on one core "
        f"{'faster' if short else 'no faster'} at {found['shortest']}, "
        f"{'no slower' if long else 'slower'} at {found['longest']}. Attention's multiplications "
        f"grow {found['work_attention']:.0f}-fold from {found['first']} to {found['last']} "
        f"positions, the LSTM's {found['work_lstm']:.0f}-fold. {MANY} heads take "
        f"{'about as long as' if cheap else 'clearly longer than'} one as wide as all of them "
        f"(timings.json has the times, on {found['cpu']}, {found['cores']})."
    )
    parts = (parallel, short, long, cheap)
    return ("holds" if all(parts) else "holds partly" if any(parts) else "does not hold"), why


COLOURS = {"attention": BLUE, "lstm": ORANGE}
NAMES = {"attention": "attention", "lstm": "LSTM"}


def plot(runs: Runs) -> list[Spec]:
    """Chains and times by length, the time of many heads, and what threads change."""
    figures = stack(runs)
    chains, timings = figures["chains"], figures["timings"]
    counted = axis("positions", log=True, ticks=chains["length"][0])
    split = timings["heads"]["milliseconds"]
    return [
        picture(
            "Longest chain of operations that wait for each other",
            [
                line(NAMES[name], chains["length"][0], chains[f"{name}_chain"][0], colour)
                for name, colour in COLOURS.items()
            ],
            counted,
            axis("operations", log=True),
        ),
        *_pictures_by_length(timings["forward"], timings["trained"]),
        picture(
            f"Heads that share a width of {SPLIT}, on one thread",
            [
                guide("one head", SPLITS, 1.0),
                *band("attention", SPLITS, split / split[:, :1], BLUE),
            ],
            axis("heads", log=True, ticks=SPLITS),
            axis("time / that of one head", rangemode="tozero"),
        ),
        _picture_of_threads(timings["threads"], int(figures["threads"][0])),
    ]


def _pictures_by_length(forward: dict[str, Array], trained: dict[str, Array]) -> list[Spec]:
    lengths = forward["length"][0]
    positions = axis("positions", log=True, ticks=lengths)
    times, ratios = [], [guide("equally fast", lengths, 1.0)]
    for name, colour in COLOURS.items():
        times += band(NAMES[name], lengths, forward[name], colour, geometric=True)
    for part, label, colour in (
        (forward, "forward", BLUE),
        (trained, "forward and backward", GREEN),
    ):
        ratio = part["lstm"] / part["attention"]
        ratios += band(label, part["length"][0], ratio, colour, geometric=True)
    return [
        picture(
            "CPU time of one sequence, on one thread",
            times,
            positions,
            axis("milliseconds", log=True),
        ),
        picture(
            "How many times as fast attention is, on one thread",
            ratios,
            positions,
            axis("LSTM's time / attention's", log=True),
        ),
    ]


def _picture_of_threads(threads: dict[str, Array], count: int) -> Spec:
    """The best of all seeds, as in the text."""
    lengths = threads["length"][0]
    lines = [
        line(
            f"{NAMES[name]}, {words}",
            lengths,
            threads[f"{name}_{which}"].min(axis=0),
            colour,
            line={"dash": dash},
        )
        for name, colour in COLOURS.items()
        for which, words, dash in (
            ("one", "1 thread", "solid"),
            ("all", f"{count} threads", "dash"),
        )
    ]
    return picture(
        f"By the clock on the wall (load average {threads['load'].mean():.0f}, {_cores(count)})",
        lines,
        axis("positions", log=True, ticks=lengths),
        axis("milliseconds", log=True),
    )
