"""Small tasks of different kinds, learned in a few hundred steps or, by design, never."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._corpus import LENGTH, WORDS, stories

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Rng = np.random.Generator


class Batch(NamedTuple):
    """Sequences, (n, length, channels), and at each position the right answer, -1 for none."""

    tokens: Ints
    answers: Ints


@dataclass(frozen=True)
class Task:
    """What a model is to learn.

    kind:     what it asks of attention
    tokens:   how many different tokens each channel has; a position shows one of each
    answers:  how many different answers there are
    causal:   positions see only what came before
    draw:     (rng, how many sequences) → a batch; no two are alike
    """

    kind: str
    tokens: tuple[int, ...]
    length: int
    answers: int
    causal: bool
    draw: Callable[[Rng, int], Batch]


def _recall(rng: Rng, n: int, pairs: int = 16, asked: int = 8, values: int = 8) -> Batch:
    """Pairs of a key and a value, then keys whose values are asked for."""
    keys = rng.permuted(np.tile(np.arange(pairs), (n, 1)), axis=1)
    held = rng.integers(values, size=(n, pairs))
    which = rng.integers(pairs, size=(n, asked))
    tokens = np.stack(
        [
            np.concatenate([keys, np.take_along_axis(keys, which, 1)], 1),
            np.concatenate([held, np.full((n, asked), values)], 1),
        ],
        -1,
    )
    answers = np.concatenate([np.full((n, pairs), -1), np.take_along_axis(held, which, 1)], 1)
    return Batch(tokens, answers)


def _again(rng: Rng, n: int, backwards: bool = False, words: int = 12, many: int = 14) -> Batch:
    """Words, a separator, and the same words again, each to be foretold."""
    said = rng.integers(words, size=(n, many))
    again = said[:, ::-1] if backwards else said
    tokens = np.concatenate([said, np.full((n, 1), words), again[:, :-1]], 1)
    return Batch(tokens[..., None], np.concatenate([np.full((n, many), -1), again], 1))


def _language(rng: Rng, n: int) -> Batch:
    """The stories of the lab, word by word."""
    words, _ = stories(n, int(rng.integers(2**31)))
    return Batch(words[:, :-1, None], words[:, 1:])


def _match(rng: Rng, n: int, words: int = 20, many: int = 16) -> Batch:
    """Whether the word of a position is anywhere else."""
    said = rng.integers(words, size=(n, many))
    counts = (said[..., None] == said[:, None, :]).sum(-1)
    return Batch(said[..., None], (counts > 1).astype(np.int64))


def _majority(rng: Rng, n: int, words: int = 4, many: int = 24) -> Batch:
    """The word that is there most often: no position matters more than another."""
    odds = rng.dirichlet(np.full(words, 2.0), size=n)
    tokens = (rng.random((n, many, 1)) > odds.cumsum(1)[:, None, :-1]).sum(-1)
    counts = (tokens[..., None] == np.arange(words)).sum(1)
    answers = np.full((n, many), -1)
    answers[:, 0] = counts.argmax(1)
    return Batch(tokens[..., None], answers)


def _noise(rng: Rng, n: int, words: int = 16, many: int = 24) -> Batch:
    """Nothing can be known."""
    return Batch(rng.integers(words, size=(n, many, 1)), rng.integers(words, size=(n, many)))


def _spoken(rng: Rng, first: Ints, many: int, odds: Callable[[Ints], Floats]) -> Ints:
    """The first words, (n, some), and those that follow, many + 1 in all.

    odds: those of the next word, summed up, (n, words), of all that is said so far
    """
    said = first
    while said.shape[1] <= many:
        follows = (rng.random((len(said), 1)) > odds(said)[:, :-1]).sum(-1, keepdims=True)
        said = np.concatenate([said, follows], 1)
    return said


def _markov(rng: Rng, n: int, words: int = 6, many: int = 32) -> Batch:
    """Each sequence has likely transitions of its own, to be learned while it is read."""
    odds = rng.dirichlet(np.full(words, 0.25), size=(n, words)).cumsum(-1)
    first = rng.integers(words, size=(n, 1))
    said = _spoken(rng, first, many, lambda said: odds[np.arange(n), said[:, -1]])
    return Batch(said[:, :-1, None], said[:, 1:])


def _sort(rng: Rng, n: int, words: int = 16, many: int = 12) -> Batch:
    """Position i asks for the i-th smallest word."""
    said = rng.integers(words, size=(n, many))
    return Batch(said[..., None], np.sort(said, axis=1))


def _pointer(rng: Rng, n: int, words: int = 12, many: int = 24) -> Batch:
    """Each position says how far back to look, and asks what is there."""
    said = rng.integers(words, size=(n, many))
    back = np.minimum(rng.integers(1, 6, size=(n, many)), np.arange(many))
    found = np.take_along_axis(said, np.arange(many) - back, 1)
    return Batch(np.stack([said, back], -1), found)


def _needle(rng: Rng, n: int, words: int = 10, many: int = 24) -> Batch:
    """One word is marked, anywhere; the last positions ask for it."""
    said = rng.integers(words, size=(n, many))
    marked = np.zeros((n, many), np.int64)
    place = rng.integers(many - 4, size=n)
    marked[np.arange(n), place] = 1
    answers = np.full((n, many), -1)
    answers[:, -4:] = said[np.arange(n), place][:, None]
    return Batch(np.stack([said, marked], -1), answers)


def _brackets(rng: Rng, n: int, kinds: int = 3, many: int = 24) -> Batch:
    """Nested brackets; which kind closes is certain, if a position finds its partner."""
    said = np.zeros((n, many + 1), np.int64)
    answers = np.full((n, many), -1)
    for row in range(n):
        open_ones: list[int] = []
        for at in range(many + 1):
            if open_ones and (rng.random() < 0.5 or len(open_ones) > 5):
                said[row, at] = kinds + open_ones.pop()
                if at:
                    answers[row, at - 1] = said[row, at] - kinds
            else:
                open_ones.append(int(rng.integers(kinds)))
                said[row, at] = open_ones[-1]
    closes = np.zeros_like(answers)
    closes[answers >= 0] = 1  # a position is told that the next bracket closes
    return Batch(np.stack([said[:, :-1], closes], -1), answers)


def _masked(rng: Rng, n: int, words: int = 8, period: int = 6, many: int = 24) -> Batch:
    """A motif is repeated; some words are masked, to be filled in from the other copies."""
    motif = rng.integers(words, size=(n, period))
    said = np.tile(motif, many // period)
    hidden = rng.random(said.shape) < 0.25
    hidden[:, 0] = True
    return Batch(np.where(hidden, words, said)[..., None], np.where(hidden, said, -1))


def _induction(rng: Rng, n: int, words: int = 10, many: int = 28) -> Batch:
    """What came after the same word the last time; each position also knows the word before."""
    said = rng.integers(words, size=(n, many))
    before = np.concatenate([np.full((n, 1), words), said[:, :-1]], 1)
    same = np.tril(said[:, :, None] == before[:, None, :])  # [..., here, after the earlier one]
    last = many - 1 - same[..., ::-1].argmax(-1)
    found = np.take_along_axis(said, last, 1)
    return Batch(np.stack([said, before], -1), np.where(same.any(-1), found, -1))


def _count(rng: Rng, n: int, words: int = 5, many: int = 20, most: int = 7) -> Batch:
    """How often the first word comes again."""
    said = rng.integers(words, size=(n, many))
    answers = np.full((n, many), -1)
    answers[:, 0] = np.minimum((said[:, 1:] == said[:, :1]).sum(1), most)
    return Batch(said[..., None], answers)


def _picture(rng: Rng, n: int, side: int = 5, spots: float = 0.1) -> Batch:
    """Whether a line of a spotted picture is a row, a column or one of the two diagonals."""
    lines = np.zeros((4, side, side, side), np.bool_)
    for at in range(side):
        lines[0, at, at, :] = lines[1, at, :, at] = True
        lines[2, at] = np.eye(side, k=at // 2 * (-1) ** at)
        lines[3, at] = lines[2, at, :, ::-1]
    kind = rng.integers(4, size=n)
    shown = lines[kind, rng.integers(side, size=n)].reshape(n, -1)
    shown = shown ^ (rng.random(shown.shape) < spots)
    answers = np.full(shown.shape, -1)
    answers[:, 0] = kind
    return Batch(shown[..., None].astype(np.int64), answers)


def _agreement(rng: Rng, n: int, nouns: int = 8, fillers: int = 6, many: int = 26) -> Batch:
    """Clauses of a noun, some other words and a verb, whose form the noun decides."""
    said = np.zeros((n, many + 1), np.int64)
    answers = np.full((n, many), -1)
    for row in range(n):
        at = 0
        while at <= many:
            noun, between = int(rng.integers(nouns)), int(rng.integers(1, 6))
            clause = [noun, *(nouns + rng.integers(fillers, size=between)), nouns + fillers]
            said[row, at : at + len(clause)] = clause[: many + 1 - at]
            if (asked := at + len(clause) - 1) < many:  # at the word that asks for the verb
                answers[row, asked] = noun
            at += len(clause)
    return Batch(said[:, :many, None], answers)


def _latest(rng: Rng, n: int, words: int = 10, many: int = 24) -> Batch:
    """Some words are marked; each position asks for the last marked one."""
    said = rng.integers(words, size=(n, many))
    marked = rng.random((n, many)) < 0.2
    last = np.maximum.accumulate(np.where(marked, np.arange(many), -1), axis=1)
    found = np.take_along_axis(said, np.maximum(last, 0), 1)
    return Batch(np.stack([said, marked.astype(np.int64)], -1), np.where(last < 0, -1, found))


def _cipher(rng: Rng, n: int, words: int = 12, many: int = 14) -> Batch:
    """Words, a separator, and a translation of them word by word, to be foretold."""
    said = rng.integers(words, size=(n, many))
    translated = (5 * said + 3) % words
    tokens = np.concatenate([said, np.full((n, 1), words), words + 1 + translated[:, :-1]], 1)
    return Batch(tokens[..., None], np.concatenate([np.full((n, many), -1), translated], 1))


def _largest(rng: Rng, n: int, words: int = 16, many: int = 14) -> Batch:
    """The first position asks for the largest word."""
    said = rng.integers(words, size=(n, many))
    answers = np.full((n, many), -1)
    answers[:, 0] = said.max(1)
    return Batch(said[..., None], answers)


def _sum(rng: Rng, n: int, base: int = 6, many: int = 16) -> Batch:
    """Two numbers, lowest digit first; each position asks for a digit of their sum."""
    digits = rng.integers(base, size=(n, many, 2))
    answers, carry = np.empty((n, many), np.int64), np.zeros(n, np.int64)
    for at in range(many):
        carry, answers[:, at] = np.divmod(digits[:, at].sum(1) + carry, base)
    return Batch(digits, answers)


def _chain(rng: Rng, n: int, words: int = 20, many: int = 24) -> Batch:
    """The next word depends on the last one alone: attention is not needed."""
    odds = np.random.default_rng(0).dirichlet(np.full(words, 0.3), size=words).cumsum(-1)
    first = rng.integers(words, size=(n, 1))
    said = _spoken(rng, first, many, lambda said: odds[said[:, -1]])
    return Batch(said[:, :-1, None], said[:, 1:])


def _lottery(rng: Rng, n: int, words: int = 12, classes: int = 6, many: int = 20) -> Batch:
    """Every sequence has a class, which is drawn from a lot: its odds are all that can be known."""
    answers = np.full((n, many), -1)
    answers[:, 0] = rng.choice(
        classes, size=n, p=np.arange(1, classes + 1) * 2 / (classes**2 + classes)
    )
    return Batch(rng.integers(words, size=(n, many, 1)), answers)


def _echo(rng: Rng, n: int, words: int = 12, many: int = 24, late: int = 5) -> Batch:
    """Each position says what was said some positions before."""
    said = rng.integers(words, size=(n, many))
    answers = np.full((n, many), -1)
    answers[:, late:] = said[:, :-late]
    return Batch(said[..., None], answers)


def _colour(rng: Rng, n: int, words: int = 10, colours: int = 4, many: int = 24) -> Batch:
    """Coloured words; each position asks for the last one of its colour."""
    said, shown = rng.integers(words, size=(n, many)), rng.integers(colours, size=(n, many))
    same = np.tril(shown[:, :, None] == shown[:, None, :], -1)
    last = many - 1 - same[..., ::-1].argmax(-1)
    found = np.take_along_axis(said, last, 1)
    return Batch(np.stack([said, shown], -1), np.where(same.any(-1), found, -1))


def _trigram(rng: Rng, n: int, words: int = 8, many: int = 28) -> Batch:
    """The next word depends on the last two; half of what there is to know, the last one tells."""
    fixed = np.random.default_rng(1)
    pairs = fixed.dirichlet(np.full(words, 0.15), size=(words, words))
    odds = (pairs + fixed.dirichlet(np.full(words, 0.15), size=words)).cumsum(-1) / 2
    first = rng.integers(words, size=(n, 2))
    said = _spoken(rng, first, many, lambda said: odds[said[:, -2], said[:, -1]])
    return Batch(said[:, :-1, None], said[:, 1:])


def _topic(rng: Rng, n: int, words: int = 16, topics: int = 5, many: int = 20) -> Batch:
    """Every topic has words that it likes; the first position asks for the topic."""
    odds = np.random.default_rng(2).dirichlet(np.full(words, 0.7), size=topics).cumsum(-1)
    topic = rng.integers(topics, size=n)
    said = (rng.random((n, many, 1)) > odds[topic, None, :-1]).sum(-1)
    answers = np.full((n, many), -1)
    answers[:, 0] = topic
    return Batch(said[..., None], answers)


def _mislabelled(rng: Rng, n: int, words: int = 16, classes: int = 8, many: int = 20) -> Batch:
    """Each word has a class, but half of the labels are drawn from a lot."""
    said = rng.integers(words, size=(n, many))
    drawn = rng.integers(classes, size=(n, many))
    return Batch(said[..., None], np.where(rng.random((n, many)) < 0.5, said % classes, drawn))


def _since(rng: Rng, n: int, words: int = 10, many: int = 24, most: int = 7) -> Batch:
    """Some words are marked; each position asks how long ago the last one was."""
    said = rng.integers(words, size=(n, many))
    marked = rng.random((n, many)) < 0.2
    marked[:, 0] = True
    last = np.maximum.accumulate(np.where(marked, np.arange(many), -1), axis=1)
    answers = np.minimum(np.arange(many) - last, most)
    return Batch(np.stack([said, marked.astype(np.int64)], -1), answers)


def _address(rng: Rng, n: int, words: int = 12, many: int = 20) -> Batch:
    """Each position names another one, and asks what is there."""
    said, named = rng.integers(words, size=(n, many)), rng.integers(many, size=(n, many))
    return Batch(np.stack([said, named], -1), np.take_along_axis(said, named, 1))


def _interleave(rng: Rng, n: int, words: int = 10, many: int = 9) -> Batch:
    """Two lists of words, then a word of the first, one of the second, and so on."""
    lists = rng.integers(words, size=(n, 2, many))
    mixed = lists.transpose(0, 2, 1).reshape(n, -1)
    start = np.full((n, 1), words)
    tokens = np.concatenate([lists.reshape(n, -1), start, mixed[:, :-1]], 1)
    return Batch(tokens[..., None], np.concatenate([np.full((n, 2 * many), -1), mixed], 1))


def _prose(rng: Rng, n: int, many: int = 32) -> Batch:
    """English, letter by letter: what NumPy's documentation says of its functions."""
    text = _letters()
    first = rng.integers(len(text) - many - 1, size=(n, 1))
    said = text[first + np.arange(many + 1)]
    return Batch(said[:, :-1, None], said[:, 1:])


