"""What a sink says when it cannot write: once that it fails, once that it works again."""

from __future__ import annotations

import logging

_log = logging.getLogger("levelhead")


class Outage:
    """Counts the steps lost in a row, and speaks only when that begins or ends."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.lost = 0

    def failed(self, step: int, error: Exception, advice: str) -> None:
        """A step was not written."""
        if self.lost == 0:
            _log.warning(
                "%s: step %d could not be written (%s). Training goes on, and every later step "
                "is tried again. What to do: %s.",
                *(self.place, step, error, advice),
            )
        self.lost += 1

    def worked(self, step: int) -> None:
        """A step was written."""
        if self.lost:
            _log.warning("%s: written again from step %d on; %s.", self.place, step, self._losses())
        self.lost = 0

    def closed(self, error: Exception | None = None) -> None:
        """There will be no further step; an error kept the end from being marked."""
        if self.lost:
            _log.warning("%s: closed; %s at the end.", self.place, self._losses())
        if error is not None:
            _log.warning(
                "%s: the end of the run could not be marked (%s); it looks unfinished.",
                *(self.place, error),
            )
        self.lost = 0

    def _losses(self) -> str:
        return "1 step was lost" if self.lost == 1 else f"{self.lost} steps were lost"
