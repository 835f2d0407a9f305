"""Claim 2: the variance of q·k is d_k."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._inputs import health
from .._plot import BLUE, GREY, ORANGE, PURPLE, RED, Spec, axis, band, guide, picture

CLAIM = 2
VERSION = 1
TITLE = "q·k has variance d_k"
SAID = """
If the entries of q and k have mean 0 and variance 1, the variance of q·k is d_k (1, 2, 8, 64, 512
for d_k = 1, 2, 8, 64, 512), so its standard deviation is √d_k.
"""
DONE = """
Queries and keys were drawn with independent entries of mean 0 and variance 1, and the engine
reported the variance of all their unscaled scores. The entries were normal, uniform, or just ±1.
Then the assumptions were broken, one at a time.
"""
FOUND = """
The variance divided by d_k, for normal entries, is {at_1:.3f±} at d_k = 1, {at_64:.3f±} at 64 and
{at_512:.3f±} at 512. Over all distributions and all d_k, the largest deviation from 1 is
{worst:.1%}.
"""
LIMITS = """
Independence does the work here, and most explanations leave it out. If the entries of a vector
correlate with each other by 0.3, each of them still has mean 0 and variance 1, yet the variance at
d_k = 512 is {correlated:.0f} times d_k. If a query correlates with its key by 0.5, the variance
for that pair is {aligned:.2f} times d_k, and the mean is {aligned_mean:.0f}, which no variance
shows. Entries of mean 1 give {shifted:.2f} times d_k, entries of variance 4 give {wide:.1f} times.
Trained queries and keys meet few of these assumptions: claim 14 measures them.
"""
KEY = {
    "variance / d_k at d_k = 1": "{at_1:.3f±}",
    "variance / d_k at d_k = 512": "{at_512:.3f±}",
    "at 512, entries correlated by 0.3": "{correlated:.1f±}",
    "at 512, entries of mean 1": "{shifted:.2f±}",
    "at 512, entries of variance 4": "{wide:.1f±}",
}
SHOW = ("independent", "premises")
SECONDS = {"tiny": 0.1, "quick": 0.4, "full": 1.5}

D_K = (1, 2, 8, 64, 512)
LENGTH = {"tiny": 128, "quick": 512, "full": 1024}
TOLERANCE = 0.05

Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape, np.float32),
    "uniform": lambda rng, shape: rng.uniform(-(3**0.5), 3**0.5, shape).astype(np.float32),
    "plus or minus 1": lambda rng, shape: rng.choice(np.array([-1, 1], np.float32), shape),
}


def measure(size: str, seed: int) -> Figures:
    """The variance of q·k, and of q·k with one assumption broken."""
    rng, length = np.random.default_rng(seed), LENGTH[size]
    rows, broken = [], []
    for d_k in D_K:
        # Few entries say little about a variance, so a small d_k gets more heads.
        heads = min(64, max(2, 512 // d_k))
        for entries, draw in DRAWS.items():
            query, key = draw(rng, (2, heads, length, d_k))
            variance = float(health(query, key, 1.0).score_var[0])
            rows.append(
                {"d_k": d_k, "entries": entries, "variance": variance, "over_d_k": variance / d_k}
            )
        query, key = rng.standard_normal((2, heads, length, d_k + 1), np.float32)
        for premise, (first, second) in _broken(query, key).items():
            if premise == "q and k correlate":  # each query with its own key, not with all
                scores = np.einsum("hld,hld->hl", first, second, dtype=np.float64)
                variance, mean = float(scores.var()), float(scores.mean())
            else:
                found = health(first, second, 1.0)
                variance, mean = float(found.score_var[0]), float(found.score_mean[0])
            broken.append(
                {"d_k": d_k, "premise": premise, "over_d_k": variance / d_k, "mean": mean}
            )
    return {"independent": table(rows), "premises": table(broken)}


def _broken(query: Array, key: Array) -> dict[str, tuple[Array, Array]]:
    """Queries and keys that break one assumption each; the last column is a spare one."""

    def correlated(x: Array) -> Array:
        """Any two entries of a vector correlate by 0.3: they share the spare one."""
        mixed: Array = 0.3**0.5 * x[..., -1:] + 0.7**0.5 * x[..., :-1]
        return mixed

    q, k = query[..., :-1], key[..., :-1]
    return {
        "entries correlate by 0.3": (correlated(query), correlated(key)),
        "q and k correlate": (q, 0.5 * q + 0.75**0.5 * k),
        "mean 1": (q + 1, k + 1),
        "variance 4": (2 * q, 2 * k),
    }


def numbers(runs: Runs) -> dict[str, Spread | float]:
    """What the text quotes."""
    figures = stack(runs)
    drawn, broken = figures["independent"], figures["premises"]

    def premise(name: str, column: str = "over_d_k") -> Spread:
        return at(broken, column, premise=name, d_k=512)

    return {
        **{f"at_{d_k}": at(drawn, "over_d_k", entries="normal", d_k=d_k) for d_k in D_K},
        "worst": float(np.abs(drawn["over_d_k"].mean(axis=0) - 1).max()),
        "correlated": premise("entries correlate by 0.3"),
        "aligned": premise("q and k correlate"),
        "aligned_mean": premise("q and k correlate", "mean"),
        "shifted": premise("mean 1"),
        "wide": premise("variance 4"),
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if the variance is d_k within 5 % at every d_k, whatever the distribution."""
    found, ratios = numbers(runs), stack(runs)["independent"]["over_d_k"].mean(axis=0)
    near = np.abs(ratios - 1) <= TOLERANCE
    why = (
        f"variance / d_k is {ratios.min():.3f} to {ratios.max():.3f} for d_k from 1 to 512 and "
        "three distributions"
    )
    if near.all():
        return "holds", f"{why}. It needs independent entries: correlated ones break it."
    if near.any():
        return "holds partly", f"{why}; only {near.mean():.0%} are within {TOLERANCE:.0%} of 1."
    return "does not hold", f"{why}; it is off by up to {found['worst']:.0%}."


def plot(runs: Runs) -> list[Spec]:
    """The variance against d_k, as drawn and with broken assumptions."""
    figures = stack(runs)
    drawn, broken = figures["independent"], figures["premises"]
    normal = drawn["entries"][0] == "normal"
    lines = [guide("d_k, as claimed", D_K, D_K)]
    lines += band("independent", D_K, drawn["variance"][:, normal], BLUE)
    colours = (RED, ORANGE, PURPLE, GREY)
    for premise, colour in zip(dict.fromkeys(broken["premise"][0]), colours, strict=True):
        chosen = broken["premise"][0] == premise
        variance = broken["over_d_k"][:, chosen] * np.array(D_K)
        lines += band(str(premise), D_K, variance, colour)
    return [
        picture(
            "Variance of q·k",
            lines,
            axis("d_k", log=True, ticks=D_K),
            axis("variance", log=True),
        )
    ]