@cache
def _letters() -> Ints:
    """The text, as letters from 0 to 25; 26 is anything else, once however often it comes."""
    functions = sorted(np.__all__)
    text = " ".join((getattr(np, name).__doc__ or "").lower() for name in functions)
    text = re.sub("[^a-z]+", "{", text)  # which comes after z
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64) - ord("a")


def _order(rng: Rng, n: int, words: int = 12, many: int = 20) -> Batch:
    """Two words come once, among others; the first position asks which of them comes first."""
    said = rng.integers(2, words, size=(n, many))
    places = 1 + rng.permuted(np.tile(np.arange(many - 1), (n, 1)), axis=1)[:, :2]
    np.put_along_axis(said, places, np.array([[0, 1]]), 1)
    answers = np.full((n, many), -1)
    answers[:, 0] = places[:, 0] < places[:, 1]
    return Batch(said[..., None], answers)


def _habit(rng: Rng, n: int, words: int = 8, many: int = 24) -> Batch:
    """A word is said again, or else any word follows: most of it cannot be foretold."""
    said = rng.integers(words, size=(n, many + 1))
    for at in range(many):
        said[:, at + 1] = np.where(rng.random(n) < 0.3, said[:, at], said[:, at + 1])
    return Batch(said[:, :-1, None], said[:, 1:])


