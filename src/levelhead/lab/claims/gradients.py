"""Claim 7: without the scale, gradients vanish, or explode."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import attention, attention_backward
from ...scaling import SCALE_RULES
from .._experiment import Runs
from .._figures import Figures, Spread, at, stack, table, typical
from .._inputs import normal
from .._layer_stack import PARAMETERS, stack_layers
from .._plot import BLUE, COLOURS, GREEN, NAMES, ORANGE, Spec, axis, band, guide, picture
from .._threads import one_thread

CLAIM = 7
VERSION = 1
TITLE = "Without the scale, gradients vanish (or explode)"
SAID = """
A saturated softmax passes no gradient, so without the scale the gradients through attention
vanish, say two of the sources. Two others say that they explode.
"""
DONE = """
First one layer: a random gradient went back through the engine, scaled and unscaled, for d_k from
{smallest} to {largest}, and the gradient of each query was recorded. Then stacks of 1 to {deepest}
layers at initialisation (d_k = 64), with residual connections and with LayerNorm in its usual
places: the norms of the gradients of W_q, W_k, W_v and W_o in every layer, unscaled divided by
scaled.
"""
FOUND = """
One layer: without the scale, the gradients of all queries together are {rms_4:.1f} times as large
at d_k = {smallest}, {rms_64:.0f} times at 64 and {rms_big:.0f} times at {largest}. The median
query's gradient is {median_64:.1f} times as large at 64, {median_1024:.2f} times at 1024 and
{median_big:.0e} times at {largest}. Stacks: in the first of {deepest} layers the gradient of W_q
is {first_pre:.1e} times as large with LayerNorm before attention, {first_mlp:.1e} times with MLPs
as well, and {first_post:.1e} times with LayerNorm after it; the gradient of W_v is
{first_value:.1e} times as large (LayerNorm before).
"""
LIMITS = """
Who is right depends on what one looks at. “They vanish” is right for single rows at a large d_k:
{starved_64:.0%} of the unscaled queries get less than a tenth of what a scaled one gets at d_k =
64, {starved_big:.0%} at {largest}. It is wrong for the norm over all rows, because the few rows
with a tie at the top each count √d_k times as much. “They explode” is right for stacks at common
widths: there the gradient also flows through W_v, where no softmax weakens it, and every layer
multiplies it. For a whole layer to go dead, scores must grow unchecked: with residuals and no
LayerNorm their standard deviation reaches {wild:.0e} in the last of {deepest} layers, and W_q gets
less than a millionth of W_v's gradient in {dead_none:.0%} of the layers ({dead_root:.0%} with the
scale), while in the first layer its gradient is {first_residual:.0e} times as large. All this is
at initialisation; claims 9 and 15 are about training.
"""
KEY = {
    "median query's gradient, unscaled over scaled, d_k = 64": "{median_64:.1f}",
    "median query's gradient at d_k = {largest}": "{median_big:.0e}",
    "over all queries at d_k = {largest}": "{rms_big:.1f±}",
    "queries that get next to nothing at d_k = {largest}": "{starved_big:.0%}",
    "W_q, first of {deepest} layers, pre-norm and MLP": "{first_mlp:.1e} times",
}
NEEDS = ("torch",)
SHOW = ("one_layer", "stacks")
SECONDS = {"tiny": 0.3, "quick": 1.0, "full": 12.0}

D_K = (4, 16, 64, 256, 1024, 4096)
STACKS = ("residual", "post-norm", "pre-norm", "pre-norm and MLP")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (1, 8), "heads": 1, "length": 16, "rows": 64},
    "quick": {"depths": (1, 4, 24), "heads": 1, "length": 32, "rows": 128},
    "full": {"depths": (1, 2, 4, 8, 16, 24), "heads": 4, "length": 96, "rows": 512},
}
FADED, GROWN, DEAD = 0.1, 10.0, 1e-6


def measure(size: str, seed: int) -> Figures:
    """Unscaled over scaled gradients: of queries in one layer, of weights in stacks."""
    sizes = SIZES[size]
    figures: Figures = {"one_layer": table(_one_layer(d_k, sizes["rows"], seed) for d_k in D_K)}
    stacks, layers = [], []
    with one_thread():
        for architecture in STACKS:
            for depth in sizes["depths"]:
                both = {
                    rule: stack_layers(
                        architecture,
                        SCALE_RULES[rule](64, None),
                        depth,
                        **{"d_k": 64, "heads": sizes["heads"], "length": sizes["length"]},
                        seed=seed,
                    )
                    for rule in ("sqrt_dk", "none")
                }
                first = {
                    f"first_{name}": both["none"][0][name] / both["sqrt_dk"][0][name]
                    for name in PARAMETERS
                }
                dead = {
                    f"dead_{rule}": float(
                        np.mean([one["W_q"] < DEAD * one["W_v"] for one in found])
                    )
                    for rule, found in both.items()
                }
                last = {"last_score_std": both["none"][-1]["score_std"]}
                stacks.append({"stack": architecture, "depth": depth} | first | dead | last)
            # Only of the deepest: every layer.
            layers += [
                {"stack": architecture, "scale": rule, "layer": layer["layer"]}
                | {name: layer[name] for name in PARAMETERS}
                for rule, rows in both.items()
                for layer in rows
            ]
    return figures | {"stacks": table(stacks), "layers": table(layers)}


def _one_layer(d_k: int, rows: int, seed: int) -> dict[str, float]:
    """The gradients of queries and values, unscaled over scaled, of all rows and of the median."""
    query, key = normal(seed, 2, 2, rows, d_k).astype(np.float64)
    value, gradient = normal(seed + 1000, 2, 2, rows, 64).astype(np.float64)
    found = {}
    for rule in ("sqrt_dk", "none"):
        scale = SCALE_RULES[rule](d_k, None)
        r = attention(query, key, value, scale=scale, return_lse=True)
        grads = attention_backward(gradient, query, key, value, r.output, r.lse, scale=scale)
        found[rule] = np.linalg.norm(grads.dq, axis=-1), np.linalg.norm(grads.dv)
    (scaled, scaled_value), (raw, raw_value) = found["sqrt_dk"], found["none"]
    return {
        "d_k": d_k,
        "all_queries": float(np.linalg.norm(raw) / np.linalg.norm(scaled)),
        "median_query": float(np.median(raw) / np.median(scaled)),
        "starved": float((raw < FADED * np.median(scaled)).mean()),
        "values": float(raw_value / scaled_value),
    }


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    one, stacks = figures["one_layer"], figures["stacks"]
    deepest = int(stacks["depth"].max())

    def first(architecture: str, name: str = "W_q") -> float:
        return typical(stacks, f"first_{name}", stack=architecture, depth=deepest)

    def wild(column: str) -> Spread:
        return at(stacks, column, stack="residual", depth=deepest)

    return {
        **{"deepest": deepest, "smallest": D_K[0], "largest": D_K[-1]},
        **{
            "rms_4": at(one, "all_queries", d_k=D_K[0]),
            "rms_64": at(one, "all_queries", d_k=64),
            "rms_big": at(one, "all_queries", d_k=D_K[-1]),
        },
        **{f"median_{d_k}": at(one, "median_query", d_k=d_k) for d_k in D_K},
        "median_big": at(one, "median_query", d_k=D_K[-1]),
        "starved_64": at(one, "starved", d_k=64),
        "starved_big": at(one, "starved", d_k=D_K[-1]),
        **{"first_pre": first("pre-norm"), "first_mlp": first("pre-norm and MLP")},
        **{"first_post": first("post-norm"), "first_value": first("pre-norm", "W_v")},
        "first_residual": first("residual"),
        **{"wild": wild("last_score_std")},
        **{"dead_none": wild("dead_none"), "dead_root": wild("dead_sqrt_dk")},
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if the median query's gradient vanishes at every d_k and no stack's explodes.

    Partly true if it vanishes at some d_k.
    """
    figures, found = stack(runs), numbers(runs)
    one, stacks = figures["one_layer"], figures["stacks"]
    median = one["median_query"].mean(axis=0)
    # Gradients span many powers of ten: the geometric mean over the seeds is the typical one.
    first = np.exp(np.log(stacks["first_W_q"]).mean(axis=0))
    fades, grows = median < FADED, first > GROWN
    if fades.all() and not grows.any():
        return "holds", f"the median query keeps at most {median.max():.0e} of its gradient."
    explodes = (
        f"In stacks the gradient of W_q in the first layer is {first.min():.0f} to "
        f"{first.max():.1e} times as large"
    )
    if not fades.any():
        least = f"is at least {median.min():.1f} times the scaled one at every d_k"
        return "does not hold", f"unscaled, the median query's gradient {least}. {explodes}."
    widths = ", ".join(f"{d_k:.0f}" for d_k in one["d_k"][0][fades])
    sentence = (
        f"at d_k = {one['d_k'][0][median.argmin()]:.0f} the median query's gradient is "
        f"{median.min():.0e} of the scaled one, but at 64 it is {found['median_64']:.1f} times it"
    )
    return "holds partly", f"{sentence}. It vanishes at d_k = {widths}. {explodes}."


