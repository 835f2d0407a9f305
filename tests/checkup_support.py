"""Attention calls and results for the tests of the checkup, made of NumPy alone."""

import base64
import zlib
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

import levelhead as lh
from levelhead._moved import Moved
from levelhead.checkup import Input, Subject, examine
from levelhead.checkup._pictures import Picture
from levelhead.checkup._scores import NEAR, ONE


class FakeCall(NamedTuple):
    """The interface of the calls that levelhead.torch.listen hands out."""

    module: str
    query: np.ndarray  # (batch, heads, length, d_k)
    key: np.ndarray
    scale: float | None = None
    options: dict = {}  # noqa: RUF012

    @property
    def dk(self):
        return self.query.shape[-1]

    @property
    def shape(self):
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def health(self):
        return self._run(1.0).health

    def moved(self, factor):
        (one, other), rows = (self._run(each) for each in (1.0, factor)), self.health.choice_rows
        distance = np.abs(other.weights - one.weights).sum((-2, -1)) / 2
        squares = [((x) ** 2).sum((-2, -1)) for x in (other.output - one.output, one.output)]
        return Moved(other.health, np.stack([rows, distance, *squares], -1))

    def weights(self, entry, head):
        return self._run(1.0).weights[entry, head]

    def scores(self, entry, head):
        scores = self.scale * self.query[entry, head] @ self.key[entry, head].T
        causal = self.options.get("causal", False)
        return np.where(np.tri(*scores.shape), scores, np.nan) if causal else scores

    def _run(self, factor):
        return lh.reference(
            *(self.query, self.key, self.key),
            scale=(self.scale or 1.0) * factor,
            return_health=True,
            return_weights=True,
            **self.options,
        )


def make_call(module="attn", *, seed=0, heads=3, length=12, d_k=16, grow=(), batch=1, **options):
    """A call with random queries; head h has queries grow[h] times as large."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, batch, heads, length, d_k))
    for head, factor in enumerate(grow):
        query[:, head] *= factor
    return FakeCall(module, query, key, d_k**-0.5, options)


class Silent(torch.nn.Module):
    """A model whose attention the fake listener makes up."""

    def forward(self, *args, **kwargs):
        return args


def listen_to(*calls, missed=()):
    """A stand-in for levelhead.torch.listen that gets the given calls in every run."""

    @contextmanager
    def listen(on_call, model, on_not_understood):
        yield
        for call in calls:
            on_call(call)
        for module in missed:
            on_not_understood(module)

    return listen


def scales_of(result):
    """What other scales would do, by rule; the one in use under the rule that it follows."""
    return {scale.get("follows", scale["rule"]): scale for scale in result["scales"]}


def make_result(*calls, texts=(), pictures=True, name="a model", notes=(), missed=(), factors=()):
    """The checkup's dict for some calls; texts: lists of tokens, one per input."""
    inputs = [Input(" ".join(tokens), tokens=[tokens]) for tokens in texts] or [Input("the input")]
    subject = Subject(name, Silent(), inputs, notes=notes)
    listen = listen_to(*calls, missed=missed)
    return examine(subject, pictures=pictures, factors=factors, listen=listen)


def unpacked(result):
    """The pictures of a result, layer by layer, as a page reads them."""
    pictures = result["pictures"]
    content = zlib.decompress(base64.b64decode(pictures["scores"]))
    count = sum(
        len(layer["heads"]) * (1 + one["rows"] * (1 + one["groups"]))
        for layer, places in zip(result["layers"], pictures["layers"], strict=True)
        for one in filter(None, places)
    )
    floats = np.frombuffer(content, "<f4", count)
    low, high = np.frombuffer(content, np.uint8, offset=4 * count).reshape(2, -1).astype(int)
    codes = low + 256 * high

    def read(one, heads):
        rows, columns, groups = (one[name] for name in ("rows", "columns", "groups"))
        parts = floats[one["floats"] :][: heads * (1 + rows * (1 + groups))].reshape(heads, -1)
        step, tops, many = np.split(parts, [1, 1 + rows], axis=1)
        size = rows * (columns + groups + columns * one["weights"])
        numbers = codes[one["codes"] :][: heads * size].reshape(heads, -1)
        level, kept = np.split(numbers, [rows * (columns + groups)], axis=1)
        gap = np.where(level > 0, NEAR * np.expm1((level - 1) * step), np.nan)
        scores = tops[..., None] - gap.reshape(heads, rows, -1)
        return Picture(
            one["queries"],
            one["keys"],
            scores[..., :columns],
            scores[..., columns:],
            many.reshape(heads, rows, groups),
            kept.reshape(heads, rows, columns) / ONE if one["weights"] else None,
        )

    return [
        [None if one is None else read(one, len(layer["heads"])) for one in places]
        for layer, places in zip(result["layers"], pictures["layers"], strict=True)
    ]
