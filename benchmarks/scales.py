"""python -m benchmarks.scales: what moved weight costs a model, the reason of the checkup's levels.

Models are trained at one scale and run at others, without training anew: how much of their weight
moves, and how much worse they are then. Takes some minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from levelhead._moved import Moved
from levelhead.checkup import load
from levelhead.checkup._what_if import MOVED
from levelhead.lab._sweep import Model
from levelhead.lab._tasks import TASKS, Batch
from levelhead.lab._threads import one_thread
from levelhead.lab._transformer import Shape
from levelhead.torch import Call, listen

FACTORS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0)
STEPS, RATE = 600, 3e-3


class Other(NamedTuple):
    """A model at another scale.

    moved: the share of its weight
    wrong: the share of its answers that it gave before and gives no more
    """

    moved: float
    wrong: float


def moved(calls: list[Call], factor: float) -> float:
    return float(np.mean([Moved.merge(call.moved(factor)).weight_moved for call in calls]))


def trained(task: str, d_k: int, rule: str) -> Model:
    torch.manual_seed(0)
    rng, known = np.random.default_rng(1), TASKS[task]
    shape = Shape(rule=rule, d_k=d_k, heads=4, width=64, weights="linear", causal=known.causal)
    model = Model(known, shape)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    for step in range(STEPS):
        warm, falling = min(1.0, (step + 1) / 20), 0.55 + 0.45 * math.cos(math.pi * step / STEPS)
        optimizer.param_groups[0]["lr"] = RATE * warm * falling
        batch = known.draw(rng, 32)
        logits = model(torch.from_numpy(batch.tokens)).flatten(0, 1)
        answers = torch.from_numpy(batch.answers).flatten()
        optimizer.zero_grad()
        F.cross_entropy(logits, answers, ignore_index=-1).backward()
        optimizer.step()
    return model


@torch.no_grad()
def right(model: Model, batch: Batch) -> float:
    given = model(torch.from_numpy(batch.tokens)).argmax(-1).numpy()
    return float((given == batch.answers)[batch.answers >= 0].mean())


def small_models() -> Iterator[Other]:
    """Nine tasks, three models of each, twelve other scales."""
    for task in (name for name in TASKS if name != "noise"):
        for d_k, rule in ((16, "sqrt_dk"), (64, "sqrt_dk"), (16, "none")):
            model, calls = trained(task, d_k, rule), list[Call]()
            batch = TASKS[task].draw(np.random.default_rng(9), 128)
            with torch.no_grad(), listen(calls.append, model):
                model(torch.from_numpy(batch.tokens))
            before, scales = right(model, batch), [b.attention.scale for b in model.blocks]
            for factor in (d_k**-0.5, *FACTORS, d_k**0.5):
                for block, scale in zip(model.blocks, scales, strict=True):
                    block.attention.scale = scale * factor
                yield Other(moved(calls, factor), before - right(model, batch))


@torch.no_grad()
def demo() -> Iterator[tuple[float, float, float]]:
    """Factor, moved weight, and the mean cosine of the demo's embeddings with those as trained."""
    subject, calls = load(), list[Call]()
    layers = [layer.attention.self for layer in subject.model.encoder.layer]
    scale = layers[0].scaling

    def embedded(factor: float) -> Any:
        for layer in layers:
            layer.scaling = scale * factor
        found = [subject.model(**given.kwargs).last_hidden_state[0] for given in subject.inputs]
        return F.normalize(torch.stack([states.mean(0) for states in found]), dim=-1)

    for given in subject.inputs:
        with listen(calls.append, subject.model):
            subject.model(**given.kwargs)
    before = embedded(1.0)
    for factor in (32**-0.5, 12**-0.5, *FACTORS[1:-1], 32**0.5):
        cosine = float((embedded(factor) * before).sum(-1).mean())
        yield factor, moved(calls, factor), cosine


def main() -> None:
    print(
        "| the demo's scale times | weight moved | cosine of embeddings |",
        "|---|---|---|",
        sep="\n",
    )
    for factor, share, cosine in demo():
        print(f"| {factor:.2f} | {share:.2f} | {cosine:.3f} |", flush=True)
    with one_thread():
        found = list(small_models())
    edges = [0.0, *sorted(MOVED.values()), 1.0]
    print("\n| weight moved | scales | over 1 % of the answers lost | over 5 % | median |")
    print("|---|---|---|---|---|")
    for low, high in pairwise(edges):
        lost = np.array([other.wrong for other in found if low <= other.moved < high])
        shares = (f"{np.mean(lost > limit):.0%}" for limit in (0.01, 0.05))
        row = (f"{low:g} to {high:g}", str(len(lost)), *shares, f"{np.median(lost):.1%}")
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
