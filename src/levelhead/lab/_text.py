"""Text to train on: short stories, and questions that only their words can answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Leo".split()
THINGS = "apple boat coin drum feather glove hat key lamp map pen rope".split()
PLACES = "attic barn cave forest garden harbour kitchen library mill orchard tower well".split()
VERBS = ("finds", "hides")
WHERE = ("in", "near")
QUESTIONS = ("who", "what", "where")
WORDS = ("<story>", "the", ".", "?", *QUESTIONS, *VERBS, *WHERE, *NAMES, *THINGS, *PLACES)
GUESSING = float(np.log(len(NAMES)))  # the loss of an answer by one who knows only its kind

_NUMBER = {word: number for number, word in enumerate(WORDS)}


def stories(
    count: int, length: int, seed: int | list[int]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers of words, (count, length), and which of them are answers.

    >>> words, answers = stories(1, 16, seed=0)
    >>> " ".join(WORDS[number] for number in words[0])
    '<story> Leo hides the coin near the forest . who ? Leo . where ? forest'
    >>> answers[0].nonzero()[0]
    array([11, 15])

    A sentence has a grammar, and its content is drawn: nobody can foresee it. Two questions follow
    about the latest sentence. Their answers are certain, for whoever looks at the right word.
    """
    rng = np.random.default_rng(seed)
    told = [_story(rng, length) for _ in range(count)]
    words = np.array([[_NUMBER[word] for word, _ in story] for story in told])
    return words, np.array([[answer for _, answer in story] for story in told])


def _story(rng: np.random.Generator, length: int) -> list[tuple[str, bool]]:
    story = [("<story>", False)]
    while len(story) < length:
        name, verb, thing, near, place = (
            str(rng.choice(words)) for words in (NAMES, VERBS, THINGS, WHERE, PLACES)
        )
        sentence = (name, verb, "the", thing, near, "the", place, ".")
        story += [(word, False) for word in sentence]
        for kind in rng.permutation(3)[:2]:
            answer = (name, thing, place)[kind]
            story += [(QUESTIONS[kind], False), ("?", False), (answer, True), (".", False)]
    return story[:length]
