"""Training small language models that differ in one condition, watched. Needs PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .._records import StepRecord
from ._corpus import LENGTH, WORDS, stories
from ._figures import Array
from ._threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

    from ._transformer import LanguageModel

WARM_UP = 20  # steps in which the learning rate rises
UNSEEN = 128  # stories held out
KNOWS_NOTHING = float(np.log(len(WORDS)))


@dataclass(frozen=True)
class Budget:
    """What every run gets.

    steps, batch: of training; batch is the number of stories per step
    corpus:       how many different stories there are; None never shows one twice
    every:        the watch records every so many steps
    """

    steps: int
    batch: int = 16
    corpus: int | None = None
    every: int = 10


@dataclass(frozen=True)
class Trained:
    """How a training went. A model that broke down counts as one that knows nothing.

    loss, answers: by step, before its update, on all words and on those that answer a question
    records:       of the watched steps, from levelhead.torch.watch
    seen, unseen:  the final loss on answers, in stories of the training and in others
    unseen_words:  the final loss on all words in others
    broke:         whether a loss was not finite
    """

    loss: Array
    answers: Array
    records: list[StepRecord]
    seen: float
    unseen: float
    unseen_words: float
    broke: bool

    def heads(self) -> Iterator[dict[str, Any]]:
        """One row for each watched step and head."""
        for record in self.records:
            for layer, (name, health) in enumerate(record.health.items()):
                gradients = record.gradients[name]
                for head in range(health.shape[-1]):
                    yield {
                        **{"step": record.step, "layer": layer, "head": head},
                        "score_std": float(health.score_var[head]) ** 0.5,
                        "score_max": float(max(health.score_max[head], -health.score_min[head])),
                        "entropy_ratio": float(health.entropy_ratio[head]),
                        "saturated": float(health.saturated[head]),
                        "survival": float(gradients.survival[head]),
                    }


def train(
    budget: Budget, seed: int, *, rate: float, clip: float | None = None, **shape: Any
) -> Trained:
    """Train a model with Adam; text, order and initial weights depend only on the seed.

    rate:  the learning rate
    clip:  QK-clip: the largest score that a head may have
    shape: of `_transformer.Shape`
    """
    import torch  # noqa: PLC0415 - an extra

    from ..torch import watch  # noqa: PLC0415
    from ._transformer import LanguageModel, Shape  # noqa: PLC0415

    stock = budget.corpus or budget.steps * budget.batch
    text, asked = _corpus(stock, seed, 0)
    words, answers, records = [], [], list[StepRecord]()
    with one_thread(), no_alerts(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        epochs = -(-budget.steps * budget.batch // stock)
        order = torch.cat([torch.randperm(stock) for _ in range(epochs)]).split(budget.batch)
        model = LanguageModel(Shape(**shape), len(WORDS), LENGTH - 1)
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), fused=True)
        every = budget.every if clip is None else 1
        with watch(model, every=every, sinks=[records.append]):
            for step, chosen in zip(range(budget.steps), order, strict=False):
                optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
                losses = _losses(model, text[chosen])
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
                if clip is not None:
                    _clip(model, records[-1], clip)
                words.append(float(losses.detach().mean()))
                answers.append(float(losses.detach()[asked[chosen][:, 1:]].mean()))
        _, seen = _final_losses(model, text[:UNSEEN], asked[:UNSEEN])
        unseen_words, unseen = _final_losses(model, *_corpus(UNSEEN, seed, 1))
    return Trained(
        loss=np.nan_to_num(words, nan=KNOWS_NOTHING),
        answers=np.nan_to_num(answers, nan=KNOWS_NOTHING),
        records=[record for record in records if record.step % budget.every == 0],
        seen=float(np.nan_to_num(seen, nan=KNOWS_NOTHING)),
        unseen=float(np.nan_to_num(unseen, nan=KNOWS_NOTHING)),
        unseen_words=float(np.nan_to_num(unseen_words, nan=KNOWS_NOTHING)),
        broke=not np.isfinite([*words, unseen]).all(),
    )


@lru_cache(maxsize=8)
def _corpus(count: int, seed: int, part: int) -> tuple[Tensor, Tensor]:
    import torch  # noqa: PLC0415

    words, answers = stories(count, [seed, part])
    return torch.from_numpy(words), torch.from_numpy(answers)


def _losses(model: LanguageModel, text: Tensor) -> Tensor:
    """The loss on every word but the first."""
    from torch.nn.functional import cross_entropy  # noqa: PLC0415

    logits = model(text[:, :-1]).flatten(0, 1)
    losses: Tensor = cross_entropy(logits, text[:, 1:].flatten(), reduction="none")
    return losses.view(len(text), -1)


def _final_losses(model: LanguageModel, text: Tensor, asked: Tensor) -> tuple[float, float]:
    """Loss on all words, and on those that answer a question."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        losses = _losses(model, text)
    return float(losses.mean()), float(losses[asked[:, 1:]].mean())


def _clip(model: LanguageModel, record: StepRecord, limit: float) -> None:
    import torch  # noqa: PLC0415

    for name, health in record.health.items():
        layer: Any = model.get_submodule(name)
        layer.clip(torch.from_numpy(health.score_max), limit)


@contextmanager
def no_alerts() -> Iterator[None]:
    """Keep the watch from logging: here models are meant to go wrong."""
    log = logging.getLogger("levelhead")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled
