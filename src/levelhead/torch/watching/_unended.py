"""Steps that cannot end: when to say so, and what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PATIENCE = 100  # steps of other optimizers before it is said at once, not at the end
_ROUNDS = 10  # forward and backward passes of one step that are worth a word at the end

_ADVICE = """\
A step ends when an optimizer that holds parameters of the watched model steps. What to do:
  - give the watch the model that is trained: the very object, not a copy of it,
  - or call watch.step() after each update, if none of torch.optim's optimizers does it."""


class Unended:
    """Looks for signs that a model is trained while nothing ends its steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._called = self._passed = False  # since another's optimizer stepped; since backward
        self._updates = self._rounds = 0
        self._others: set[str] = set()
        self._before: list[tuple[Tensor, Tensor]] = []

    def forward(self) -> None:
        """A call of the model with gradients."""
        self._called = self._passed = True

    def backward(self) -> None:
        """Gradients have arrived at such a call."""
        if self._passed:
            self._passed = False
            self._rounds += 1
            if self._rounds == 1:
                trainable = (p for p in self._model.parameters() if p.requires_grad)
                self._before = [(p, _glimpse(p).clone()) for p in trainable]

    def step_of_another(self, optimizer: torch.optim.Optimizer) -> str | None:
        """An optimizer stepped that holds nothing of the model; what to say, if it is time."""
        if self._called:
            self._called = False
            self._updates += 1
            self._others.add(type(optimizer).__name__)
            if self._updates == _PATIENCE:
                return self.message()
        return None

    def message(self) -> str | None:
        """What to say if no step has ended; None if all may be well."""
        if self._updates > 1:
            return (
                f"levelhead.torch.watch: the optimizers that stepped "
                f"({', '.join(sorted(self._others))}) hold no parameter of the watched "
                f"{type(self._model).__name__}, so its calls before {self._updates} updates are "
                f"all one step. {_ADVICE}"
            )
        if self._rounds >= _ROUNDS or (self._rounds > 1 and self._has_changed()):
            return (
                f"levelhead.torch.watch: {self._rounds} times the watched "
                f"{type(self._model).__name__} ran forward and backward, but no optimizer of it "
                f"stepped, so all is one step. {_ADVICE}"
            )
        return None

    def _has_changed(self) -> bool:
        """Whether parameters are others than at the first backward pass: somebody updates them."""
        pairs = ((_glimpse(p), before) for p, before in self._before)
        return any(now.dtype == then.dtype and not torch.equal(now, then) for now, then in pairs)


def _glimpse(parameter: Tensor) -> Tensor:
    """A number of it, where it is; of one that is sharded, of the part that is here."""
    here = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return here.detach().reshape(-1)[:1]
