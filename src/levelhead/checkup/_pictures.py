"""The attention itself, kept small enough for a page: scores of some inputs, cut at a corner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .._health.numbers import plain
from ._subject import Input

if TYPE_CHECKING:
    from ..torch import Call

Matrix = NDArray[np.float64]

MOST_INPUTS = 8
MOST_TOKENS = 64  # a side of a picture; more cannot be read
MOST_PAIRS = 2**20  # L·S of a call that is looked at; beyond, one head alone takes seconds
MOST_NUMBERS = 1_500_000  # on a page, about 8 MB
# A bias, a cap or a sink between scores and weights shows as a difference larger than rounding.
PLAIN_WITHIN = 2e-3


@dataclass
class _Picture:
    """One call's attention on one batch entry: the corner of every head that a page shows."""

    queries: int  # L and S of the call; the corner may be smaller
    keys: int
    scores: Matrix  # (heads, rows, columns)
    lse: Matrix | None  # (heads, factors + 1, rows): log of the whole row's exp-sum, per scale
    weights: Matrix | None  # where scores alone do not give them


@dataclass
class Album:
    """Pictures by layer and by input.

    Weights are not kept where they are the softmax of the scores: a page computes them, at any
    scale f, as exp(f·score - lse), with the lse of the whole row, so that a cut row is right too.
    """

    _labels: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    _pictures: dict[str, dict[int, _Picture]] = field(default_factory=dict)
    _places: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, layer: str, call: Call, given: Input, factors: Sequence[float]) -> None:
        """Draw the batch entries of a call, as far as there is room."""
        batch, heads, queries, keys = call.shape
        if not 0 < queries * keys <= MOST_PAIRS:
            return
        for entry in range(batch):
            place = self._place(given, entry, many=batch > 1)
            if place is None:
                return
            drawn = [_draw(call, entry, head, factors) for head in range(heads)]
            plain = all(lse is not None for _, lse, _ in drawn)
            self._pictures.setdefault(layer, {})[place] = _Picture(
                queries,
                keys,
                np.stack([scores for scores, _, _ in drawn]),
                np.stack([lse for _, lse, _ in drawn if lse is not None]) if plain else None,
                None if plain else np.stack([weights for _, _, weights in drawn]),
            )

    def _place(self, given: Input, entry: int, many: bool) -> int | None:
        key = (id(given), entry)
        if key not in self._places and len(self._labels) < MOST_INPUTS:
            self._places[key] = len(self._labels)
            label = f"{given.label}, entry {entry + 1}" if many else given.label
            tokens = given.tokens[entry] if entry < len(given.tokens) else ()
            self._labels.append((label, tokens))
        return self._places.get(key)

    def result(self, layers: Sequence[str]) -> dict[str, Any]:
        """All of it as plain lists: inputs by their label, then layer by layer."""
        side, inputs = self._room()
        return {
            "inputs": [
                {"label": label, "tokens": list(tokens)} for label, tokens in self._labels[:inputs]
            ],
            "layers": [
                [_plain(self._pictures.get(name, {}).get(place), side) for place in range(inputs)]
                for name in layers
            ],
        }

    def _room(self) -> tuple[int, int]:
        """The side and the number of inputs that a page can hold; first fewer, then smaller."""

        def numbers(side: int, inputs: int) -> int:
            return sum(
                picture.scores.shape[0]
                * math.prod(min(side, size) for size in picture.scores.shape[1:])
                for places in self._pictures.values()
                for place, picture in places.items()
                if place < inputs
            )

        side, inputs = MOST_TOKENS, len(self._labels)
        while inputs > 2 and numbers(side, inputs) > MOST_NUMBERS:
            inputs -= 1
        while side > 8 and numbers(side, inputs) > MOST_NUMBERS:
            side -= 4
        return side, inputs


def _draw(
    call: Call, entry: int, head: int, factors: Sequence[float]
) -> tuple[Matrix, Matrix | None, Matrix]:
    """Scores, log-sums per scale and weights of one head: the corner of them."""
    scores, weights = call.scores(entry, head), call.weights(entry, head)
    lse = np.stack([_lse(factor * scores) for factor in (1.0, *factors)])
    with np.errstate(invalid="ignore"):
        softmax = np.nan_to_num(np.exp(scores - lse[0][:, None]), nan=0.0)
        plain = bool(np.all(np.abs(softmax - weights) < PLAIN_WITHIN))
    corner = slice(MOST_TOKENS), slice(MOST_TOKENS)
    return (
        scores[corner].astype(np.float32),
        lse[:, :MOST_TOKENS] if plain else None,
        weights[corner].astype(np.float32),
    )


def _lse(scores: Matrix) -> Matrix:
    """log Σ exp of each row's visible scores; -inf for a row without any."""
    visible = np.where(np.isnan(scores), -np.inf, scores)
    top = visible.max(axis=-1)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        total: Matrix = shift + np.log(np.exp(visible - shift[:, None]).sum(axis=-1))
    return total


def _plain(picture: _Picture | None, side: int) -> dict[str, Any] | None:
    if picture is None:
        return None
    scores = picture.scores[:, :side, :side]
    heads: list[dict[str, Any]] = []
    for head in range(len(scores)):
        # Three decimals whatever the size: the weights hang on differences of scores.
        kept: dict[str, Any] = {"scores": _numbers(scores[head], 3)}
        if picture.lse is not None:
            kept["lse"] = [_numbers(rows, 3) for rows in picture.lse[head][:, :side]]
        if picture.weights is not None:
            kept["weights"] = _numbers(picture.weights[head][:side, :side], 4)
        heads.append(kept)
    return {
        "queries": picture.queries,
        "keys": picture.keys,
        "rows": scores.shape[1],
        "columns": scores.shape[2],
        "heads": heads,
    }


def _numbers(values: Matrix, decimals: int) -> list[float | None]:
    """Row by row in one list, None where there is no finite number."""
    rounded: list[float | None] = plain(np.round(values.astype(np.float64).ravel(), decimals))
    return rounded
