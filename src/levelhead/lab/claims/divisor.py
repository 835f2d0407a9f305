"""Claim 3: √d_k is the right divisor; d_k is too large."""

from __future__ import annotations

import numpy as np

from ...scaling import SCALE_RULES
from .._experiment import Runs
from .._figures import Figures, Spread, at, stack, table
from .._inputs import health, queries_and_keys
from .._plot import COLOURS, NAMES, Spec, axis, band, guide, picture

CLAIM = 3
VERSION = 1
TITLE = "Dividing by √d_k gives variance 1; dividing by d_k crushes it"
SAID = """
Dividing the scores by √d_k brings their variance to 1 at every d_k. Dividing by d_k would go too
far: the variance would be 1/d_k, and the softmax nearly flat.
"""
DONE = """
The engine measured the same independent queries and keys with three scales: none, 1/√d_k and
1/d_k. Each row had {keys} keys. Then each key was given a correlation of 0.5 with its query, as
training does.
"""
FOUND = """
With 1/√d_k the variance stays between {root_low:.3f} and {root_high:.3f} for all d_k. With 1/d_k
it is {dk_64:.4f} at d_k = 64 (1/64 is 0.0156) and {dk_512:.5f} at 512, where the softmax spreads
its weight over {dk_keys:.1%} of the keys: it hardly selects anything. With 1/√d_k it spreads its
weight over {root_keys:.0%} of them, unscaled over {none_keys:.1%}.
"""
LIMITS = """
All this is about queries and keys that are unrelated. The score of a key that matches its query
grows like d_k, not like √d_k: with a correlation of 0.5 and 1/√d_k it is {aligned_root_64:.1f} at
d_k = 64 and {aligned_root_512:.1f} at 512; with 1/d_k it is {aligned_dk_64:.2f} and
{aligned_dk_512:.2f}. So there is a reason to use 1/d_k, with larger initial weights, if trained
models of different widths are to behave alike.
"""
KEY = {
    "variance with 1/√d_k": "{root_low:.3f} to {root_high:.3f}",
    "variance with 1/d_k at d_k = 64": "{dk_64:.4f±}",
    "variance with 1/d_k at d_k = 512": "{dk_512:.5f±}",
    "share of the keys attended to with 1/√d_k, d_k = 512": "{root_keys:.0%}",
    "share of the keys with 1/d_k": "{dk_keys:.0%}",
    "share of the keys without a scale": "{none_keys:.1%}",
}
SHOW = ("scales", "aligned")
SECONDS = {"tiny": 0.1, "quick": 0.3, "full": 1.5}

D_K = (1, 2, 8, 64, 512)
SIZES = {"tiny": (4, 256), "quick": (8, 512), "full": (16, 1024)}  # heads, length
RULES = ("none", "sqrt_dk", "dk")
TOLERANCE = 0.05


def measure(size: str, seed: int) -> Figures:
    """Variance and sharpness of the scores under each rule, by d_k."""
    heads, length = SIZES[size]
    rows, aligned = [], []
    for d_k in D_K:
        query, key = queries_and_keys(seed, heads * (8 if d_k < 8 else 1), length, d_k)
        towards = 0.5 * query + np.float32(0.75**0.5) * key
        own = np.einsum("hld,hld->hl", query, towards, dtype=np.float64).mean()
        for rule in RULES:
            scale = SCALE_RULES[rule](d_k, None)
            found = health(query, key, scale)
            rows.append(
                {
                    "d_k": d_k,
                    "scale": rule,
                    "variance": float(found.score_var[0]),
                    "share_of_keys": float(found.effective_keys[0]) / length,
                    "top_weight": float(found.top_weight[0]),
                }
            )
            aligned.append({"d_k": d_k, "scale": rule, "score": float(own * scale)})
    return {"scales": table(rows), "aligned": table(aligned), "keys": length}


def numbers(runs: Runs) -> dict[str, Spread | float]:
    """What the text quotes."""
    figures = stack(runs)
    scales, aligned = figures["scales"], figures["aligned"]
    root = scales["variance"][:, scales["scale"][0] == "sqrt_dk"].mean(axis=0)
    return {
        "keys": int(figures["keys"][0]),
        "root_low": root.min(),
        "root_high": root.max(),
        **{f"dk_{d}": at(scales, "variance", scale="dk", d_k=d) for d in D_K},
        "dk_keys": at(scales, "share_of_keys", scale="dk", d_k=512),
        "root_keys": at(scales, "share_of_keys", scale="sqrt_dk", d_k=512),
        "none_keys": at(scales, "share_of_keys", scale="none", d_k=512),
        **{
            f"aligned_{short}_{d}": at(aligned, "score", scale=rule, d_k=d)
            for short, rule in (("root", "sqrt_dk"), ("dk", "dk"))
            for d in (64, 512)
        },
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if √d_k gives 1 and d_k gives 1/d_k, within 5 %, at every d_k."""
    scales = stack(runs)["scales"]
    rule, d_k = scales["scale"][0], scales["d_k"][0]
    variance = scales["variance"].mean(axis=0)
    root, whole = variance[rule == "sqrt_dk"], (variance * d_k)[rule == "dk"]
    ones = np.abs(root - 1) <= TOLERANCE
    crushed = np.abs(whole - 1) <= TOLERANCE
    why = (
        f"with 1/√d_k the variance is {root.min():.3f} to {root.max():.3f}; with 1/d_k it is 1/d_k "
        f"times {whole.min():.3f} to {whole.max():.3f}. That is for d_k from 1 to 512."
    )
    if ones.all() and crushed.all():
        return "holds", f"{why} Keys that are aligned with their query are another matter."
    return ("holds partly" if ones.all() or crushed.all() else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """Variance by d_k with each rule, and how many keys the softmax still uses."""
    scales = stack(runs)["scales"]
    rules = scales["scale"][0]
    variance = [guide("1, as claimed", D_K, 1.0)]
    keys = []
    for rule in RULES:
        style = NAMES[rule], D_K
        variance += band(*style, scales["variance"][:, rules == rule], COLOURS[rule])
        keys += band(*style, scales["share_of_keys"][:, rules == rule], COLOURS[rule])
    return [
        picture(
            "Variance of the scores",
            variance,
            axis("d_k", log=True, ticks=D_K),
            axis("variance", log=True),
        ),
        picture(
            "Share of the keys that a row looks at",
            keys,
            axis("d_k", log=True, ticks=D_K),
            axis("effective keys / keys", tickformat=".0%"),
        ),
    ]
