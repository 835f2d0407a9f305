"""Claim 15: the right scale at initialisation does not last."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .._corpus import GUESSING
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._plot import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    RED,
    Spec,
    axis,
    band,
    guide,
    picture,
)
from .._train import Budget, Trained, train

CLAIM = 15
VERSION = 1
TITLE = "Scores grow in training, although they are scaled"
SAID = """
1/√d_k sets the right scale at initialisation only. In training, queries and keys grow, and the
scores with them, more at a higher learning rate; large models clip, cap or normalise them.
"""
DONE = """
The language model of claim 9, scaled by 1/√d_k (d_k = {d_k}), was trained for {steps} steps with
Adam at learning rates from {slowest:g} to {fastest:g}, and levelhead.torch.watch recorded every
head. Then the same at {hot:g} with QK-norm (RMSNorm with a learned weight over queries and over
keys), with a softcap of {limit:g}, and with QK-clip: whenever the watch saw a head exceed
{limit:g}, its queries and keys were scaled back (large models use 100; this one is small).
"""
FOUND = """
The scores start with a standard deviation of {start:.2f±}. At the end it is {stds}; the largest
score is {largest}. At a rate of {rate:g} the standard deviation ends at {by_width}. At {hot:g} the
share of saturated rows is {saturated_start:.0%} at the start and {saturated_end:.0%} at the end,
and the loss on answers ends at {plain:.2f±}, where {best_rate:g} gives {best:.2f±} and guessing
costs {guessing:.2f}. With a remedy, at the same rate: {remedies}.
"""
LIMITS = """
Growth alone is not a problem: attention must sharpen to select, and at {best_rate:g}, where the
plain model learns best, the standard deviation ends at {best_std:.1f} as well. It becomes one
where rows saturate before the model has learned where to look. QK-norm bounds a score by the
weights that it learns, QK-clip after the fact; a softcap bounds what enters the softmax and lets
the scores themselves grow (largest: {capped:.0f}). With the best remedy, {remedy}, the model ends
at {remedied:.2f±} at a rate of {hot:g}; without any, at its best rate, at {best:.2f±}. Which
remedy is best depends on their limits, which were not tuned.
"""
KEY = {
    "standard deviation at the start": "{start:.2f±}",
    "at the end, by rate": "{stds}",
    "largest score, by rate": "{largest}",
    "saturated rows at a rate of {hot}, at the start": "{saturated_start:.0%}",
    "saturated rows at a rate of {hot}, at the end": "{saturated_end:.0%}",
}
NEEDS = ("torch",)
SHOW = ("rates", "remedies", "widths")
SEEDS = {"tiny": 2, "quick": 3, "full": 3}
SECONDS = {"tiny": 0.7, "quick": 6.0, "full": 60.0}
PIECES = {"quick": 7, "full": 13}

D_K, RATE, HOT, LIMIT = 64, 5e-3, 1.5e-2, 20.0
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 6, "every": 3, "rates": (RATE, HOT), "widths": (16, D_K)},
    "quick": {"steps": 100, "every": 10, "rates": (1.5e-3, RATE, HOT), "widths": (16, D_K)},
    "full": {
        **{"steps": 600, "every": 20, "rates": (5e-4, 1.5e-3, RATE, HOT, 5e-2)},
        "widths": (16, 32, D_K, 128, 256),
    },
}
REMEDIES: dict[str, dict[str, Any]] = {
    "none": {},
    "QK-norm": {"qk_norm": True},
    "softcap": {"softcap": LIMIT},
    "QK-clip": {"clip": LIMIT},
    "QK-clip at 100": {"clip": 100.0},  # comes into play only after many steps
}
COLOURS = dict(zip(REMEDIES, (RED, BLUE, PURPLE, GREEN, ORANGE), strict=True))
GROWN = 1.5


def measure(size: str, seed: int) -> Figures:
    """Train at every learning rate, with every remedy, at every d_k."""
    sizes = SIZES[size]
    budget = Budget(sizes["steps"], every=sizes["every"])

    @cache
    def trained(rate: float, d_k: int, remedy: str) -> Trained:
        return train(budget, seed, rate=rate, d_k=d_k, width=64, **REMEDIES[remedy])

    def run(rate: float, d_k: int = D_K, remedy: str = "none") -> Trained:
        return trained(rate, d_k, remedy)

    rates = sizes["rates"]
    remedies = list(REMEDIES)[: 5 if size == "full" else 4]
    return {
        "rates": table({"rate": rate} | _outcome(run(rate)) for rate in rates),
        "widths": table({"d_k": d_k} | _outcome(run(RATE, d_k)) for d_k in sizes["widths"]),
        "remedies": table(
            {"remedy": remedy} | _outcome(run(HOT, remedy=remedy)) for remedy in remedies
        ),
        "growth": table({"rate": rate} | look for rate in rates for look in _looks(run(rate))),
        "remedied": table(
            {"remedy": remedy} | look
            for remedy in remedies
            for look in _looks(run(HOT, remedy=remedy))
        ),
        "heads": table({"rate": HOT} | row for row in run(HOT).heads()),
        "steps": sizes["steps"],
    }


def _looks(run: Trained) -> list[dict[str, float]]:
    """Each watched step: spread and size of the scores over all heads."""
    rows = list(run.heads())
    steps = dict.fromkeys(row["step"] for row in rows)
    looks = []
    for step in steps:
        now = [row for row in rows if row["step"] == step]
        looks.append(
            {
                "step": step,
                "score_std": float(np.mean([row["score_std"] for row in now])),
                "score_max": max(row["score_max"] for row in now),
                "saturated": float(np.mean([row["saturated"] for row in now])),
                "entropy_ratio": float(np.mean([row["entropy_ratio"] for row in now])),
                "survival": float(np.nanmean([row["survival"] for row in now])),
            }
        )
    return looks


def _outcome(run: Trained) -> dict[str, float]:
    first, *_, last = _looks(run)
    names = ("score_std", "score_max", "saturated", "survival")
    return {
        **{f"first_{name}": first[name] for name in names},
        **{f"last_{name}": last[name] for name in names},
        **{"answers": run.unseen, "broke": float(run.broke)},
    }


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    rates, widths, remedies = figures["rates"], figures["widths"], figures["remedies"]
    column = rates["rate"][0]
    best, fastest = float(column[rates["answers"].mean(axis=0).argmin()]), float(column[-1])

    def end(name: str, rate: float) -> Spread:
        return at(rates, name, rate=rate)

    def worth(remedy: str) -> Spread:
        return at(remedies, "answers", remedy=remedy)

    def listed(name: str, digits: int) -> str:
        return ", ".join(f"{end(name, rate):,.{digits}f} at {rate:g}" for rate in column)

    tried = list(remedies["remedy"][0][1:])
    remedy = min(tried, key=worth)
    return {
        **{"remedy": remedy, "remedied": worth(remedy), "rate": RATE},
        **{"d_k": D_K, "limit": LIMIT, "guessing": GUESSING, "steps": int(figures["steps"][0])},
        **{"slowest": column[0], "fastest": fastest, "best_rate": best, "hot": HOT},
        "start": Spread(rates["first_score_std"].mean(axis=1)),
        **{"stds": listed("last_score_std", 1), "largest": listed("last_score_max", 0)},
        "by_width": ", ".join(
            f"{at(widths, 'last_score_std', d_k=d_k):.1f} at d_k = {d_k:.0f}"
            for d_k in widths["d_k"][0]
        ),
        "saturated_start": end("first_saturated", HOT),
        "saturated_end": end("last_saturated", HOT),
        **{"plain": end("answers", HOT), "best": end("answers", best)},
        "best_std": end("last_score_std", best),
        "remedies": "; ".join(
            f"{remedy}: largest score {at(remedies, 'last_score_max', remedy=remedy):.0f}, "
            f"saturated {at(remedies, 'last_saturated', remedy=remedy):.0%}, "
            f"loss {worth(remedy):.2f±}"
            for remedy in tried
        ),
        "capped": at(remedies, "last_score_max", remedy="softcap"),
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if scores grow at every learning rate, and more at a higher one.

    Partly true if they grow at some learning rates.
    """
    rates = stack(runs)["rates"]
    growth = (rates["last_score_std"] / rates["first_score_std"]).mean(axis=0)
    largest = rates["last_score_max"].mean(axis=0)
    grown, rising = growth > GROWN, bool((np.diff(growth) > 0).all())
    low, high = rates["rate"][0][[growth.argmin(), growth.argmax()]]
    why = (
        f"the scores' standard deviation grows {growth.min():,.1f} times (rate {low:g}) to "
        f"{growth.max():,.0f} times (rate {high:g}). By rate: "
    ) + ", ".join(
        f"{times:,.1f} times at {rate:g} (largest score {most:,.0f})"
        for times, rate, most in zip(growth, rates["rate"][0], largest, strict=True)
    )
    why += "." if rising else "; but not always more at a higher rate."
    if grown.all() and rising:
        return "holds", why
    return ("holds partly" if grown.any() else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """Spread and size of the scores over the steps, by rate and by remedy; every head."""
    figures = stack(runs)
    rates, remedies = figures["rates"], figures["remedies"]
    column, tried = rates["rate"][0], list(remedies["remedy"][0])
    # From cold to hot.
    colours = dict(zip(column, (GREY, BLUE, GREEN, ORANGE, RED)[-len(column) :], strict=True))

    def lines(part: dict[str, Array], by: str, name: str, styles: dict[Any, str]) -> list[Spec]:
        steps = np.unique(part["step"][0])
        traces = []
        for value, colour in styles.items():
            label = f"rate {value:g}" if by == "rate" else value
            traces += band(label, steps, part[name][:, part[by][0] == value], colour, mode="lines")
        return traces

    step, score = axis("step"), axis("largest |score|", log=True)
    steps = np.unique(figures["growth"]["step"][0])
    heads = figures["heads"]
    each = [
        trace
        for index, (layer, head) in enumerate(
            dict.fromkeys(zip(heads["layer"][0], heads["head"][0], strict=True))
        )
        for trace in band(
            f"layer {layer:.0f}, head {head:.0f}",
            steps,
            heads["score_std"][:, (heads["layer"][0] == layer) & (heads["head"][0] == head)],
            PALETTE[index % len(PALETTE)],
            mode="lines",
        )
    ]
    losses = {
        **{"type": "bar", "x": [str(one) for one in tried], "showlegend": False},
        **{"y": [float(at(remedies, "answers", remedy=one)) for one in tried]},
        "error_y": {
            "type": "data",
            "array": [at(remedies, "answers", remedy=one).std for one in tried],
        },
        "marker": {"color": [COLOURS[one] for one in tried]},
    }
    return [
        picture(
            f"Spread of the scaled scores (d_k = {D_K})",
            [
                guide("as at initialisation", steps, 1.0),
                *lines(figures["growth"], "rate", "score_std", colours),
            ],
            step,
            axis("standard deviation", log=True),
        ),
        picture(
            "Largest score",
            [
                guide("QK-clip in large models", steps, 100.0),
                *lines(figures["growth"], "rate", "score_max", colours),
            ],
            step,
            score,
        ),
        picture(
            f"Largest score with a remedy (rate {HOT:g})",
            [
                guide(f"softcap, QK-clip: {LIMIT:g}", steps, LIMIT),
                *lines(
                    figures["remedied"], "remedy", "score_max", {one: COLOURS[one] for one in tried}
                ),
            ],
            step,
            score,
        ),
        picture(
            f"What the remedies are worth (rate {HOT:g})",
            [losses],
            axis("remedy"),
            axis("loss of answers"),
        ),
        picture(f"Every head (rate {HOT:g})", each, step, axis("standard deviation", log=True)),
    ]
