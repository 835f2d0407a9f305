"""Claim 12: scaling keeps attention expressive across many layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...scaling import SCALE_RULES
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._layer_stack import ARCHITECTURES, stack_layers
from .._plot import COLOURS, NAMES, Spec, axis, band, picture
from .._threads import one_thread

CLAIM = 12
VERSION = 1
TITLE = "Scaling keeps attention expressive across many layers"
SAID = """
With the scale, attention stays expressive through many layers: no layer collapses onto single
keys, none goes flat, and gradients reach all of them.
"""
DONE = """
Stacks of {depth} attention layers at initialisation (d_k = 64): bare, with residual connections,
with LayerNorm after or before, and with MLPs in between. Measured in every layer: the entropy of
its softmax, how similar the positions have become (mean cosine), and the gradient of W_q. The same
without a scale and with 1/d_k.
"""
FOUND = """
In the last of {depth} layers, with LayerNorm before and MLPs, the entropy is {entropy_root:.2f±}
of its maximum with 1/√d_k, {entropy_none:.2f±} unscaled and {entropy_dk:.2f} with 1/d_k; the mean
cosine of the positions is {alike_root:.2f±}, {alike_none:.2f±} and {alike_dk:.2f±}. From the layer
with the smallest gradient of W_q to the one with the largest it is a factor of {range_root:.0f},
{range_none:,.0f} and {range_dk:.0f}.
"""
LIMITS = """
The scale affects gradients and one-hot rows; on its own it does not keep attention expressive. A
softmax that spreads its weight averages, and averages of averages are alike: by layer {depth} of
bare attention the positions have a cosine of {bare_alike:.3f} and the softmax an entropy of
{bare_entropy:.3f} ({bare_alike_none:.3f} and {bare_entropy_none:.3f} unscaled). Residuals,
LayerNorm and MLPs slow this down but do not stop it: in the full block the cosine is
{middle_root:.2f} half way and {alike_root:.2f} at the end. With residuals but no LayerNorm, scores
grow layer by layer, and scaled attention ends at an entropy of {residual_entropy:.2f}. Unscaled,
the positions of the full block stay at {alike_none:.2f}, and the price is the range of the
gradients. All this is at initialisation; training changes it.
"""
KEY = {
    "entropy ratio in layer {depth}, 1/√d_k": "{entropy_root:.2f±}",
    "entropy ratio in layer {depth}, no scale": "{entropy_none:.2f±}",
    "largest over smallest gradient of a layer, 1/√d_k": "{range_root:,.0f}",
    "largest over smallest gradient of a layer, no scale": "{range_none:,.0f}",
}
NEEDS = ("torch",)
SHOW = ("last_layer",)
SECONDS = {"tiny": 0.2, "quick": 0.6, "full": 4.5}

RULES = ("sqrt_dk", "none", "dk")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depth": 8, "heads": 1, "length": 16},
    "quick": {"depth": 24, "heads": 1, "length": 32},
    "full": {"depth": 24, "heads": 4, "length": 96},
}
ONE_HOT, FLAT, RANGE = 0.3, 0.95, 100.0


def measure(size: str, seed: int) -> Figures:
    """Entropy, similarity of positions and gradient by layer, for every stack and scale."""
    sizes = SIZES[size]
    layers, last = [], []
    with one_thread():
        for architecture in ARCHITECTURES:
            for rule in RULES:
                scale = SCALE_RULES[rule](64, None)
                rows = stack_layers(architecture, scale, d_k=64, seed=seed, **sizes)
                key = {"stack": architecture, "scale": rule}
                columns = ("layer", "entropy_ratio", "similarity", "W_q")
                layers += [key | {name: row[name] for name in columns} for row in rows]
                gradients = np.array([row["W_q"] for row in rows])
                final = {name: rows[-1][name] for name in ("entropy_ratio", "similarity")}
                lowest = min(row["entropy_ratio"] for row in rows)
                smallest, largest = np.log10(np.maximum([gradients.min(), gradients.max()], 1e-300))
                last.append(
                    key
                    | final
                    | {"lowest_entropy": lowest, "gradient_range_log10": largest - smallest}
                )
    return {"layers": table(layers), "last_layer": table(last), "depth": sizes["depth"]}


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    last = figures["last_layer"]

    def cell(column: str, rule: str, architecture: str = "pre-norm and MLP") -> Spread:
        return at(last, column, stack=architecture, scale=rule)

    found: dict[str, Any] = {"depth": int(figures["depth"][0])}
    for short, rule in (("root", "sqrt_dk"), ("none", "none"), ("dk", "dk")):
        found[f"entropy_{short}"] = cell("entropy_ratio", rule)
        found[f"alike_{short}"] = cell("similarity", rule)
        found[f"range_{short}"] = 10 ** cell("gradient_range_log10", rule)
    return found | {
        "bare_alike": cell("similarity", "sqrt_dk", "bare"),
        "bare_entropy": cell("entropy_ratio", "sqrt_dk", "bare"),
        "bare_alike_none": cell("similarity", "none", "bare"),
        "bare_entropy_none": cell("entropy_ratio", "none", "bare"),
        "middle_root": at(
            figures["layers"],
            "similarity",
            **{"stack": "pre-norm and MLP", "scale": "sqrt_dk", "layer": found["depth"] // 2},
        ),
        "residual_entropy": cell("entropy_ratio", "sqrt_dk", "residual"),
    }


def _sound(last: dict[str, Array], rule: str) -> dict[str, list[str]]:
    """Each demand with the stacks that meet it with this scale."""
    mine = last["scale"][0] == rule
    names = last["stack"][0][mine]
    means = {
        name: last[name][:, mine].mean(axis=0) for name in last if name not in ("scale", "stack")
    }
    demands = {
        "never one-hot": means["lowest_entropy"] > ONE_HOT,
        "not flat at the end": means["entropy_ratio"] < FLAT,
        "gradients within a factor of 100": means["gradient_range_log10"] < np.log10(RANGE),
    }
    return {demand: [str(name) for name in names[met]] for demand, met in demands.items()}


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if scaled stacks meet every demand; partly true if they meet more than the others."""
    last = stack(runs)["last_layer"]
    scaled, unscaled = (_sound(last, rule) for rule in ("sqrt_dk", "none"))
    total = len(set(last["stack"][0]))
    mine, theirs = (sum(map(len, met.values())) for met in (scaled, unscaled))
    demands = total * len(scaled)
    why = (
        f"scaled stacks meet {mine} of {demands} demands (not one-hot, not flat, gradients kept), "
        f"unscaled ones {theirs}. By demand: "
    ) + "; ".join(
        f"{demand}: {len(met)} of {total} stacks scaled, {len(unscaled[demand])} unscaled"
        for demand, met in scaled.items()
    )
    if mine == demands:
        return "holds", f"{why}."
    if mine > theirs:
        return "holds partly", f"{why}. The scale helps, but it is not enough on its own."
    return "does not hold", f"{why}."


