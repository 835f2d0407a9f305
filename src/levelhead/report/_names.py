"""Dotted module names, made short for tables."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_NAME = 44


def cut(name: str) -> str:
    """A name that is no longer than LONGEST_NAME."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def short_names(names: Sequence[str]) -> list[str]:
    """The names without the parts that all share, but for the part before the first difference.

    >>> from levelhead.report._names import short_names
    >>> short_names(["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"])
    ['layer.0', 'layer.1']
    """
    if len(set(names)) < 2:
        return list(names)
    paths = [name.split(".") for name in names]
    start = max(_shared(paths) - 1, 0)
    shortest = min(len(path) for path in paths)
    end = min(_shared([path[::-1] for path in paths]), shortest - start - 1)
    return [".".join(path[start : len(path) - end]) for path in paths]


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """How many parts at the start are the same in all."""
    for place, parts in enumerate(zip(*paths, strict=False)):
        if len(set(parts)) > 1:
            return place
    return min(len(path) for path in paths)
