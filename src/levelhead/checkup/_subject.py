"""What a checkup examines: a model and the inputs of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True)
class Input:
    """The arguments of one call of the model.

    label:  what a person knows it by: the sentence, or "the input"
    tokens: per batch entry, the tokens by their text; empty where they are not known
    """

    label: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Subject:
    """A model and what to call it with.

    width: d_model; None where unknown, then heads × d_k stands for it
    notes: what a reader of the results should know, such as a text that was cut
    """

    name: str
    model: Module
    inputs: Sequence[Input]
    width: int | None = None
    notes: Sequence[str] = ()
