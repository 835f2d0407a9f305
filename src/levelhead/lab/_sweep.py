"""Trainings that end well or badly, recorded head by head. Needs PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from itertools import count as count_up
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._records import StepRecord
from ..torch import watch
from ._figures import Array
from ._tasks import TASKS, Batch, Task
from ._threads import one_thread
from ._train import no_alerts
from ._transformer import Block, Shape

USUAL: dict[str, Any] = {"width": 64, "heads": 4, "d_k": 16, "weights": "linear"}
REFERENCES = 8  # sound runs of each task, whose median is the healthy path


@dataclass(frozen=True)
class Setting:
    """One training, from its seed to its fault.

    task:      a name of TASKS
    optimiser: "adam", "adamw" or "sgd" (with momentum)
    rate:      the learning rate, after `warm_up` steps; "cosine" lets it fall to a tenth
    fault:     a name of FAULTS, from step `fault_at` on
    more:      steps that are added at the end, to see whether a slow run is only slow
    shape:     further fields of `Shape`, as pairs
    """

    task: str
    seed: int = 0
    steps: int = 400
    batch: int = 16
    optimiser: str = "adam"
    rate: float = 3e-3
    warm_up: int = 20
    schedule: str = "constant"
    fault: str = ""
    fault_at: int = 0
    more: int = 0
    shape: tuple[tuple[str, Any], ...] = ()

    def shaped(self, **changes: Any) -> Setting:
        """The same with another shape."""
        return replace(self, shape=tuple(sorted((dict(self.shape) | changes).items())))


@dataclass(frozen=True)
class Trace:
    """What there is to judge by: the loss at every step, and the sums of all heads.

    sums:      (steps, heads, columns of Health)
    grad_sums: (steps, heads, columns of GradHealth)
    layers:    the name of each layer, and how many heads it has
    grad_norm: of all parameters
    """

    loss: Array
    sums: Array
    grad_sums: Array
    layers: tuple[tuple[str, int], ...]
    grad_norm: Array


def settings(
    task: str, count: int, seed: int, *, steps: int = 400, norms: Sequence[str] = ("pre", "post")
) -> list[Setting]:
    """Trainings of a task as people run them, some of them ill: the same for the same seed.

    The first REFERENCES of them are sound; the others differ from them at random.
    """
    rng = np.random.default_rng([seed, *task.encode()])
    sound = [
        Setting(task, seed=seed + place, steps=steps, rate=rate).shaped(norm=norm)
        for place, (norm, rate) in enumerate(product([*norms[:2]] * 2, (1e-3, 3e-3)))
    ][:REFERENCES]
    others = (_at_random(rng, task, seed + 100 + place, steps, norms) for place in count_up())
    return list(islice(chain(sound, others), count))


def _at_random(
    rng: np.random.Generator, task: str, seed: int, steps: int, norms: Sequence[str]
) -> Setting:
    def one_of(*choices: Any, odds: Sequence[float] | None = None) -> Any:
        return choices[rng.choice(len(choices), p=odds)]

    setting = Setting(
        task,
        seed=seed,
        steps=steps,
        optimiser=one_of("adam", "adamw", "sgd", odds=(0.5, 0.35, 0.15)),
        rate=float(f"{10 ** rng.uniform(-3.5, -1.8):.2g}"),
        warm_up=one_of(0, 20, 100),
        schedule=one_of("constant", "cosine"),
    )
    if setting.optimiser == "sgd":
        setting = replace(setting, rate=float(f"{30 * setting.rate:.2g}"))
    rule = one_of("sqrt_dk", "none", "dk", "sqrt_dmodel", odds=(0.35, 0.4, 0.2, 0.05))
    setting = setting.shaped(
        rule=rule,
        factor=one_of(1.0, 4.0, 16.0, odds=(0.6, 0.2, 0.2)) if rule == "sqrt_dk" else 1.0,
        d_k=one_of(8, 16, 32, 64, 128, odds=(0.1, 0.2, 0.2, 0.25, 0.25)),
        depth=one_of(1, 2, 3),
        heads=one_of(2, 4),
        norm=one_of(*norms),
        weights=one_of("linear", "unit", "small", odds=(0.4, 0.4, 0.2)),
        qk_norm=one_of(True, False, odds=(0.1, 0.9)),
        dropout=one_of(0.0, 0.1, odds=(0.8, 0.2)),
    )
    if rng.random() < 0.3:  # something breaks in a run that was sound
        setting = setting.shaped(rule="sqrt_dk", factor=1.0, weights="linear")
        at = int(rng.integers(steps // 4, 5 * steps // 8))
        setting = replace(
            setting, optimiser="adam", rate=one_of(1e-3, 3e-3), fault=one_of(*FAULTS), fault_at=at
        )
    return setting


def mended(setting: Setting) -> list[Setting]:
    """The same run with what would cure its attention: the right scale, then QK-norm as well."""
    right = setting.shaped(rule="sqrt_dk", factor=1.0)
    cures = [right.shaped(qk_norm=True)]
    return cures if right == setting else [right, *cures]


class Model(nn.Module):
    """A transformer with an answer at every position."""

    def __init__(self, task: Task, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.ModuleList(nn.Embedding(many, shape.width) for many in task.tokens)
        self.positions = nn.Embedding(task.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.Identity() if shape.norm == "none" else nn.LayerNorm(shape.width)
        self.out = nn.Linear(shape.width, task.answers)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length, channels) → (batch, length, answers)."""
        x = self.positions.weight[: tokens.shape[1]]
        for channel, embed in enumerate(self.tokens):
            x = x + embed(tokens[..., channel])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.norm(x))
        return logits

    @property
    def layers(self) -> list[Block]:
        """The blocks, as what they are."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def scores_parameters(self) -> list[nn.Parameter]:
        """Those of queries and keys."""
        return [
            parameter
            for block in self.layers
            for part in (block.attention.query, block.attention.key)
            for parameter in part.parameters()
        ]


def train(setting: Setting, recorded: bool = True) -> Trace:
    """Train as the setting says; the same setting gives the same trace."""
    task = TASKS[setting.task]
    rng = np.random.default_rng([setting.seed, 1])
    losses, norms, records = list[float](), list[float](), list[StepRecord]()
    with one_thread(), no_alerts(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = Model(task, Shape(**USUAL | {"causal": task.causal} | dict(setting.shape)))
        optimiser = _optimiser(model, setting)
        every = 1 if recorded else 1 << 30
        with watch(model, every=every, sinks=[records.append]):
            for step in range(setting.steps + setting.more):
                batch = task.draw(rng, setting.batch)
                for group in optimiser.param_groups:
                    group["lr"] = _rate(setting, step)
                if setting.fault and step >= setting.fault_at:
                    batch = FAULTS[setting.fault](model, optimiser, batch, step - setting.fault_at)
                loss = _loss(model, batch)
                optimiser.zero_grad()
                loss.backward()
                norms.append(_norm(model))
                optimiser.step()
                losses.append(float(loss.detach()))
    layers = tuple((name, part.shape[-1]) for name, part in records[0].health.items())
    return Trace(
        loss=np.array(losses),
        sums=np.stack([np.concatenate([h.sums for h in r.health.values()]) for r in records]),
        grad_sums=np.stack(
            [np.concatenate([r.gradients[name].sums for name, _ in layers]) for r in records]
        ),
        layers=layers,
        grad_norm=np.array(norms),
    )


def _optimiser(model: Model, setting: Setting) -> torch.optim.Optimizer:
    """With the parameters of queries and keys as the second group."""
    scores = model.scores_parameters()
    known = {id(each) for each in scores}
    others = [each for each in model.parameters() if id(each) not in known]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": scores}]
    if setting.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=setting.rate, momentum=0.9)
    kind = torch.optim.Adam if setting.optimiser == "adam" else torch.optim.AdamW
    return kind(groups, lr=setting.rate, betas=(0.9, 0.98), fused=True)


def _rate(setting: Setting, step: int) -> float:
    rate = setting.rate * min(1.0, (step + 1) / max(setting.warm_up, 1))
    if setting.schedule == "cosine":
        rate *= 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / setting.steps))
    return rate


def _loss(model: Model, batch: Batch) -> Tensor:
    logits = model(torch.from_numpy(batch.tokens)).flatten(0, 1)
    return F.cross_entropy(logits, torch.from_numpy(batch.answers).flatten(), ignore_index=-1)


@torch.no_grad()
def _norm(model: Model) -> float:
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


# ---------------------------------------------------------------- faults

Fault = Callable[[Model, torch.optim.Optimizer, Batch, int], Batch]


def _faster(model: Model, optimiser: torch.optim.Optimizer, batch: Batch, after: int) -> Batch:
    """The learning rate is too high from now on."""
    for group in optimiser.param_groups:
        group["lr"] *= 30
    return batch


def _ever_faster(model: Model, optimiser: torch.optim.Optimizer, batch: Batch, after: int) -> Batch:
    """The learning rate of queries and keys doubles every 20 steps."""
    optimiser.param_groups[1]["lr"] *= min(2 ** (after / 20), 64.0)
    return batch


@torch.no_grad()
def _growing_scores(
    model: Model, optimiser: torch.optim.Optimizer, batch: Batch, after: int
) -> Batch:
    """One layer's queries and keys grow, 2 % per step."""
    last = model.layers[-1].attention
    for part in (last.query, last.key):
        part.weight *= 1.02
    return batch