def _depth(rng: Rng, n: int, many: int = 24, most: int = 7) -> Batch:
    """Steps up and down, none below the ground; each position asks how high it is."""
    up, height = rng.integers(2, size=(n, many)), np.zeros(n, np.int64)
    answers = np.empty((n, many), np.int64)
    for at in range(many):
        up[:, at] |= height == 0
        height = height + 2 * up[:, at] - 1
        answers[:, at] = np.minimum(height, most)
    return Batch(up[..., None], answers)


def _twin(rng: Rng, n: int, words: int = 10, labels: int = 8) -> Batch:
    """Every word comes twice, each time with a label; a position asks for that of its twin."""
    order = rng.permuted(np.tile(np.arange(2 * words), (n, 1)), axis=1)
    label = rng.integers(labels, size=(n, 2 * words))
    there = np.argsort(order, axis=1)  # where each of the two copies of each word is
    twin = np.take_along_axis(there, (order + words) % (2 * words), 1)
    return Batch(np.stack([order % words, label], -1), np.take_along_axis(label, twin, 1))


def _rotate(rng: Rng, n: int, words: int = 12, many: int = 18, most: int = 6) -> Batch:
    """The whole sequence, turned by as many places as every position is told."""
    said, by = rng.integers(words, size=(n, many)), rng.integers(most, size=(n, 1))
    turned = np.take_along_axis(said, (np.arange(many) + by) % many, 1)
    return Batch(np.stack([said, np.broadcast_to(by, said.shape)], -1), turned)


