"""Claim 6: the softmax's Jacobian, and where it vanishes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import attention, attention_backward
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._inputs import health, normal
from .._plot import BLUE, GREEN, ORANGE, RED, Spec, axis, band, guide, line, picture

CLAIM = 6
VERSION = 1
TITLE = "Softmax's Jacobian is p(1−p) and −pᵢpⱼ, and vanishes when saturated"
SAID = """
The derivative of the softmax is p_i(1−p_i) on the diagonal and −p_i·p_j off it. Where a weight is
near 0 or 1, it vanishes.
"""
DONE = """
The formula was compared with central differences of the engine's own softmax, entry by entry. Then
the engine reported the norm of the Jacobian for two keys whose scores move further and further
apart, and for rows of {few} and {many} keys with a larger and larger spread, together with the
share of a random gradient that gets through.
"""
FOUND = """
The formula and the differences agree to {formula:.0e}. With two keys the norm is {norm_0:.2f} at a
gap of 0, {norm_4:.3f} at 4 and {norm_10:.0e} at 10. In a row of {many} keys, {through_1:.2%} of a
gradient gets through at a standard deviation of 1 (scaled), {through_8:.2%±} at 8 (unscaled, d_k =
64) and {through_64:.2%±} at 64 (unscaled, d_k = 4096). In the median row it is {median_1:.2%},
{median_8:.2%} and {median_64:.0e}.
"""
LIMITS = """
Near 0 is no better than near 1. A row that gives all {many} keys nearly the same weight passes
{through_flat:.2%} of a gradient, because its weights are all near 0. Most gets through in between,
at a standard deviation of {best_many:g} with {many} keys and of {best_few:g} with {few}. So a
scale can also be too small: with {many} keys, unscaled scores at d_k = 64 pass {gain:.1f} times as
much as scaled ones, and at d_k = 4096 still {late:.1f} times as much, over all rows. But they pass
it unevenly: at 4096 next to nothing gets through the median row, and a few rows, with a tie at the
top, carry the rest.
"""
KEY = {
    "largest error of the formula": "{formula:.0e}",
    "norm with two keys, gap 0": "{norm_0:.2f}",
    "norm with two keys, gap 10": "{norm_10:.0e}",
    "gradient through the median row, standard deviation 1": "{median_1:.2%}",
    "gradient through the median row, standard deviation 64": "{median_64:.0e}",
}
SHOW = ("two_keys", "rows")
SECONDS = {"tiny": 0.4, "quick": 0.6, "full": 2.5}

GAPS = (0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0)
STDS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
KEYS = (16, 512)
ROWS = {"tiny": 128, "quick": 256, "full": 2048}
WIDTH = 64


def measure(size: str, seed: int) -> Figures:
    """The formula against differences; norms and surviving gradient by spread of the scores."""
    rows = []
    for keys in KEYS:
        # The scores themselves as queries, and unit vectors as keys: any scores can be set.
        scores = normal(seed, ROWS[size], keys).astype(np.float64)
        gradient, value = (
            normal(seed + 1000, count, WIDTH).astype(np.float64) for count in (len(scores), keys)
        )
        for std in STDS:
            through = _survival(std * scores, value, gradient)
            found = health(std * scores, np.eye(keys), 1.0)
            rows.append(
                {
                    **{"keys": keys, "std": std},
                    "jacobian_norm": float(found.jacobian_norm[0]),
                    "signal": float(found.signal[0]),
                    "survival": through["all"],
                    "median_survival": through["median"],
                }
            )
    return {
        "two_keys": {
            "gap": list(GAPS),
            "jacobian_norm": [_two_keys(gap) for gap in GAPS],
            "p(1-p)": [float(1 / (2 + 2 * np.cosh(gap))) for gap in GAPS],
        },
        "rows": table(rows),
        "formula_error": _formula_error(normal(seed, 6).astype(np.float64)),
    }


def _softmax(scores: Array) -> Array:
    """The engine's weights for these scores."""
    size = scores.shape[-1]
    unit = np.eye(size, dtype=scores.dtype)
    result = attention(scores.reshape(-1, size), unit, unit, scale=1.0, return_weights=True)
    weights: Array = result.weights
    return weights


