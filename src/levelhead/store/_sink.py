"""What every sink is: called with each record, closed at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._records import TRAINING, StepRecord

if TYPE_CHECKING:
    from typing import Self


class Sink(ABC):
    """A place that keeps records. Any callable will do as one; these also close by `with`."""

    @abstractmethod
    def __call__(self, record: StepRecord) -> None:
        """Keep the record of one step."""

    @abstractmethod
    def log(self, step: int, scalars: Mapping[str, float], phase: str = TRAINING) -> None:
        """Keep scalars that were logged after the record of their step was handed on."""

    @abstractmethod
    def close(self) -> None:
        """There will be no further record. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
