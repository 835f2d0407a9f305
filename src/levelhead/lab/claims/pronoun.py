"""Claim 13: attention resolves "it"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...scaling import SCALE_RULES
from .._demo import demo_reads
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._plot import (
    COLOURS,
    GREEN,
    GREY,
    NAMES,
    ORANGE,
    PURPLE,
    Spec,
    axis,
    faded,
    guide,
    line,
    picture,
)
from .._threads import one_thread

CLAIM = 13
VERSION = 1
TITLE = "Attention resolves “it”: dog against ball"
SAID = """
In "The dog chased the ball because it was fast", attention lets "it" attend to both "dog" and
"ball" and weighs them against each other; that is how the model knows what "it" is. The scale
keeps these weights soft.
"""
DONE = """
The demo model (all-MiniLM-L6-v2, {heads} heads) read the sentence; every head's weights from "it"
to "dog" and to "ball" were recorded, as trained and with other scales. Then only the last word was
changed, so that "it" must be the dog ("tired") or must be the ball ("round"), in {seeds} such
pairs: a head that resolves the word has to follow. Finally, {texts} sentences were embedded with
each scale, and each was compared with its own paraphrase and with those of the others.
"""
FOUND = """
As trained, {looking} of {heads} heads give dog and ball together more than an even share of the
row ({even:.0%}); the most is {most:.0%} (layer {most_layer:.0f}, head {most_head:.0f}). Does a
head pick the right noun outright: more weight on the dog where it must be the dog, and more on the
ball where it must be the ball? In a single pair {outright_each:.1f±} heads do, where tossed coins
would give {once:.0f}: {steady:.0f} of {heads} heads have a favourite and keep it whatever the last
word says. In all {seeds} pairs {outright} do (coins: {outright_chance:.2g}). The best is layer
{best_layer:.0f}, head {best_head:.0f}: right in {best_pairs} of {seeds} pairs, with
{best_dog_if_dog:.2f} on dog and {best_ball_if_dog:.2f} on ball where the dog is meant, and
{best_dog_if_ball:.2f} and {best_ball_if_ball:.2f} where the ball is. Leaning the right way is
less: in every pair, {always} heads shift the dog's share by more than {step:g} towards the meaning
and {never} away from it (coins: at most {always_chance:.2g} each); the typical head moves by
{moved:.3f±}. Without the scale "it" attends to {keys_none:.1f} tokens, with it to
{keys_sqrt_dk:.1f}. Embeddings made without the scale have a cosine of {cosine_none:.2f±} with the
trained ones. A sentence is closer to its own paraphrase than to the closest other one by
{margin_none:.2f} without the scale, by {margin_sqrt_dk:.2f} with it.
"""
LIMITS = """
A weight is what a head reads, not what the model concludes: the answer may lie in the values or in
later layers. This is one sentence and one small model, which was trained to compare sentences and
not to resolve pronouns; and what a last word says about "it" is our reading. A head may follow the
last word for other reasons. Changing the scale of a trained model shows how much it has come to
rely on it, not that it needed that one: the cosine is {cosine_dk:.2f±} with 1/d_k and
{cosine_sqrt_dmodel:.2f±} with 1/√d_model.
"""
KEY = {
    "heads that pick the right noun in every pair": "{outright} of {heads}",
    "heads that lean towards it in every pair": "{always}",
    "heads that lean away from it in every pair": "{never}",
    "tokens attended to with 1/√d_k": "{keys_sqrt_dk:.1f±}",
    "tokens attended to without a scale": "{keys_none:.1f±}",
}
NEEDS = ("demo",)
SHOW = ("scales", "most")
SEEDS = {"tiny": 2, "quick": 5, "full": 8}
SECONDS = {"tiny": 1.0, "quick": 1.5, "full": 1.5}

SENTENCE = "The dog chased the ball because it was {}."
ENDINGS = (
    ("tired", "round"),
    ("hungry", "red"),
    ("bored", "rolling"),
    ("young", "bouncing"),
    ("angry", "rubber"),
    ("excited", "new"),
    ("trained", "blue"),
    ("happy", "inflated"),
)
PARAPHRASES = (
    ("The dog chased the ball because it was fast.", "A quick ball was hunted by the dog."),
    ("I love Apple phones.", "The iPhone is my favourite handset."),
    ("The bank raised its interest rates.", "Borrowing money now costs more."),
    ("She plays the violin every evening.", "Each night she makes music on her fiddle."),
    ("The train to Paris was late again.", "Once more the rail service to France ran behind."),
    ("He cooked soup for his sick mother.", "The son made his ill mum a broth."),
    ("The storm destroyed many houses.", "Lots of homes were ruined by the hurricane."),
    ("Our cat sleeps all day long.", "The kitten naps from morning to night."),
    ("The company fired half of its staff.", "Every second employee lost their job."),
    ("Children learn languages quickly.", "Kids pick up new tongues with ease."),
    ("The doctor told him to stop smoking.", "He was advised by his physician to quit tobacco."),
    ("The match ended without a goal.", "Neither football team scored."),
)
RULES = ("sqrt_dk", "none", "dk", "sqrt_dmodel")
NOUNS = {"dog": 2, "ball": 5}  # and their places in the sentence, after [CLS]
MEANT = {"dog": 1, "ball": 2}  # which sentence means which
STEP = 0.05  # a change of the dog's share that counts


def measure(size: str, seed: int) -> Figures:
    """Weights from "it" by head and scale; their change with the meaning; the embeddings."""
    dog, ball = ENDINGS[seed % len(ENDINGS)]
    sentences = [SENTENCE.format(word) for word in ("fast", dog, ball)]
    pairs = [text for pair in PARAPHRASES for text in pair]
    subject = demo_reads((*sentences, *pairs))
    with one_thread():
        rows = {rule: _from_it(subject, 0, rule) for rule in RULES}
        meant = {noun: _from_it(subject, place, "sqrt_dk") for noun, place in MEANT.items()}
        vectors = {rule: _embed(subject, rule, range(3, len(subject.inputs))) for rule in RULES}
    trained = rows["sqrt_dk"]
    layer, head = np.indices(trained.shape[:2])
    kept = np.arange(len(PARAPHRASES)) != seed % len(PARAPHRASES)  # each seed leaves one pair out
    twice = np.repeat(kept, 2)
    return {
        "it": {
            "layer": layer.ravel(),
            "head": head.ravel(),
            **{f"{noun}_{rule}": _to(rows[rule], noun).ravel() for noun in NOUNS for rule in RULES},
            **{
                f"{noun}_if_{other}": _to(meant[other], noun).ravel()
                for other in NOUNS
                for noun in NOUNS
            },
        },
        "scales": table(
            {
                "rule": rule,
                "keys": float((1 / (rows[rule] ** 2).sum(-1)).mean()),
                "cosine": _cosine(vectors[rule][twice], vectors["sqrt_dk"][twice]),
                "margin": _margin(vectors[rule][0::2][kept], vectors[rule][1::2][kept]),
            }
            for rule in RULES
        ),
        "most": table(_most(trained)),
        "tokens": int(trained.shape[-1]),
        "texts": int(kept.sum()),
    }


def _from_it(subject: Any, place: int, rule: str) -> Array:
    """The row of "it" in every head: (layers, heads, tokens)."""
    from ...torch import Call, listen  # noqa: PLC0415 - an extra

    given = subject.inputs[place]
    row = list(given.tokens[0]).index("it")
    found: list[Array] = []

    def keep(call: Call) -> None:
        found.append(np.stack([call.weights(0, head)[row] for head in range(call.shape[1])]))

    with _scaled(subject.model, rule), listen(keep, subject.model):
        subject.model(**given.kwargs)
    return np.stack(found)


def _embed(subject: Any, rule: str, places: Sequence[int]) -> Array:
    """Mean-pooled embeddings, as the model is meant to be used: (texts, width)."""
    with _scaled(subject.model, rule):
        states = [subject.model(**subject.inputs[i].kwargs).last_hidden_state for i in places]
    vectors = np.stack([state[0].mean(0).numpy() for state in states])
    normed: Array = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return normed


@contextmanager
def _scaled(model: Any, rule: str) -> Iterator[None]:
    """The model with another scale in every layer."""
    import torch  # noqa: PLC0415 - an extra

    layers = [layer.attention.self for layer in model.encoder.layer]
    before = [layer.scaling for layer in layers]
    for layer in layers:
        layer.scaling = SCALE_RULES[rule](layer.attention_head_size, model.config.hidden_size)
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling = scaling


def _to(row: Array, noun: str) -> Array:
    """The weight on a noun, by head."""
    weights: Array = row[..., NOUNS[noun]]
    return weights


def _cosine(a: Array, b: Array) -> float:
    return float((a * b).sum(-1).mean())


def _margin(texts: Array, others: Array) -> float:
    """How much nearer a text is to its own paraphrase than to the nearest other one."""
    near = texts @ others.T
    own = near.diagonal().copy()
    np.fill_diagonal(near, -1)
    return float((own - near.max(-1)).mean())


def _most(row: Array, count: int = 5) -> Iterator[dict[str, float]]:
    """The heads that attend most to the two."""
    dog, ball = (_to(row, noun) for noun in NOUNS)
    both = dog + ball
    for place in np.argsort(both, axis=None)[::-1][:count]:
        layer, head = np.unravel_index(place, both.shape)
        yield {
            **{"layer": int(layer), "head": int(head)},
            **{"dog": float(dog[layer, head]), "ball": float(ball[layer, head])},
        }


def _share(it: dict[str, Array], meant: str) -> Array:
    """The dog's share of what both nouns get where one of them is meant, by pair and head."""
    dog, ball = (it[f"{noun}_if_{meant}"] for noun in NOUNS)
    share: Array = dog / (dog + ball)
    return share


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    it, scales = figures["it"], figures["scales"]
    both = (it["dog_sqrt_dk"] + it["ball_sqrt_dk"])[0]
    top, heads, pairs = int(both.argmax()), both.size, len(runs)
    if_dog, if_ball = (_share(it, noun) for noun in NOUNS)
    shift, right = if_dog - if_ball, (if_dog > 0.5) & (if_ball < 0.5)
    # Of heads that are right equally often, the one that leans the most.
    best = int(np.lexsort((shift.mean(axis=0), right.sum(axis=0)))[-1])
    found: dict[str, Any] = {
        **{"heads": heads, "seeds": pairs, "texts": int(figures["texts"][0]), "step": STEP},
        **{"even": 2 / figures["tokens"][0], "most": both[top]},
        **{"most_layer": it["layer"][0][top], "most_head": it["head"][0][top]},
        "looking": int((both > 2 / figures["tokens"][0]).sum()),
        **{"outright": int(right.all(axis=0).sum()), "outright_each": Spread(right.sum(axis=1))},
        # A coin must come up right in both sentences of a pair; to lean, once per pair is enough.
        **{"once": heads / 4, "steady": ((if_dog > 0.5) == (if_ball > 0.5)).sum(axis=1).mean()},
        **{"outright_chance": heads / 4**pairs, "always_chance": heads / 2**pairs},
        **{"best_layer": it["layer"][0][best], "best_head": it["head"][0][best]},
        "best_pairs": int(right[:, best].sum()),
        **{
            f"best_{noun}_if_{other}": it[f"{noun}_if_{other}"][:, best].mean()
            for noun in NOUNS
            for other in NOUNS
        },
        "moved": Spread(np.median(np.abs(shift), axis=1)),
        "always": int((shift > STEP).all(axis=0).sum()),
        "never": int((shift < -STEP).all(axis=0).sum()),
    }
    for rule in RULES:
        found |= {
            f"{column}_{rule}": at(scales, column, rule=rule)
            for column in ("keys", "cosine", "margin")
        }
    return found


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if heads pick the right noun outright in every pair.

    Partly true if they only lean towards it. More must do so than by chance, and more must lean
    towards the meaning than away from it.
    """
    found = numbers(runs)
    why = (
        f"{found['outright']} of {found['heads']} heads pick the right noun in all "
        f"{found['seeds']} pairs of sentences; {found['always']} lean towards it and "
        f"{found['never']} away from it. The last word of a sentence decides what “it” is. By "
        f"chance {found['outright_chance']:.2g} heads would pick it in every pair, and at most "
        f"{found['always_chance']:.2g} would lean towards it in every pair, or away from it."
    )
    if found["outright"] > found["outright_chance"]:
        return "holds", why
    leans = found["always"] > max(found["never"], found["always_chance"])
    return ("holds partly" if leans else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """Dog against ball, one dot per head and one colour per scale; the change with the meaning."""
    it = stack(runs)["it"]
    label = [
        f"layer {layer:.0f}, head {head:.0f}"
        for layer, head in zip(it["layer"][0], it["head"][0], strict=True)
    ]
    dots = [
        line(
            NAMES[rule], it[f"ball_{rule}"][0], it[f"dog_{rule}"][0], COLOURS[rule],
            mode="markers", text=label, marker={"color": COLOURS[rule], "size": 7, "opacity": 0.75},
            hovertemplate="%{text}: dog %{y:.3f}, ball %{x:.3f}",
        )
        for rule in RULES
    ]  # fmt: skip
    if_dog, if_ball = (_share(it, noun) for noun in NOUNS)
    shift = if_dog - if_ball
    kinds = {
        "leans to the meaning in every pair": ((shift > STEP).all(axis=0), ORANGE),
        "leans away in every pair": ((shift < -STEP).all(axis=0), PURPLE),
    }
    other = ~np.logical_or.reduce([chosen for chosen, _ in kinds.values()])
    sides = [
        line(
            name, if_ball.mean(axis=0)[chosen], if_dog.mean(axis=0)[chosen], colour,
            mode="markers", text=[label[i] for i in np.flatnonzero(chosen)],
            marker={"color": colour, "size": 8, "opacity": 0.8},
            hovertemplate="%{text}: %{y:.2f} if the dog, %{x:.2f} if the ball<extra></extra>",
        )
        for name, (chosen, colour) in {"other heads": (other, GREY), **kinds}.items()
    ]  # fmt: skip
    sides.append(guide("no difference", (0, 1), (0, 1)))
    # A head that picks the right noun outright is in this corner.
    corner: Spec = {"type": "rect", "x0": 0, "x1": 0.5, "y0": 0.5, "y1": 1, "line": {"width": 0}}
    corner |= {"fillcolor": faded(GREEN), "layer": "below"}
    order = np.argsort(shift.mean(axis=0))
    place = np.arange(order.size)
    moves = [
        line(
            "one pair of endings", np.tile(place, len(shift)), shift[:, order].ravel(), ORANGE,
            mode="markers", text=[label[i] for i in order] * len(shift),
            marker={"color": ORANGE, "size": 4, "opacity": 0.5},
            hovertemplate="%{text}: %{y:.3f}<extra></extra>",
        ),
        line("mean", place, shift.mean(axis=0)[order], PURPLE, mode="lines"),
    ]  # fmt: skip
    return [
        picture(
            "What “it” looks at, by head",
            dots,
            axis("weight on “ball”"),
            axis("weight on “dog”"),
        ),
        picture(
            "The dog's share, by head (green: right on average)",
            sides,
            axis("where the ball is meant", range=[0, 1]),
            axis("where the dog is meant", range=[0, 1]),
            shapes=[corner],
        ),
        picture(
            "Towards the dog when the last word means the dog",
            moves,
            axis("head, sorted"),
            axis("change of the dog's share"),
        ),
    ]
