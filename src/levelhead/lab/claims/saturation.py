"""Claim 5: without the scale, softmax is nearly one-hot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import attention
from ...scaling import SCALE_RULES
from .._experiment import Runs
from .._figures import Figures, at, stack, table
from .._inputs import health, queries_and_keys
from .._plot import COLOURS, NAMES, PALETTE, Spec, axis, band, line, picture

CLAIM = 5
VERSION = 1
TITLE = "Unscaled scores make softmax nearly one-hot"
SAID = """
At large d_k, unscaled scores make the softmax nearly one-hot, while scaled ones stay spread. The
scores [25, 2, −3] become about [1, 0, 0]; a gap of 4 is already one-sided.
"""
DONE = """
Independent queries and keys of unit variance went through the engine with and without 1/√d_k, for
d_k from 1 to {largest} and {keys} keys, and the engine reported the weights. Then scores were set
by hand: [25, 2, −3], and one score that leads all others by a gap.
"""
FOUND = """
With {most} keys the top weight is {raw_64:.2f±} unscaled and {root_64:.3f±} scaled at d_k = 64,
{raw_big:.2f±} and {root_big:.3f±} at {largest}. Unscaled, a row attends to {keys_64:.1f} keys at
64 and to {keys_big:.1f} at {largest}; scaled, to {share:.0%} of them at both. [25, 2, −3] gives 1
minus {rest:.0e}; the same scores divided by √64 give {tamed:.2f}.
"""
LIMITS = """
Nearly one-hot is a matter of degree: {saturated_64:.0%} of the unscaled rows put more than 0.99 on
one key at d_k = 64, {saturated_big:.0%} at {largest}; the others divide their weight among a few
keys. And a gap says nothing without the number of keys: a lead of 4 gives a weight of {gap_2:.2f}
against one other key, {gap_10:.2f} among 10, {gap_100:.2f} among 100 and {gap_1000:.2f} among
1000. Long rows need a larger lead, by ln n, to attend to anything at all.
"""
KEY = {
    "top weight of {most} keys, unscaled, d_k = 64": "{raw_64:.2f±}",
    "top weight of {most} keys, unscaled, d_k = {largest}": "{raw_big:.2f±}",
    "top weight of {most} keys with 1/√d_k, d_k = {largest}": "{root_big:.3f±}",
    "weight of a lead of 4 over one key": "{gap_2:.2f}",
    "weight of a lead of 4 among 1000 keys": "{gap_1000:.2f}",
}
SHOW = ("softmax", "gaps")
SECONDS = {"tiny": 0.1, "quick": 0.3, "full": 2.0}

D_K = (1, 4, 16, 64, 256, 1024)
SIZES = {"tiny": (2, (16, 256)), "quick": (4, (16, 256, 1024)), "full": (8, (16, 256, 4096))}
ROWS = 256
RULES = ("none", "sqrt_dk")
GAPS = (0, 1, 2, 4, 6, 8, 12, 16)
OTHERS = (2, 10, 100, 1000)
ONE_HOT, SPREAD, ONE_SIDED = 0.9, 0.2, 0.9


def measure(size: str, seed: int) -> Figures:
    """How sharp the softmax is, by d_k, number of keys and scale, and for scores set by hand."""
    heads, counts = SIZES[size]
    rows = []
    for d_k in D_K:
        query, key = queries_and_keys(seed, heads, max(counts), d_k)
        for keys in counts:
            for rule in RULES:
                found = health(query[:, :ROWS], key[:, :keys], SCALE_RULES[rule](d_k, None))
                rows.append(
                    {
                        **{"keys": keys, "scale": rule, "d_k": d_k},
                        "top_weight": float(found.top_weight[0]),
                        "effective_keys": float(found.effective_keys[0]),
                        "entropy_ratio": float(found.entropy_ratio[0]),
                        "saturated": float(found.saturated[0]),
                    }
                )
    gaps = [
        {"keys": keys, "gap": gap, "top_weight": float(_weights([gap] + [0] * (keys - 1))[0])}
        for keys in OTHERS
        for gap in GAPS
    ]
    example = _weights([25, 2, -3])
    return {
        "softmax": table(rows),
        "gaps": table(gaps),
        "example_rest": float(example[1:].sum()),
        "example_scaled": float(_weights([25 / 8, 2 / 8, -3 / 8])[0]),
    }


def _weights(scores: Sequence[float]) -> np.ndarray[Any, Any]:
    """The engine's softmax of these scores: a query of 1, and the scores as keys."""
    key = np.array(scores, np.float64)[:, None]
    result = attention(np.ones((1, 1)), key, key, scale=1.0, return_weights=True)
    weights: np.ndarray[Any, Any] = result.weights[0]
    return weights


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    softmax, gaps = figures["softmax"], figures["gaps"]
    largest, counts = int(softmax["d_k"].max()), sorted(set(softmax["keys"][0].astype(int)))
    most = counts[-1]

    def cell(column: str, rule: str, d_k: int) -> Any:
        return at(softmax, column, scale=rule, d_k=d_k, keys=most)

    return {
        **{"largest": largest, "most": most, "keys": ", ".join(map(str, counts))},
        **{
            "raw_64": cell("top_weight", "none", 64),
            "raw_big": cell("top_weight", "none", largest),
        },
        "root_64": cell("top_weight", "sqrt_dk", 64),
        "root_big": cell("top_weight", "sqrt_dk", largest),
        "keys_64": cell("effective_keys", "none", 64),
        "keys_big": cell("effective_keys", "none", largest),
        "share": cell("effective_keys", "sqrt_dk", 64) / most,
        "saturated_64": cell("saturated", "none", 64),
        "saturated_big": cell("saturated", "none", largest),
        "rest": figures["example_rest"].mean(),
        "tamed": figures["example_scaled"].mean(),
        **{f"gap_{keys}": at(gaps, "top_weight", keys=keys, gap=4) for keys in OTHERS},
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if unscaled rows are one-hot, scaled ones spread, and both examples right.

    That must be so with few keys and with many. Partly true if only some of it is so.
    """
    softmax, found = stack(runs)["softmax"], numbers(runs)
    rule, d_k, keys = softmax["scale"][0], softmax["d_k"][0], softmax["keys"][0]
    large = d_k == d_k.max()
    raw = softmax["top_weight"].mean(axis=0)[(rule == "none") & large].min()
    share = (softmax["effective_keys"].mean(axis=0) / keys)[rule == "sqrt_dk"].min()
    top = f"at d_k = {found['largest']} the top weight is at least {raw:.2f}"
    spread = f"scaled, a row attends to at least {share:.0%} of its keys"
    rest = (
        f"[25, 2, −3] leaves {found['rest']:.0e} for the other two. A gap of 4 gives "
        f"{found['gap_2']:.2f} against one other key and {found['gap_1000']:.2f} among 1000."
    )
    if raw < ONE_HOT or share < SPREAD or found["rest"] > 1e-3:
        sound = raw >= ONE_HOT or share >= SPREAD
        return ("holds partly" if sound else "does not hold"), f"{top}; {spread}. Also, {rest}"
    if found["gap_2"] < ONE_SIDED or found["gap_1000"] < ONE_SIDED:
        limit = f"but a lead of 4 among 1000 keys gets only {found['gap_1000']:.2f}"
        return "holds partly", f"{top}, {limit}. And {spread}; {rest}"
    return "holds", f"{top}; {spread}. Also, {rest}"


def plot(runs: Runs) -> list[Spec]:
    """Top weight by d_k, with and without the scale; top weight by gap."""
    figures = stack(runs)
    softmax, gaps = figures["softmax"], figures["gaps"]
    counts = sorted(set(softmax["keys"][0]))
    lines = []
    for rule in RULES:
        for keys, dash in zip(counts, ("dot", "dash", "solid")[-len(counts) :], strict=True):
            chosen = (softmax["scale"][0] == rule) & (softmax["keys"][0] == keys)
            name = f"{NAMES[rule]}, {keys:g} keys"
            values = softmax["top_weight"][:, chosen]
            lines += band(name, D_K, values, COLOURS[rule], line={"dash": dash})
    leads = [
        line(
            f"{keys} keys",
            GAPS,
            gaps["top_weight"][0][gaps["keys"][0] == keys],
            colour,
        )
        for keys, colour in zip(OTHERS, PALETTE, strict=False)
    ]
    return [
        picture(
            "Largest weight of a row", lines, axis("d_k", log=True, ticks=D_K), axis("top weight")
        ),
        picture(
            "One score leads all others by a gap", leads, axis("gap"), axis("weight of the leader")
        ),
    ]
