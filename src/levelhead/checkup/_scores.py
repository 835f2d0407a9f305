"""Scores in few bits: what a page needs to compute attention at any scale."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ._pictures import Picture

# A score is kept as how far it is below the largest of its row, which alone makes the weights: 0 is
# hidden, 1 the largest itself, and so on in steps that grow with the distance. Of 12 bits, the
# weights are within 0.001 at any scale of the slider.
LEVELS = 2**12 - 1
NEAR = 0.25  # below this distance steps are even, beyond they grow
ONE = 2**16 - 1  # the weight 1, where weights are kept


def pack(content: bytes) -> str:
    """Compressed, as text that may stand in a page and in JSON."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


def packed_scores(layers: Sequence[Sequence[Picture | None]]) -> tuple[list[list[Any]], str]:
    """What stands where, layer by layer and input by input, and the numbers themselves.

    The bytes: float32 per picture and head (step, the largest score of each row, how many keys
    each group beyond the corner has), then the codes of all, low bytes first, then high bytes:
    apart, they compress better.
    """
    floats: list[NDArray[np.float32]] = []
    codes: list[NDArray[np.uint16]] = []

    def add(picture: Picture | None) -> dict[str, Any] | None:
        if picture is None:
            return None
        start = {"floats": sum(map(len, floats)), "codes": sum(map(len, codes))}
        for head in range(len(picture.scores)):
            _add_head(picture, head, floats, codes)
        _, rows, columns = picture.scores.shape
        return {
            **{"queries": picture.queries, "keys": picture.keys, "rows": rows, "columns": columns},
            **{"groups": picture.beyond.shape[-1], "weights": picture.weights is not None},
            **start,
        }

    index = [[add(picture) for picture in places] for places in layers]
    numbers = np.concatenate(codes) if codes else np.zeros(0, np.uint16)
    body = np.concatenate(floats) if floats else np.zeros(0, np.float32)
    low, high = (numbers & 255).astype(np.uint8), (numbers >> 8).astype(np.uint8)
    return index, pack(body.astype("<f4").tobytes() + low.tobytes() + high.tobytes())


def _add_head(
    picture: Picture, head: int, floats: list[NDArray[np.float32]], codes: list[NDArray[np.uint16]]
) -> None:
    every = np.concatenate([picture.scores[head], picture.beyond[head]], axis=-1, dtype=np.float64)
    visible = np.isfinite(every)
    top = np.where(visible, every, -np.inf).max(axis=-1, keepdims=True)
    gap = np.where(visible, top - every, 0.0)
    step = np.log1p(gap.max(initial=0.0) / NEAR) / (LEVELS - 1)
    code = 1 + np.round(np.log1p(gap / NEAR) / (step or 1.0))
    rows = np.where(np.isfinite(top), top, np.nan)
    floats += [
        part.ravel().astype(np.float32) for part in (np.array([step]), rows, picture.many[head])
    ]
    codes.append(np.where(visible, code, 0).astype(np.uint16).ravel())
    if picture.weights is not None:
        codes.append(np.round(np.nan_to_num(picture.weights[head]) * ONE).astype(np.uint16).ravel())