def plot(runs: Runs) -> list[Spec]:
    """One layer by d_k; every layer of the deepest stacks, scaled and unscaled."""
    figures = stack(runs)
    one, layers = figures["one_layer"], figures["layers"]
    lines = [
        guide("as scaled", D_K, 1.0),
        *band("queries, all rows", D_K, one["all_queries"], ORANGE),
        *band(
            "queries, median row", D_K, np.maximum(one["median_query"], 1e-9), BLUE, geometric=True
        ),
        *band("values", D_K, one["values"], GREEN),
    ]
    pictures = [
        picture(
            "One layer: unscaled gradient over scaled",
            lines,
            axis("d_k", log=True, ticks=D_K),
            axis("times", log=True),
        )
    ]
    for architecture in ("pre-norm and MLP", "residual"):
        inside = layers["stack"][0] == architecture
        traces = []
        for rule in ("sqrt_dk", "none"):
            chosen = inside & (layers["scale"][0] == rule)
            steps = layers["layer"][0][chosen]
            for name, dash in (("W_q", "solid"), ("W_v", "dot")):
                values = np.maximum(layers[name][:, chosen], 1e-12)
                label = f"{name}, {NAMES[rule]}"
                style: Spec = {"geometric": True, "line": {"dash": dash}}
                traces += band(label, steps, values, COLOURS[rule], **style)
        title = {"residual": "residuals without LayerNorm"}.get(architecture, architecture)
        pictures.append(
            picture(
                f"Gradient by layer: {title}",
                traces,
                axis("layer"),
                axis("norm", log=True),
            )
        )
    return pictures
