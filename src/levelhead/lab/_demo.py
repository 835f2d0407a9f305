"""The pretrained demo model, loaded once. Needs the extra "demo"."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkup import Subject


@cache
def demo() -> Subject:
    """The model and the sentences of the checkup."""
    from ..checkup import load  # noqa: PLC0415 - imports PyTorch

    return load()


@cache
def demo_reads(texts: tuple[str, ...]) -> Subject:
    """The model with texts of our own."""
    from ..checkup import load_demo  # noqa: PLC0415

    return load_demo(texts)