def plot(runs: Runs) -> list[Spec]:
    """Entropy, similarity and gradient by layer of the stack most like a transformer."""
    layers = stack(runs)["layers"]
    columns = {
        "entropy_ratio": ("Entropy of the softmax", "entropy / maximum"),
        "similarity": ("How alike the positions are", "mean cosine"),
        "W_q": ("Gradient of W_q", "norm, cut at 10⁻¹²"),
    }
    styles = {"pre-norm and MLP": "solid", "bare": "dot"}
    pictures = []
    for column, (title, unit) in columns.items():
        lines = []
        for architecture, dash in styles.items():
            for rule in RULES if dash == "solid" else RULES[:2]:
                chosen = (layers["stack"][0] == architecture) & (layers["scale"][0] == rule)
                values = layers[column][:, chosen]
                if column == "W_q":
                    values = np.maximum(values, 1e-12)
                name = f"{NAMES[rule]}, {'bare' if architecture == 'bare' else 'full block'}"
                steps = layers["layer"][0][chosen]
                style: Spec = {"geometric": column == "W_q", "line": {"dash": dash}}
                lines += band(name, steps, values, COLOURS[rule], **style)
        pictures.append(picture(title, lines, axis("layer"), axis(unit, log=column == "W_q")))
    return pictures