def _formula_error(scores: Array, step: float = 1e-5) -> float:
    """The largest difference between the formula and central differences."""
    p = _softmax(scores)[0]
    nudges = step * np.eye(scores.size)
    differences = (_softmax(scores + nudges) - _softmax(scores - nudges)) / (2 * step)
    return float(np.abs(np.diag(p) - np.outer(p, p) - differences.T).max())


def _two_keys(gap: float) -> float:
    query = np.array([[gap, 0.0]])
    return float(health(query, np.eye(2), 1.0).jacobian_norm[0])


def _survival(scores: Array, value: Array, gradient: Array) -> dict[str, float]:
    """|dL/dS| / |dL/dP| from the engine's backward pass, over all rows and of the median row."""
    unit = np.eye(scores.shape[1])
    result = attention(scores, unit, value, scale=1.0, return_lse=True)
    grads = attention_backward(
        *(gradient, scores, unit, value, result.output, result.lse), scale=1.0, return_health=True
    )
    # Keys are unit vectors, so the gradient of the query is that of its scores.
    by_row = np.linalg.norm(grads.dq, axis=1) / np.linalg.norm(gradient @ value.T, axis=1)
    assert grads.health is not None
    return {"all": float(grads.health.survival[0]), "median": float(np.median(by_row))}


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    two, rows = figures["two_keys"], figures["rows"]
    few, many = KEYS

    def survival(std: float, column: str = "survival") -> Spread:
        return at(rows, column, keys=many, std=std)

    def best(keys: int) -> float:
        chosen = rows["keys"][0] == keys
        return float(rows["std"][0][chosen][rows["survival"].mean(axis=0)[chosen].argmax()])

    return {
        **{"few": few, "many": many, "formula": figures["formula_error"].max()},
        **{f"norm_{gap}": at(two, "jacobian_norm", gap=gap) for gap in (0, 4, 10)},
        **{f"through_{std}": survival(std) for std in (1, 8, 64)},
        "through_flat": survival(STDS[0]),
        **{f"median_{std}": survival(std, "median_survival") for std in (1, 8, 64)},
        **{"gain": survival(8) / survival(1), "late": survival(64) / survival(1)},
        **{"best_few": best(few), "best_many": best(many)},
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if the formula is exact and the norm all but vanishes where a weight is near 1."""
    found = numbers(runs)
    formula = found["formula"] <= 1e-7
    vanishes = found["norm_10"] <= 1e-3 * found["norm_0"]
    starved = found["median_64"] <= 0.01 * found["through_1"]
    why = (
        f"the formula is right to {found['formula']:.0e}, and a lead of 10 over one other key "
        f"divides the norm by {found['norm_0'] / found['norm_10']:,.0f}. In rows of "
        f"{found['many']} keys the median row passes {found['median_64']:.0e} at a standard "
        f"deviation of 64, against {found['through_1']:.1e} at 1; a flat row passes "
        f"{found['through_flat']:.1e}."
    )
    parts = (formula, vanishes, starved)
    return ("holds" if all(parts) else "holds partly" if any(parts) else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """The norm by gap; the surviving share of a gradient by spread of the scores."""
    figures = stack(runs)
    two, rows = figures["two_keys"], figures["rows"]
    lines = []
    for keys, colour, pale in zip(KEYS, (ORANGE, BLUE), (RED, GREEN), strict=True):
        chosen = rows["keys"][0] == keys
        lines += band(f"{keys} keys, all rows", STDS, rows["survival"][:, chosen], colour)
        median = np.maximum(rows["median_survival"][:, chosen], 1e-9)
        lines += band(f"{keys} keys, median row", STDS, median, pale, line={"dash": "dash"})
    return [
        picture(
            "Share of a gradient that passes the softmax",
            lines,
            axis("standard deviation of the scores", log=True, ticks=(0.0625, 0.25, 1, 4, 16, 64)),
            axis("|dL/dS| / |dL/dP|", log=True, range=[-6, 0]),
        ),
        picture(
            "Two keys: the norm of the Jacobian",
            [
                line("‖J‖, measured", GAPS, two["jacobian_norm"].mean(axis=0), BLUE),
                guide("2·p(1−p)", GAPS, 2 * two["p(1-p)"][0]),
            ],
            axis("gap between the two scores"),
            axis("‖J‖"),
        ),
    ]
