"""Claim 8: exp of large unscaled scores overflows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import attention
from ...scaling import SCALE_RULES
from .._experiment import Runs
from .._figures import Array, Figures, at, stack, table
from .._inputs import queries_and_keys
from .._plot import BLUE, COLOURS, GREEN, NAMES, ORANGE, RED, Spec, axis, band, guide, picture

CLAIM = 8
VERSION = 1
TITLE = "exp of unscaled scores overflows"
SAID = """
Without the scale, scores are so large that exp overflows, and attention returns infinity or NaN.
"""
DONE = """
Softmax was computed exactly as its formula says and also with each row's maximum subtracted first,
in float16, float32 and float64, on scaled and unscaled scores of {rows} rows of {keys} keys, for
d_k from 16 to {largest}. Then the same with queries and keys up to {growth} times as large, as
training can make them, and in the engine.
"""
FOUND = """
Unscaled, the plain formula loses rows {begins}. At d_k = 64 it loses {half_64:.0%} of them in
float16 and {single_64:.0%} in float32; in float32 it loses {single_1024:.1%} at 1024 and
{single_big:.0%} at {largest}; in float64 {double_big:.0%}. Scaled, it loses {scaled_worst:.0%} in
any format. With the maximum subtracted, {shifted_worst:.0%} are lost in any format, scaled or not,
as long as the scores themselves are finite.
"""
LIMITS = """
So the claim is right for code that takes exp of a score as it is, and wrong for code that
subtracts the maximum first, as libraries do: there, exp is no reason to scale. Three arguments
remain, all of them about 16 bits. The score itself can overflow: float16 ends at 65504, and with
queries and keys {growth} times as large, {dead_half:.0%} of the rows have a larger score at d_k =
64 if the scale comes after the product, {dead_early:.0%} if it comes before. Large scores are
coarse: storing them in bfloat16 moves {bfloat16_none:.1%} of the weight unscaled and
{bfloat16_root:.2%} scaled (d_k = 1024; float16: {float16_none:.2%} and {float16_root:.3%}). And
small weights are lost: {lost_none:.0%} of the unscaled ones are exactly 0 in float16,
{lost_root:.1%} of the scaled ones; but they were small. The engine computes 16-bit inputs in
float32: {engine:.0%} of its rows were not finite.
"""
KEY = {
    "unscaled rows lost, float32, d_k = 64": "{single_64:.0%}",
    "unscaled rows lost, float32, d_k = {largest}": "{single_big:.0%}",
    "scaled rows lost, any format": "{scaled_worst:.0%}",
    "rows lost with the maximum subtracted": "{shifted_worst:.0%}",
    "weight moved by storing scores in bfloat16, unscaled, d_k = 1024": "{bfloat16_none:.1%}",
    "weight moved, with 1/√d_k": "{bfloat16_root:.2%}",
}
SHOW = ("naive", "grown")
SECONDS = {"tiny": 0.1, "quick": 0.6, "full": 1.5}

D_K = (16, 64, 256, 1024, 4096)
GROWTH = (1, 4, 16, 64)
SIZES = {"tiny": (64, 64), "quick": (256, 256), "full": (1024, 512)}  # rows, keys
TYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
RULES = ("none", "sqrt_dk")


def measure(size: str, seed: int) -> Figures:
    """The share of rows that are not finite, and what rounding does to those that are."""
    rows, keys = SIZES[size]
    naive, rounding, grown = [], [], []
    for d_k in D_K:
        query, key = queries_and_keys(seed, 1, max(rows, keys), d_k)
        products = (query[0, :rows] @ key[0, :keys].T).astype(np.float64)
        for rule in RULES:
            exact = products * SCALE_RULES[rule](d_k, None)
            truth = _softmax(exact, shift=True)
            for name, dtype in TYPES.items():
                scores = exact.astype(dtype)
                shifted = _softmax(scores, shift=True)
                naive.append(
                    {
                        **{"type": name, "scale": rule, "d_k": d_k},
                        "not_finite": _not_finite(_softmax(scores, shift=False)),
                        "not_finite_shifted": _not_finite(shifted),
                    }
                )
            lost = float((_softmax(exact.astype(np.float16), shift=True) == 0).mean())
            rounding += [
                {
                    **{"type": name, "scale": rule, "d_k": d_k},
                    "weights_moved": float(np.abs(rounded - truth).sum(axis=1).mean() / 2),
                    "lost_in_float16": lost,
                }
                for name, rounded in _rounded(exact).items()
            ]
    for growth in GROWTH:
        query, key = (growth * x[0] for x in queries_and_keys(seed, 1, max(rows, keys), 64))
        grown.append({"growth": growth} | _grown(query[:rows], key[:keys]))
    return {
        "naive": table(naive),
        "rounding": table(rounding),
        "grown": table(grown),
        "rows": rows,
        "keys": keys,
    }


def _rounded(scores: Array) -> dict[str, Array]:
    """Exact softmax of scores that were stored in 16 bits."""
    bits = scores.astype(np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # ties to even
    stored: dict[str, Array] = {
        "float16": scores.astype(np.float16),
        "bfloat16": nearest.view(np.float32),
    }
    return {name: _softmax(x.astype(np.float64), shift=True) for name, x in stored.items()}


def _softmax(scores: Array, *, shift: bool) -> Array:
    """In the dtype of the scores throughout; the plain formula unless shifted."""
    with np.errstate(over="ignore", invalid="ignore"):
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True) if shift else scores)
        weights: Array = exponentials / exponentials.sum(axis=1, keepdims=True)
    return weights


def _not_finite(weights: Array) -> float:
    # inf/inf is NaN, 1/inf is 0: a row whose weights do not add up to 1 is lost either way.
    sums = weights.astype(np.float64).sum(axis=1)
    return float((~np.isfinite(sums) | (np.abs(sums - 1) > 0.5)).mean())


def _grown(query: Array, key: Array) -> dict[str, float]:
    """float16 scores past the end of float16, and the engine on the same input."""
    half_query, half_key = query.astype(np.float16), key.astype(np.float16)
    with np.errstate(over="ignore"):
        late = (query @ key.T).astype(np.float16)
        early = ((half_query * np.float16(0.125)).astype(np.float32) @ key.T).astype(np.float16)
    result = attention(half_query, half_key, half_key, return_health=True)
    assert result.health is not None
    return {
        "largest_score": float(np.abs(query @ key.T).max()),
        "overflow_scaled_after": float((~np.isfinite(late)).any(axis=1).mean()),
        "overflow_scaled_before": float((~np.isfinite(early)).any(axis=1).mean()),
        "engine_not_finite": float((~np.isfinite(result.output)).any(axis=1).mean()),
    }


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    naive, rounding, grown = figures["naive"], figures["rounding"], figures["grown"]
    scaled = naive["scale"][0] == "sqrt_dk"

    def share(kind: str, d_k: int) -> Any:
        return at(naive, "not_finite", type=kind, scale="none", d_k=d_k)

    def begins(kind: str) -> str:
        lost = [d_k for d_k in D_K if share(kind, d_k) > 0]
        return f"in {kind} from d_k = {lost[0]} on" if lost else f"in {kind} nowhere"

    last = GROWTH[-1]
    return {
        "begins": ", ".join(map(begins, TYPES)),
        **{"rows": int(figures["rows"][0]), "keys": int(figures["keys"][0])},
        **{"largest": D_K[-1], "growth": last},
        **{"half_64": share("float16", 64), "single_64": share("float32", 64)},
        **{"single_1024": share("float32", 1024), "single_big": share("float32", D_K[-1])},
        "double_big": share("float64", D_K[-1]),
        "scaled_worst": naive["not_finite"][:, scaled].max(),
        "shifted_worst": naive["not_finite_shifted"].max(),
        "dead_half": at(grown, "overflow_scaled_after", growth=last),
        "dead_early": at(grown, "overflow_scaled_before", growth=last),
        "engine": at(grown, "engine_not_finite", growth=last),
        **{
            f"{kind}_{short}": at(rounding, "weights_moved", type=kind, scale=rule, d_k=1024)
            for kind in ("float16", "bfloat16")
            for short, rule in (("none", "none"), ("root", "sqrt_dk"))
        },
        "lost_none": at(rounding, "lost_in_float16", type="float16", scale="none", d_k=1024),
        "lost_root": at(rounding, "lost_in_float16", type="float16", scale="sqrt_dk", d_k=1024),
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if softmax overflows with the maximum subtracted, too; partly true if only without."""
    found, naive = numbers(runs), stack(runs)["naive"]
    raw = naive["not_finite"][:, naive["scale"][0] == "none"].max()
    why = (
        f"by the plain formula up to {raw:.0%} of the unscaled rows overflow, with the maximum "
        f"subtracted {found['shifted_worst']:.0%}. In float32 the plain formula loses "
        f"{found['single_64']:.0%} at d_k = 64 and {found['single_big']:.0%} at "
        f"{found['largest']}, and {found['scaled_worst']:.0%} of the scaled rows."
    )
    if raw == 0:
        return "does not hold", why
    if found["shifted_worst"] > 0:
        return "holds", f"{why} Subtracting the maximum, as libraries do, does not save it."
    remains = "What remains is the range and precision of 16 bits."
    return "holds partly", f"{why} Libraries subtract the maximum. {remains}"