def _skip(rng: Rng, n: int, words: int = 10, many: int = 28) -> Batch:
    """The next word depends on the one before the last."""
    odds = np.random.default_rng(3).dirichlet(np.full(words, 0.15), size=words).cumsum(-1)
    first = rng.integers(words, size=(n, 2))
    said = _spoken(rng, first, many, lambda said: odds[said[:, -2]])
    return Batch(said[:, :-1, None], said[:, 1:])


def _mirror(rng: Rng, n: int, words: int = 6, many: int = 16) -> Batch:
    """Whether the second half is the first one, backwards."""
    said, is_so = rng.integers(words, size=(n, many)), rng.random(n) < 0.5
    said[is_so, many // 2 :] = said[is_so, : many // 2][:, ::-1]
    answers = np.full((n, many), -1)
    answers[:, 0] = is_so
    return Batch(said[..., None], answers)


def _dice(rng: Rng, n: int, words: int = 14, sides: int = 8, many: int = 22) -> Batch:
    """Small numbers are more likely than large ones, whatever the words say."""
    answers = np.minimum(rng.geometric(0.3, size=(n, many)) - 1, sides - 1)
    return Batch(rng.integers(words, size=(n, many, 1)), answers)


def _variety(rng: Rng, n: int, words: int = 8, many: int = 22) -> Batch:
    """How many different words there were so far, less one."""
    said = rng.integers(words, size=(n, many))
    is_new = ~np.tril(said[:, :, None] == said[:, None, :], -1).any(-1)
    return Batch(said[..., None], is_new.cumsum(1) - 1)


def _dictionary(rng: Rng, n: int, keys: int = 14, values: int = 8) -> Batch:
    """Every position defines a key and asks for what another one means."""
    key = rng.permuted(np.tile(np.arange(keys), (n, 1)), axis=1)
    value, asked = rng.integers(values, size=(n, keys)), rng.integers(keys, size=(n, keys))
    defined = np.take_along_axis(np.argsort(key, axis=1), asked, 1)
    return Batch(np.stack([key, value, asked], -1), np.take_along_axis(value, defined, 1))


def _stutter(rng: Rng, n: int, words: int = 10, many: int = 9) -> Batch:
    """Words, a separator, and each of them twice, to be foretold."""
    said = rng.integers(words, size=(n, many))
    twice = said.repeat(2, axis=1)
    tokens = np.concatenate([said, np.full((n, 1), words), twice[:, :-1]], 1)
    return Batch(tokens[..., None], np.concatenate([np.full((n, many), -1), twice], 1))


def _sentences(rng: Rng, n: int, nouns: int = 6, verbs: int = 5, many: int = 10) -> Batch:
    """Subject, verb, object, again and again; the first two decide the third."""
    meant = np.random.default_rng(4).integers(nouns, size=(nouns, verbs))
    subject, verb = rng.integers(nouns, size=(n, many)), rng.integers(verbs, size=(n, many))
    said = np.stack([subject, nouns + verb, nouns + verbs + meant[subject, verb]], -1)
    said = said.reshape(n, -1)
    return Batch(said[:, :-1, None], said[:, 1:])


def _winner(rng: Rng, n: int, words: int = 12, many: int = 20) -> Batch:
    """Two words are marked; the first position asks for the larger one."""
    said, marked = rng.integers(words, size=(n, many)), np.zeros((n, many), np.int64)
    places = rng.permuted(np.tile(np.arange(many), (n, 1)), axis=1)[:, :2]
    np.put_along_axis(marked, places, 1, 1)
    answers = np.full((n, many), -1)
    answers[:, 0] = np.take_along_axis(said, places, 1).max(1)
    return Batch(np.stack([said, marked], -1), answers)


def _clock(rng: Rng, n: int, words: int = 12, hours: int = 8, many: int = 24) -> Batch:
    """What is asked for depends a little on the position, and on no word."""
    early = rng.random((n, many)) < 0.35
    answers = np.where(early, np.arange(many) % hours, rng.integers(hours, size=(n, many)))
    return Batch(rng.integers(words, size=(n, many, 1)), answers)


def _nth(rng: Rng, n: int, words: int = 6, many: int = 22, most: int = 5) -> Batch:
    """How often the word of a position was said before it."""
    said = rng.integers(words, size=(n, many))
    before = np.tril(said[:, :, None] == said[:, None, :], -1).sum(-1)
    return Batch(said[..., None], np.minimum(before, most))


def _pairs(rng: Rng, n: int, words: int = 11, tags: int = 8) -> Batch:
    """Every word comes twice, with a tag; each position asks for the tag of the other one."""
    said = rng.permuted(np.tile(np.arange(words).repeat(2), (n, 1)), axis=1)
    tag, order = rng.integers(tags, size=said.shape), np.argsort(said, axis=1, kind="stable")
    other = np.empty_like(order)
    np.put_along_axis(other, order, order.reshape(n, words, 2)[..., ::-1].reshape(n, -1), 1)
    return Batch(np.stack([said, tag], -1), np.take_along_axis(tag, other, 1))


def _chorus(rng: Rng, n: int, words: int = 10, many: int = 30) -> Batch:
    """A few words, again and again; how many they are, the sequence itself must tell."""
    period, motif = rng.integers(5, 10, size=(n, 1)), rng.integers(words, size=(n, 9))
    said = np.take_along_axis(motif, np.arange(many + 1) % period, 1)
    return Batch(said[:, :-1, None], said[:, 1:])


def _progression(rng: Rng, n: int, base: int = 11, many: int = 16) -> Batch:
    """A number, and always the same added to it; the first two say how much."""
    start, more = rng.integers(base, size=(2, n, 1))
    said = (start + more * np.arange(many + 1)) % base
    answers = said[:, 1:].copy()
    answers[:, 0] = -1
    return Batch(said[:, :-1, None], answers)


def _heaviest(rng: Rng, n: int, words: int = 10, many: int = 16) -> Batch:
    """Every word has a weight; the first position asks for the heaviest."""
    said = rng.integers(words, size=(n, many))
    weight = rng.permuted(np.tile(np.arange(many), (n, 1)), axis=1)
    answers = np.full((n, many), -1)
    answers[:, 0] = said[weight == many - 1]
    return Batch(np.stack([said, weight], -1), answers)


def _walk(rng: Rng, n: int, words: int = 12, many: int = 24) -> Batch:
    """The next word is one up or one down, at random."""
    said = (rng.integers(words, size=(n, 1)) + rng.choice((-1, 1), (n, many + 1)).cumsum(1)) % words
    return Batch(said[:, :-1, None], said[:, 1:])


def _overlap(rng: Rng, n: int, words: int = 14, many: int = 8, most: int = 6) -> Batch:
    """How many words of the second half are in the first."""
    said = rng.integers(words, size=(n, 2 * many))
    found = (said[:, :many, None] == said[:, None, many:]).any(1).sum(1)
    answers = np.full(said.shape, -1)
    answers[:, 0] = np.minimum(found, most)
    return Batch(said[..., None], answers)


def _table(rng: Rng, n: int, side: int = 4, values: int = 9) -> Batch:
    """The fields of a table in any order; each position names a row and a column, and asks."""
    fields = side * side
    field = rng.permuted(np.tile(np.arange(fields), (n, 1)), axis=1)
    value, asked = rng.integers(values, size=(n, fields)), rng.integers(fields, size=(n, fields))
    found = np.take_along_axis(value, np.take_along_axis(np.argsort(field, axis=1), asked, 1), 1)
    channels = [field // side, field % side, value, asked // side, asked % side]
    return Batch(np.stack(channels, -1), found)


def _arrange(rng: Rng, n: int, words: int = 12, many: int = 16) -> Batch:
    """Every word says which place it should have; each position asks for the word of its own."""
    said = rng.integers(words, size=(n, many))
    place = rng.permuted(np.tile(np.arange(many), (n, 1)), axis=1)
    return Batch(
        np.stack([said, place], -1), np.take_along_axis(said, np.argsort(place, axis=1), 1)
    )


def _dialects(rng: Rng, n: int, words: int = 9, dialects: int = 4, many: int = 28) -> Batch:
    """The next word depends on the last one, in each of some dialects in another way."""
    odds = np.random.default_rng(5).dirichlet(np.full(words, 0.2), size=(dialects, words))
    odds = odds.cumsum(-1)
    dialect, first = rng.integers(dialects, size=n), rng.integers(words, size=(n, 1))
    said = _spoken(rng, first, many, lambda said: odds[dialect, said[:, -1]])
    return Batch(said[:, :-1, None], said[:, 1:])


def _neighbours(rng: Rng, n: int, words: int = 4, many: int = 20) -> Batch:
    """Whether the word of a position is said right before or right after it."""
    said = rng.integers(words, size=(n, many))
    same = said[:, 1:] == said[:, :-1]
    answers = np.zeros((n, many), np.int64)
    answers[:, 1:] |= same
    answers[:, :-1] |= same
    return Batch(said[..., None], answers)


def _hints(rng: Rng, n: int, words: int = 12, many: int = 22) -> Batch:
    """What is asked for is drawn from a lot; now and then a position shows it."""
    answers, said = rng.integers(words, size=(2, n, many))
    return Batch(np.where(rng.random((n, many)) < 0.2, answers, said)[..., None], answers)


def _record(rng: Rng, n: int, words: int = 18, many: int = 20) -> Batch:
    """Each position asks for the largest word so far."""
    said = np.minimum(rng.integers(words, size=(n, many)), rng.integers(words, size=(n, many)))
    return Batch(said[..., None], np.maximum.accumulate(said, axis=1))


def _succession(rng: Rng, n: int, names: int = 14, values: int = 9) -> Batch:
    """Names in any order, each with a value; a position asks for that of the name after its own."""
    name = rng.permuted(np.tile(np.arange(names), (n, 1)), axis=1)
    value = rng.integers(values, size=(n, names))
    of_name = np.take_along_axis(value, np.argsort(name, axis=1), 1)
    found = np.take_along_axis(of_name, (name + 1) % names, 1)
    return Batch(np.stack([name, value], -1), found)


def _weave(rng: Rng, n: int, words: int = 12, many: int = 20) -> Batch:
    """Each position asks for the word of another, always the same one."""
    said = rng.integers(words, size=(n, many))
    return Batch(said[..., None], said[:, np.random.default_rng(6).permutation(many)])


def _moods(rng: Rng, n: int, words: int = 10, moods: int = 4, many: int = 26) -> Batch:
    """The first word sets the mood, and with it the words that follow each word."""
    odds = np.random.default_rng(7).dirichlet(np.full(words, 0.15), size=(moods, words))
    odds = odds.cumsum(-1)
    first = np.stack([rng.integers(moods, size=n), rng.integers(words, size=n)], 1)
    said = _spoken(rng, first, many, lambda said: odds[said[:, 0], said[:, -1]])
    answers = said[:, 1:].copy()
    answers[:, 0] = -1
    return Batch(said[:, :-1, None], answers)


def _member(rng: Rng, n: int, words: int = 24, many: int = 18) -> Batch:
    """Each position asks whether a word is said anywhere."""
    said, asked = rng.integers(words, size=(2, n, many))
    found = (asked[:, :, None] == said[:, None]).any(-1)
    return Batch(np.stack([said, asked], -1), found.astype(np.int64))


def _loaded(rng: Rng, n: int, words: int = 10, many: int = 24) -> Batch:
    """Words at random, some of them far more often than others."""
    odds = 0.6 ** np.arange(words)
    said = rng.choice(words, size=(n, many + 1), p=odds / odds.sum())
    return Batch(said[:, :-1, None], said[:, 1:])


def _rank(rng: Rng, n: int, words: int = 30, many: int = 18) -> Batch:
    """Each position asks how many words are smaller than its own."""
    said = rng.integers(words, size=(n, many))
    return Batch(said[..., None], (said[:, :, None] > said[:, None]).sum(-1))


TASKS: dict[str, Task] = {
    "recall": Task("looking up", (16, 9), 24, 8, True, _recall),
    "copy": Task("copying", (13,), 28, 12, True, _again),
    "stories": Task("language", (len(WORDS),), LENGTH - 1, len(WORDS), True, _language),
    "match": Task("classification", (20,), 16, 2, False, _match),
    "noise": Task("noise", (16,), 24, 16, True, _noise),
    "reverse": Task("copying", (13,), 28, 12, True, lambda rng, n: _again(rng, n, backwards=True)),
    "majority": Task("classification", (4,), 24, 4, False, _majority),
    "markov": Task("language", (6,), 32, 6, True, _markov),
    "sort": Task("sorting", (16,), 12, 16, False, _sort),
    "pointer": Task("looking up", (12, 6), 24, 12, True, _pointer),
    "needle": Task("looking up", (10, 2), 24, 10, False, _needle),
    "brackets": Task("language", (6, 2), 24, 3, True, _brackets),
    "masked": Task("filling in", (9,), 24, 8, False, _masked),
    "induction": Task("looking up", (10, 11), 28, 10, True, _induction),
    "count": Task("counting", (5,), 20, 8, False, _count),
    "picture": Task("classification", (2,), 25, 4, False, _picture),
    "agreement": Task("language", (15,), 26, 8, True, _agreement),
    "latest": Task("looking up", (10, 2), 24, 10, True, _latest),
    "cipher": Task("translation", (25,), 28, 12, True, _cipher),
    "largest": Task("classification", (16,), 14, 16, False, _largest),
    "sum": Task("arithmetic", (6, 6), 16, 6, True, _sum),
    "chain": Task("language", (20,), 24, 20, True, _chain),
    "lottery": Task("noise", (12,), 20, 6, False, _lottery),
    "echo": Task("copying", (12,), 24, 12, True, _echo),
    "colour": Task("looking up", (10, 4), 24, 10, True, _colour),
    "trigram": Task("language", (8,), 28, 8, True, _trigram),
    "topic": Task("classification", (16,), 20, 5, False, _topic),
    "mislabelled": Task("noise", (16,), 20, 8, False, _mislabelled),
    "since": Task("counting", (10, 2), 24, 8, True, _since),
    "address": Task("looking up", (12, 20), 20, 12, False, _address),
    "interleave": Task("copying", (11,), 36, 10, True, _interleave),
    "prose": Task("language", (27,), 32, 27, True, _prose),
    "order": Task("classification", (12,), 20, 2, False, _order),
    "habit": Task("noise", (8,), 24, 8, True, _habit),
    "depth": Task("counting", (2,), 24, 8, True, _depth),
    "twin": Task("looking up", (10, 8), 20, 8, False, _twin),
    "rotate": Task("copying", (12, 6), 18, 12, False, _rotate),
    "skip": Task("language", (10,), 28, 10, True, _skip),
    "mirror": Task("classification", (6,), 16, 2, False, _mirror),
    "dice": Task("noise", (14,), 22, 8, False, _dice),
    "variety": Task("counting", (8,), 22, 8, True, _variety),
    "dictionary": Task("looking up", (14, 8, 14), 14, 8, False, _dictionary),
    "stutter": Task("copying", (11,), 27, 10, True, _stutter),
    "sentences": Task("language", (17,), 29, 17, True, _sentences),
    "winner": Task("classification", (12, 2), 20, 12, False, _winner),
    "clock": Task("noise", (12,), 24, 8, False, _clock),
    "nth": Task("counting", (6,), 22, 6, True, _nth),
    "pairs": Task("looking up", (11, 8), 22, 8, False, _pairs),
    "chorus": Task("copying", (10,), 30, 10, True, _chorus),
    "progression": Task("arithmetic", (11,), 16, 11, True, _progression),
    "heaviest": Task("classification", (10, 16), 16, 10, False, _heaviest),
    "walk": Task("noise", (12,), 24, 12, True, _walk),
    "overlap": Task("counting", (14,), 16, 7, False, _overlap),
    "table": Task("looking up", (4, 4, 9, 4, 4), 16, 9, False, _table),
    "arrange": Task("copying", (12, 16), 16, 12, False, _arrange),
    "dialects": Task("language", (9,), 28, 9, True, _dialects),
    "neighbours": Task("classification", (4,), 20, 2, False, _neighbours),
    "hints": Task("noise", (12,), 22, 12, True, _hints),
    "record": Task("counting", (18,), 20, 18, True, _record),
    "succession": Task("looking up", (14, 9), 14, 9, False, _succession),
    "weave": Task("copying", (12,), 20, 12, False, _weave),
    "moods": Task("language", (10,), 26, 10, True, _moods),
    "member": Task("classification", (24, 24), 18, 2, False, _member),
    "loaded": Task("noise", (10,), 24, 10, True, _loaded),
    "rank": Task("counting", (30,), 18, 18, False, _rank),
}

# The verdicts were tuned on the others.
HELD_OUT = (
    *("table", "arrange", "dialects", "neighbours", "hints", "record"),
    *("succession", "weave", "moods", "member", "loaded", "rank"),
)
