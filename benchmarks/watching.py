"""python -m benchmarks.watching: what watching a model costs.

A model runs plain, watched on every step, and between two recorded steps, in turns. The clock is
the CPU time of the one thread that works, so that other programs on the machine count little; the
best of many turns is taken. Then two processes train one model with DDP, plain and with every tenth
step recorded, in turns: there the clock is the time that passes, for they wait for each other.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import levelhead.torch
from benchmarks.machine import cpu_name
from benchmarks.timing import no_garbage_collection

EVERY, BETWEEN = "every step", "between"
TENTH = 10  # step of a training by two processes is recorded


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float = 0.0, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.dropout, self.fused = heads, dropout, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = F.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1), self.dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Sequential):
    """Attention and nothing else."""

    def __init__(self, layers: int, d: int, heads: int) -> None:
        super().__init__(*(Attention(d, heads) for _ in range(layers)))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.attention = Attention(d, heads, dropout, fused)
        self.one, self.two = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))


class GPT2(nn.Module):
    """The head tied to the embedding; by default of GPT-2's size."""

    def __init__(self, layers: int = 12, dropout: float = 0.0, fused: bool = True, d: int = 768,
                 tokens: int = 50_257) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, d), nn.Embedding(1_024, d)
        self.blocks = nn.Sequential(*(Block(d, d // 64, dropout, fused) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


@dataclass
class Case:
    name: str
    calls: int  # of attention in one turn
    model: nn.Module
    turn: Callable[[], object]
    end_step: Callable[[], object]
    turns: int  # in a row, in one of the rounds
    rounds: int
    bar: float | None  # the most that watching every step may cost


def forward(name: str, layers: int, d: int, heads: int, batch: int, length: int, rounds: int,
            bar: float | None) -> Case:  # fmt: skip
    model, x = Stack(layers, d, heads).eval(), torch.randn(batch, length, d)
    size = f"{layers}×{d}, {heads} heads, batch {batch}, {length} tokens"

    @torch.no_grad()
    def turn() -> None:
        model(x)

    return Case(f"{name}: {size}", layers, model, turn, turn, 5, rounds, bar)


def training(name: str, length: int, rounds: int, bar: float | None, layers: int = 12,
             **options: bool | float) -> Case:  # fmt: skip
    model = GPT2(layers, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(50_257, (1, length))

    def turn() -> None:
        loss = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    quickly = torch.optim.SGD([model.norm.bias], lr=0.0).step
    return Case(f"{name}, batch 1, {length} tokens", layers, model, turn, quickly, 1, rounds, bar)


def cases(quick: bool) -> list[Callable[[], Case]]:
    some = 2 if quick else 6
    return [
        lambda: forward("attention only", 2, 64, 4, 2, 32, 50 * some, None),
        lambda: forward("attention only", 4, 128, 4, 8, 64, 30 * some, 0.25),
        lambda: forward("attention only", 4, 256, 8, 8, 128, 15 * some, 0.25),
        lambda: training("GPT-2, step", 128, 2 * some, 0.10),
        lambda: training("GPT-2, step", 256, some, 0.10),
        lambda: training("GPT-2 with dropout 0.1, step", 128, 2 * some, None, dropout=0.1),
        lambda: training("GPT-2 written by hand, step", 128, 2 * some, None, fused=False),
    ]


def measure(case: Case) -> dict[str, float]:
    """Best seconds of a turn: plain (""), watched on every step, between recorded steps."""
    best = dict.fromkeys(("", EVERY, BETWEEN), float("inf"))
    with no_garbage_collection():
        for place in range(case.rounds + 1):
            ways = [*best]
            for way in ways[place % 3 :] + ways[: place % 3]:
                with ExitStack() as stack:
                    if way:
                        watch = levelhead.torch.watch(case.model, every=1 if way == EVERY else 99)
                        # Between recorded steps it sees nothing, and says so.
                        stack.enter_context(warnings.catch_warnings(action="ignore"))
                        stack.enter_context(watch)
                        if way == BETWEEN:
                            case.end_step()
                    for _ in range(case.turns):
                        start = time.thread_time()
                        case.turn()
                        taken = time.thread_time() - start
                        if place:  # the first round is to get warm
                            best[way] = min(best[way], taken)
    return best


def train_together(rank: int, store: str, rounds: int, found: mp.SimpleQueue) -> None:
    """One of two processes; seconds per round of ten steps, plain and watched, into `found`."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    logging.getLogger("levelhead").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(GPT2(4, d=256, tokens=8_192))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(8_192, (4, 128))

    def step() -> None:
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def turn(is_watched: bool) -> float:
        with ExitStack() as stack:
            if is_watched:
                stack.enter_context(levelhead.torch.watch(model, every=TENTH))
            step()  # the first one is recorded, and the processes get to know each other
            dist.barrier()
            start = time.perf_counter()
            for _ in range(TENTH):
                step()
            dist.barrier()
            return time.perf_counter() - start

    with no_garbage_collection():
        turn(True)  # to get warm
        for place in range(rounds):
            first = place % 2 == 0
            taken = {is_watched: turn(is_watched) for is_watched in (first, not first)}
            if rank == 0:
                found.put((taken[False], taken[True]))
    dist.destroy_process_group()


def measure_ranks(rounds: int) -> float:
    """What a watch adds to the training of two processes, as a share of its time."""
    found = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_together, (f"{folder}/store", rounds, found), nprocs=2)
    plain, watched = zip(*(found.get() for _ in range(rounds)), strict=True)
    best, typical = (
        min(watched) / min(plain) - 1,
        statistics.median(watched) / statistics.median(plain) - 1,
    )
    print(
        f"\nDDP on two processes, GPT-2 of 4×256, batch 4 × 128 tokens: "
        f"{min(plain) / TENTH * 1e3:.1f} ms a step; a watch with every={TENTH} adds {best:+.1%} "
        f"(must be < 3%; median {typical:+.1%}) in {rounds} rounds of {TENTH} steps each"
    )
    return best


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the turns, more noise")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is not reached")
    parser.add_argument("--ranks", action="store_true", help="only the two processes")
    options = parser.parse_args(arguments)
    logging.getLogger("levelhead").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{cpu_name()}, one thread, PyTorch {torch.__version__}\n")
    failed = False if options.ranks else measure_models(options.quick)
    print("two processes train", file=sys.stderr, flush=True)
    failed |= measure_ranks(5 if options.quick else 20) >= 0.03
    return int(failed and options.check)


def measure_models(quick: bool) -> bool:
    """Print the table; whether a bar was missed."""
    print("| model | plain ms | every step | per call | must | between | must |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    failed = False
    for place, make in enumerate(all_cases := cases(quick)):
        case = None  # the last one's memory
        gc.collect()
        case = make()
        print(f"[{place + 1}/{len(all_cases)}] {case.name}", file=sys.stderr, flush=True)
        best = measure(case)
        plain = best[""]
        every, between = (best[way] / plain - 1 for way in (EVERY, BETWEEN))
        bars = ("", "") if case.bar is None else (f"< {case.bar:.0%}", "< 2%")
        per_call = (best[EVERY] - plain) / case.calls * 1e6
        row = (
            case.name,
            f"{plain * 1e3:,.{2 if plain < 0.1 else 0}f}",
            *(f"{every:+.1%}", f"{per_call:+,.0f} µs", bars[0]),
            *(f"{between:+.1%}", bars[1]),
        )
        print(f"| {' | '.join(row)} |", flush=True)
        failed |= case.bar is not None and (every >= case.bar or between >= 0.02)
    return failed


if __name__ == "__main__":
    sys.exit(main())