@torch.no_grad()
def _jump(model: Model, optimiser: torch.optim.Optimizer, batch: Batch, after: int) -> Batch:
    """All queries and keys are four times as large at once."""
    if after == 0:
        for each in model.scores_parameters():
            each.mul_(4)
    return batch


def _bad_batch(model: Model, optimiser: torch.optim.Optimizer, batch: Batch, after: int) -> Batch:
    """A few steps far too large, towards wrong answers."""
    if after >= 3:
        return batch
    for group in optimiser.param_groups:
        group["lr"] *= 20
    return Batch(batch.tokens, np.where(batch.answers < 0, -1, 0))


@torch.no_grad()
def _growing_mlp(model: Model, optimiser: torch.optim.Optimizer, batch: Batch, after: int) -> Batch:
    """The weights after attention grow: nothing that attention could help."""
    for each in model.layers[-1].mlp.parameters():
        each.mul_(1.02)
    return batch


def _wrong_answers(
    model: Model, optimiser: torch.optim.Optimizer, batch: Batch, after: int
) -> Batch:
    """The answers are mixed up from now on: nothing is left to learn."""
    mixed = batch.answers.copy()
    there = mixed >= 0
    mixed[there] = np.random.default_rng(after).permutation(mixed[there])
    return Batch(batch.tokens, mixed)


FAULTS: dict[str, Fault] = {
    "scores learn ever faster": _ever_faster,
    "scores grow": _growing_scores,
    "scores jump": _jump,
    "all learns too fast": _faster,
    "bad batch": _bad_batch,
    "MLP grows": _growing_mlp,
    "wrong answers": _wrong_answers,
}