def plot(runs: Runs) -> list[Spec]:
    """Rows lost by the naive softmax; what float16 does to the weights of a shifted one."""
    figures = stack(runs)
    naive, rounding = figures["naive"], figures["rounding"]
    lost = []
    for name, colour in zip(TYPES, (RED, ORANGE, BLUE), strict=True):
        chosen = (naive["type"][0] == name) & (naive["scale"][0] == "none")
        lost += band(f"{name}, unscaled", D_K, naive["not_finite"][:, chosen], colour)
    scaled = naive["scale"][0] == "sqrt_dk"
    lost.append(guide("any, scaled", D_K, naive["not_finite"][:, scaled].max()))
    shifted = naive["not_finite_shifted"].max()
    lost += band("any, maximum subtracted", D_K, np.full((1, len(D_K)), shifted), GREEN)
    moved = []
    for rule in RULES:
        for kind, dash in (("bfloat16", "solid"), ("float16", "dot")):
            chosen = (rounding["scale"][0] == rule) & (rounding["type"][0] == kind)
            values, name = rounding["weights_moved"][:, chosen], f"{kind}, {NAMES[rule]}"
            moved += band(name, D_K, values, COLOURS[rule], line={"dash": dash})
    return [
        picture(
            "Rows lost by softmax as the formula stands",
            lost,
            axis("d_k", log=True, ticks=D_K),
            axis("share of rows", tickformat=".0%"),
        ),
        picture(
            "Weight moved by storing the scores in 16 bits",
            moved,
            axis("d_k", log=True, ticks=D_K),
            axis("share of the weight", log=True),
        ),
    ]
