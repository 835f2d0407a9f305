"""The attention itself, kept small enough for a page: scores of some inputs, cut at a corner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._scores import packed_scores
from ._subject import Input

if TYPE_CHECKING:
    from ..torch import Call

Matrix = NDArray[np.floating[Any]]

MOST_INPUTS = 8
MOST_TOKENS = 64  # a side of a picture; more cannot be read
MOST_PAIRS = 2**20  # L·S of a call that is looked at; beyond, one head alone takes seconds
MOST_NUMBERS = 700_000  # on a page, which then stays below 3 MB
# A bias, a cap or a sink between scores and weights shows as a difference larger than rounding.
PLAIN_WITHIN = 2e-3


@dataclass(frozen=True)
class Picture:
    """One call's attention on one batch entry: the corner of every head that a page shows.

    Weights are not kept where they are the softmax of the scores: a page computes them at any
    scale. For that it needs the keys beyond the corner too; they stand together in few groups.

    queries, keys: L and S of the call; the corner may be smaller
    scores:        (heads, rows, columns), NaN where a pair is hidden
    beyond, many:  (heads, rows, groups): a score that stands for so many keys beyond the corner
    weights:       as the scores, where these alone do not give them; otherwise None
    """

    queries: int
    keys: int
    scores: Matrix
    beyond: Matrix
    many: Matrix
    weights: Matrix | None

    @property
    def numbers(self) -> int:
        """How many of them a page has to hold."""
        twice = 1 if self.weights is None else 2
        return twice * self.scores.size + 2 * self.beyond.size

    def cut(self, side: int) -> Picture:
        """The same with a smaller corner."""
        if side >= max(self.scores.shape[1:]):
            return self
        outside = self.scores[:, :side, side:]
        beyond, many = _grouped(
            np.concatenate([outside, self.beyond[:, :side]], axis=-1),
            np.concatenate([np.isfinite(outside), self.many[:, :side]], axis=-1),
        )
        weights = None if self.weights is None else self.weights[:, :side, :side]
        return Picture(self.queries, self.keys, self.scores[:, :side, :side], beyond, many, weights)


@dataclass
class Album:
    """Pictures by layer and by input."""

    _labels: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    _pictures: dict[str, dict[int, Picture]] = field(default_factory=dict)
    _places: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, layer: str, call: Call, given: Input) -> None:
        """Draw the batch entries of a call, as far as there is room."""
        batch, _, queries, keys = call.shape
        if not 0 < queries * keys <= MOST_PAIRS:
            return
        for entry in range(batch):
            place = self._place(given, entry, many=batch > 1)
            if place is None:
                return
            self._pictures.setdefault(layer, {})[place] = _draw(call, entry)

    def _place(self, given: Input, entry: int, many: bool) -> int | None:
        key = (id(given), entry)
        if key not in self._places and len(self._labels) < MOST_INPUTS:
            self._places[key] = len(self._labels)
            label = f"{given.label}, entry {entry + 1}" if many else given.label
            tokens = given.tokens[entry] if entry < len(given.tokens) else ()
            self._labels.append((label, tokens))
        return self._places.get(key)

    def result(self, layers: Sequence[str]) -> dict[str, Any]:
        """Inputs by their label, what there is of them layer by layer, and the numbers, packed."""
        inputs, side = self._room()
        shown = [
            [
                self._pictures[name][place].cut(side)
                if place in self._pictures.get(name, {})
                else None
                for place in range(inputs)
            ]
            for name in layers
        ]
        index, scores = packed_scores(shown)
        return {
            "inputs": [
                {"label": label, "tokens": list(tokens)} for label, tokens in self._labels[:inputs]
            ],
            "layers": index,
            "scores": scores,
        }

    def _room(self) -> tuple[int, int]:
        """The number of inputs and the side that a page can hold; first fewer, then smaller."""

        def fits(inputs: int, side: int) -> bool:
            shown = (
                picture.cut(side).numbers
                for places in self._pictures.values()
                for place, picture in places.items()
                if place < inputs
            )
            return sum(shown) <= MOST_NUMBERS

        inputs, side = len(self._labels), MOST_TOKENS
        while inputs > 2 and not fits(inputs, side):
            inputs -= 1
        while side > 8 and not fits(inputs, side):
            side -= 4
        return inputs, side


def _draw(call: Call, entry: int) -> Picture:
    """The corner of every head of a batch entry."""
    _, heads, queries, keys = call.shape
    corner = slice(MOST_TOKENS)
    scores, beyond, many, weights, plain = [], [], [], [], True
    for head in range(heads):
        all_scores, all_weights = call.scores(entry, head), call.weights(entry, head)
        all_scores[~np.isfinite(all_scores)] = np.nan
        plain = plain and _is_softmax(all_scores, all_weights)
        outside = all_scores[corner, MOST_TOKENS:]
        score, count = _grouped(outside, np.isfinite(outside))
        scores.append(all_scores[corner, corner])
        beyond.append(score)
        many.append(count)
        weights.append(all_weights[corner, corner])
    return Picture(
        queries,
        keys,
        scores=np.stack(scores).astype(np.float32),
        beyond=np.stack(beyond).astype(np.float32),
        many=np.stack(many).astype(np.float32),
        weights=None if plain else np.stack(weights),
    )


def _is_softmax(scores: Matrix, weights: Matrix) -> bool:
    visible = np.where(np.isnan(scores), -np.inf, scores)
    top = visible.max(axis=-1, keepdims=True)
    exps = np.exp(visible - np.where(np.isfinite(top), top, 0.0))
    with np.errstate(invalid="ignore"):
        softmax = np.nan_to_num(exps / exps.sum(axis=-1, keepdims=True), nan=0.0)
        return bool(np.all(np.abs(softmax - np.nan_to_num(weights)) < PLAIN_WITHIN))


def _grouped(scores: Matrix, many: Matrix) -> tuple[Matrix, Matrix]:
    """Keys, the largest score first, in groups of 1, 1, 1, 1, 2, 2, 3, 5, …, a score for each.

    The score is the one that gives the group's weight exactly as trained. At other scales it is
    close, for large scores, which matter most, stand almost alone.
    """
    if not scores.shape[-1]:
        return scores, many
    scores = np.where(np.isfinite(scores), scores, -np.inf)
    order = np.argsort(-scores, axis=-1)
    scores, many = (np.take_along_axis(each, order, -1) for each in (scores, many))
    size = scores.shape[-1]
    ends = {round(2 ** (power / 2)) for power in range(2 * size.bit_length())}
    starts = [0, *sorted(end for end in ends if end < size)]
    top = np.maximum.reduceat(scores, starts, axis=-1)
    shift = np.where(np.isfinite(top), top, 0.0)
    shifts = np.repeat(shift, np.diff([*starts, size]), axis=-1)
    mass = np.add.reduceat(many * np.exp(scores - shifts), starts, axis=-1)
    count = np.add.reduceat(many.astype(np.float64), starts, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = shift + np.log(mass / count)
    return np.where(np.isfinite(score), score, np.nan), np.where(np.isfinite(score), count, 0.0)
