"""Numbers on other devices, brought to the CPU together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._health.statistics import Floats
from .._row_statistics import widened
from ._calls import numbers

_MANY = 4096  # that wait, so that they do not fill the memory


class Transfers:
    """Tensors whose numbers are wanted, all at once: each copy waits for the whole device."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[Floats], None]]] = []

    def add(self, tensor: Tensor, use: Callable[[Floats], None]) -> None:
        """Call `use` with the tensor's numbers, in its shape, when they are fetched."""
        self._waiting.append((tensor.detach(), use))
        if len(self._waiting) >= _MANY:
            self.fetch()

    def fetch(self) -> None:
        """One copy from each device; usually there is one."""
        waiting, self._waiting = self._waiting, []
        for device in dict.fromkeys(tensor.device for tensor, _ in waiting):
            here = [(tensor, use) for tensor, use in waiting if tensor.device == device]
            with torch.no_grad(), torch._C.DisableTorchFunction():  # nobody needs to see this
                flat = numbers(torch.cat([widened(tensor).reshape(-1) for tensor, _ in here]))
            first = 0
            for tensor, use in here:
                use(flat[first : first + tensor.numel()].reshape(tensor.shape))
                first += tensor.numel()

    def clear(self) -> None:
        self._waiting.clear()

    def __bool__(self) -> bool:
        return bool(self._waiting)
