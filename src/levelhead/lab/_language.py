"""Training small language models under the same conditions but one, watched. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .._records import StepRecord
from ._measure import Array
from ._text import WORDS, stories
from ._threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

    from ._transformer import LanguageModel

WARM_UP = 20  # steps in which the learning rate rises
HELD_OUT = 256  # stories


@dataclass(frozen=True)
class Budget:
    """What every run gets alike.

    steps, batch: of training; batch is stories a step
    length:       of a story in words
    corpus:       how many different stories there are; None never shows one twice
    every:        each so many steps the watch looks
    """

    steps: int
    batch: int = 32
    length: int = 32
    corpus: int | None = None
    every: int = 10


@dataclass(frozen=True)
class Trained:
    """How a training went.

    loss:    by step, of the batch before the step was taken
    answers: by step, of the words that answer questions
    records: of the watched steps, from levelhead.torch.watch
    seen, unseen: loss at the end on stories trained with, and on others
    seen_answers, unseen_answers: the same of the words that answer questions
    """

    loss: Array
    answers: Array
    records: list[StepRecord]
    seen: float
    unseen: float
    seen_answers: float
    unseen_answers: float


@cache
def _corpus(count: int, length: int, seed: int, part: int) -> tuple[Any, Any]:
    import torch  # noqa: PLC0415 - an extra

    words, answers = stories(count, length, [seed, part])
    return torch.from_numpy(words), torch.from_numpy(answers)


def train(
    budget: Budget, seed: int, *, learning_rate: float, clip: float | None = None, **shape: Any
) -> Trained:
    """Train a model of this shape with Adam; text, its order and the start depend on seed alone.

    clip:  QK-clip, where the scores of a head may end
    shape: of `_transformer.Shape`
    """
    import torch  # noqa: PLC0415

    from ..torch import watch  # noqa: PLC0415
    from ._transformer import LanguageModel, Shape  # noqa: PLC0415

    stock = budget.corpus or budget.steps * budget.batch
    text, asked = _corpus(stock, budget.length + 1, seed, 0)
    loss, answers, records = [], [], list[StepRecord]()
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LanguageModel(Shape(**shape), len(WORDS), budget.length)
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), fused=True)
        order = torch.cat(
            [torch.randperm(stock) for _ in range(-(-budget.steps * budget.batch // stock))]
        ).split(budget.batch)
        every = budget.every if clip is None else 1
        with watch(model, every=every, sinks=[records.append]):
            for step in range(budget.steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * min(1.0, (step + 1) / WARM_UP)
                losses = _losses(model, text[order[step]])
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
                if clip is not None:
                    _clip(model, records[-1], clip)
                loss.append(float(losses.detach().mean()))
                answers.append(float(losses.detach()[asked[order[step]][:, 1:]].mean()))
        model.eval()
        ends = [
            end
            for words, marked in (
                (text[:HELD_OUT], asked[:HELD_OUT]),
                _corpus(HELD_OUT, budget.length + 1, seed, 1),
            )
            for end in _ends(model, words, marked)
        ]
    seen, seen_answers, unseen, unseen_answers = ends
    return Trained(
        np.array(loss), np.array(answers), records, seen, unseen, seen_answers, unseen_answers
    )


def _losses(model: LanguageModel, text: Tensor) -> Tensor:
    """The loss of every word but the first."""
    from torch.nn.functional import cross_entropy  # noqa: PLC0415

    logits = model(text[:, :-1]).flatten(0, 1)
    losses: Tensor = cross_entropy(logits, text[:, 1:].flatten(), reduction="none")
    return losses.view(len(text), -1)


def _ends(model: LanguageModel, text: Tensor, asked: Tensor) -> tuple[float, float]:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        losses = _losses(model, text)
    return float(losses.mean()), float(losses[asked[:, 1:]].mean())


def _clip(model: LanguageModel, record: StepRecord, limit: float) -> None:
    import torch  # noqa: PLC0415

    for name, health in record.health.items():
        layer: Any = model.get_submodule(name)
        layer.clip(torch.from_numpy(health.score_max), limit)
