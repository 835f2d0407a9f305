"""Text to train on: short stories, with questions that only the story can answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
THINGS = ("boat", "coin", "drum", "key", "lamp", "map")
PLACES = ("attic", "barn", "cave", "forest", "garden", "tower")
VERBS = ("finds", "hides")
WHERE = ("in", "near")
QUESTIONS = ("who", "what", "where")
WORDS = ("<story>", "the", ".", "?", *QUESTIONS, *VERBS, *WHERE, *NAMES, *THINGS, *PLACES)
LENGTH = 21  # words of a story
GUESSING = float(np.log(len(NAMES)))  # the loss on an answer if only its kind is known

_NUMBER = {word: number for number, word in enumerate(WORDS)}


def stories(count: int, seed: int | list[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Word numbers, (count, LENGTH), and which of them are answers.

    >>> words, answers = stories(1, seed=0)
    >>> " ".join(WORDS[number] for number in words[0])
    '<story> Finn hides the key in the barn . who ? Finn . where ? barn . what ? key .'
    >>> answers[0].nonzero()[0]
    array([11, 15, 19])

    A sentence has a grammar, but its content is random, so it cannot be predicted. Three
    questions follow. Their answers are certain for a model that attends to the right word.
    """
    rng = np.random.default_rng(seed)
    told = [_story(rng) for _ in range(count)]
    words = np.array([[_NUMBER[word] for word, _ in story] for story in told])
    return words, np.array([[answer for _, answer in story] for story in told])


def _story(rng: np.random.Generator) -> list[tuple[str, bool]]:
    """Words, and whether each is an answer."""
    name, verb, thing, near, place = (
        str(rng.choice(words)) for words in (NAMES, VERBS, THINGS, WHERE, PLACES)
    )
    deed, scene = (name, verb, "the", thing), (near, "the", place)
    # Which comes first is random, so that no word can be found by its position alone.
    first, then = (deed, scene) if rng.random() < 0.5 else (scene, deed)
    story = [(word, False) for word in ("<story>", *first, *then, ".")]
    for kind in rng.permutation(3):
        answer = (name, thing, place)[kind]
        story += [(QUESTIONS[kind], False), ("?", False), (answer, True), (".", False)]
    return story
