"""Claim 11: the scaled dot product is a relative of cosine similarity."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import attention, cosine_attention
from ...scaling import SCALE_RULES
from .._experiment import Runs
from .._figures import Array, Figures, at, stack, table
from .._inputs import normal, queries_and_keys
from .._plot import BLUE, ORANGE, Spec, axis, band, picture

CLAIM = 11
VERSION = 1
TITLE = "Scaling relates to cosine similarity"
SAID = """
Dividing by √d_k relates the dot product to cosine similarity: both take the size out of the
comparison and leave the direction.
"""
DONE = """
Scaled dot products were compared with cosine attention at a temperature of 1/√d_k, on the same
{keys} queries and keys, for d_k from {smallest} to {largest}. Then all vectors were made up to
{growth} times as long, and then each key was made longer or shorter at random.
"""
FOUND = """
At initialisation the two place {agree_64:.1%±} of the weight on the same keys at d_k = 64 and
agree on the top key in {same_64:.0%±} of the rows; at {largest} it is {agree_big:.1%±} and
{same_big:.0%±}, at {smallest} it is {agree_4:.0%±} and {same_4:.0%±}. The reason is that q·k/√d_k
= cos·|q||k|/√d_k, and the larger d_k is, the closer the length of a random vector is to √d_k. With
vectors {growth} times as long, the top weight of the dot product is {dot_grown:.2f±} (it was
{dot_start:.3f}); that of the cosine is {cosine_grown:.3f±}.
"""
LIMITS = """
The similarity ends where the lengths differ. √d_k is one number for all vectors: it takes out the
expected length at initialisation and no other. With keys of random length (a factor of e^±0.5) the
agreement is {agree_uneven:.0%}, and the top key is the same in {same_uneven:.0%} of the rows. The
cosine also gives something up: no key can be loud for every query, and no row can be sharper than
the temperature allows, so models that use it learn the temperature (claim 15 trains QK-norm).
"""
KEY = {
    "weight on the same keys at initialisation, d_k = 64": "{agree_64:.1%±}",
    "at initialisation, d_k = {largest}": "{agree_big:.1%±}",
    "with vectors {growth} times as long": "{agree_grown:.0%}",
    "with keys of random length": "{agree_uneven:.0%}",
}
SHOW = ("at_start", "grown")
SECONDS = {"tiny": 0.05, "quick": 0.15, "full": 0.8}

D_K = (4, 16, 64, 256, 1024)
GROWTH = (1, 2, 4, 8)
SIZES = {"tiny": (1, 128), "quick": (4, 256), "full": (8, 512)}  # heads, length
NEAR, FAR = 0.9, 0.5


def measure(size: str, seed: int) -> Figures:
    """How much weight the two place alike: at the start, with longer vectors, with uneven keys."""
    heads, length = SIZES[size]
    start, grown = [], []
    for d_k in D_K:
        query, key = queries_and_keys(seed, heads, length, d_k)
        start.append({"d_k": d_k} | _compare(query, key))
    query, key = queries_and_keys(seed, heads, length, 64)
    for growth in GROWTH:
        grown.append({"growth": growth} | _compare(growth * query, growth * key))
    uneven = np.exp(0.5 * normal(seed + 1000, heads, length, 1))
    return {
        "at_start": table(start),
        "grown": table(grown),
        "uneven": table([_compare(query, key * uneven)]),
        "keys": length,
    }


def _compare(query: Array, key: Array) -> dict[str, float]:
    """The weights of both on the same queries and keys."""
    root = SCALE_RULES["sqrt_dk"](query.shape[-1], None)
    options: dict[str, Any] = {"return_weights": True, "return_health": True}
    dot = attention(query, key, key, scale=root, **options)
    cosine = cosine_attention(query, key, key, temperature=root, **options)
    same = dot.weights.argmax(axis=-1) == cosine.weights.argmax(axis=-1)
    return {
        "agreement": float(np.minimum(dot.weights, cosine.weights).sum(axis=-1).mean()),
        "same_first": float(same.mean()),
        "top_weight_dot": float(dot.health.top_weight.mean()),
        "top_weight_cosine": float(cosine.health.top_weight.mean()),
    }


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    start, grown, uneven = figures["at_start"], figures["grown"], figures["uneven"]
    last = GROWTH[-1]
    return {
        "keys": int(figures["keys"][0]),
        **{"smallest": D_K[0], "largest": D_K[-1], "growth": last},
        **{f"agree_{d}": at(start, "agreement", d_k=d) for d in D_K},
        **{f"same_{d}": at(start, "same_first", d_k=d) for d in D_K},
        "agree_big": at(start, "agreement", d_k=D_K[-1]),
        "same_big": at(start, "same_first", d_k=D_K[-1]),
        "dot_start": at(grown, "top_weight_dot", growth=1),
        "dot_grown": at(grown, "top_weight_dot", growth=last),
        "cosine_grown": at(grown, "top_weight_cosine", growth=last),
        "agree_grown": at(grown, "agreement", growth=last),
        "agree_uneven": uneven["agreement"].mean(),
        "same_uneven": uneven["same_first"].mean(),
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if both agree whatever the lengths; partly true if only at initialisation."""
    found = numbers(runs)
    near, grown = found["agree_64"], found["agree_grown"]
    why = (
        f"they place {near:.0%} of the weight on the same keys at initialisation, and {grown:.0%} "
        f"with vectors {found['growth']} times as long. That is at d_k = 64; at "
        f"{found['largest']} it is {found['agree_big']:.0%} at initialisation. With keys of random "
        f"length it is {found['agree_uneven']:.0%}."
    )
    if near < NEAR:
        return "does not hold", why
    if grown < FAR:
        return "holds partly", f"{why} √d_k stands only for the length at initialisation."
    return "holds", why


def plot(runs: Runs) -> list[Spec]:
    """Agreement by d_k; sharpness as vectors grow."""
    figures = stack(runs)
    start, grown = figures["at_start"], figures["grown"]
    return [
        picture(
            "Agreement at initialisation",
            [
                *band("weight placed alike", D_K, start["agreement"], BLUE),
                *band("rows with the same first key", D_K, start["same_first"], ORANGE),
            ],
            axis("d_k", log=True, ticks=D_K),
            axis("share", tickformat=".0%"),
        ),
        picture(
            "Largest weight as queries and keys grow (d_k = 64)",
            [
                *band("scaled dot product", GROWTH, grown["top_weight_dot"], BLUE),
                *band("cosine", GROWTH, grown["top_weight_cosine"], ORANGE),
            ],
            axis("times as long", ticks=GROWTH),
            axis("top weight"),
        ),
    ]
