"""What goes wrong with a target, in words for the person who named it."""

from __future__ import annotations


class TargetError(ValueError):
    """The target cannot be checked; the message says why and what to do."""


def told(error: BaseException) -> str:
    """An exception in one line: its kind and the first line of what it says, two after a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'levelhead[{extra}]'"
