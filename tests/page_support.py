"""What the tests of a run's page share: its packed numbers, taken out again."""

import base64
import zlib

import numpy as np

from levelhead._health.verdicts import LEVELS, MARKS, VERDICTS, ranked
from levelhead.report._points import NOT_THERE


def opened(text):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def floats(text, heads, points):
    """Of shape (heads, points); the way of assets/packed.js."""
    planes = opened(text).reshape(3, heads, points).astype(np.uint32)
    steps = (planes[0] << 16) | (planes[1] << 8) | planes[2]
    bits = (np.cumsum(steps, axis=1, dtype=np.uint64) & 0xFFFFFF).astype(np.uint32) << 8
    return bits.view(np.float32)


def unpacked(data):
    """Per layer of a run's page: verdicts and levels as one text per head, and every series."""
    counts = [layer["heads"] for layer in data["layers"]]
    heads, points = sum(counts), len(data["steps"]) - data["start"]
    packed = dict(data["packed"])
    codes = opened(packed.pop("codes")).reshape(heads, points)
    series = {name: floats(text, heads, points) for name, text in packed.items()}
    order, found, start = list(ranked()), [], 0

    def letters(line):
        kinds = [None if code == NOT_THERE else divmod(code, len(LEVELS)) for code in line.tolist()]
        return (
            "".join(" " if kind is None else VERDICTS[order[kind[0]]].letter for kind in kinds),
            "".join(" " if kind is None else MARKS[LEVELS[kind[1]]] for kind in kinds),
        )

    for count in counts:
        here = slice(start, start + count)
        said = [letters(line) for line in codes[here]]
        found.append(
            {
                "verdicts": [verdicts for verdicts, _ in said],
                "levels": [levels for _, levels in said],
                "series": {name: values[here] for name, values in series.items()},
            }
        )
        start += count
    return found
