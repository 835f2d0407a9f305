"""Claim 1: attention is five steps, each head on its own, and scaling keeps every shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import MultiHeadAttention, attention
from .._experiment import Runs
from .._figures import Array, Figures, Spread, stack, table
from .._inputs import normal
from .._plot import Spec, axis, picture

CLAIM = 1
VERSION = 1
TITLE = "Attention is five steps, and scaling changes no shape"
SAID = """
Attention takes five steps: scores QKᵀ, division by √d_k, softmax, weights times V, and their sum.
For three words of width 512 and one head of width 64, Q, K and V are 3×64 and the scores are 3×3;
scaling never changes a shape. With several heads, each head does this on its own; the results are
concatenated and projected.
"""
DONE = """
The five steps were computed one by one in float64, for “love Apple phones” with random embeddings
(3×512) and projections (512×64), and compared with the engine, which does them all in one float32
pass. The same was done with 8 heads, concatenated and projected. Then all heads but one got other
inputs, to see whether that one changes.
"""
FOUND = """
Shapes: {shapes}. The division kept the order of the scores in {same_order:.0%} of the rows, so
each word still attends most to the same word. The engine differs from the five steps by at most
{engine:.0e}, with eight heads by at most {heads:.0e}. Other inputs to seven heads changed the
eighth by {leak:g}.
"""
LIMITS = """
Steps four and five are one matrix product: done separately, they need a 3×3×64 array that no
implementation creates, and a fused one, like this engine, does not even create the 3×3 array. The
division keeps the order of the scores but changes the weights: the largest is {top_raw:.2f±} on
average without it and {top_scaled:.2f±} with it. Changing them is its whole purpose.
"""
KEY = {
    "engine against the five steps, largest difference": "{engine:.0e}",
    "eight heads, largest difference": "{heads:.0e}",
    "rows whose order the division keeps": "{same_order:.0%}",
    "top weight, undivided": "{top_raw:.2f±}",
    "top weight, divided by √d_k": "{top_scaled:.2f±}",
}
SHOW = ("steps", "checks")
SECONDS = {"tiny": 0.05, "quick": 0.05, "full": 0.1}
SEEDS = {"full": 20}

WORDS = ("love", "Apple", "phones")
D_MODEL, D_K, HEADS = 512, 64, 8
EXPECTED = {
    "X": "3×512",
    "W_q, W_k, W_v": "512×64",
    "Q, K, V": "3×64",
    "1 scores QKᵀ": "3×3",
    "2 divided by √d_k": "3×3",
    "3 softmax": "3×3",
    "4 weights times V": "3×3×64",
    "5 their sum": "3×64",
}
TOLERANCE = 1e-5


def measure(size: str, seed: int) -> Figures:
    """The shapes and results of the steps, against the engine's; every size is the same."""
    words = normal(seed, len(WORDS), D_MODEL).astype(np.float64)
    projections = normal(seed + 1000, 3, D_MODEL, D_K).astype(np.float64) / D_MODEL**0.5
    query, key, value = words @ projections
    steps = _five_steps(query, key, value)
    scores, scaled, weights, _, output = steps
    shapes = [words, projections[0], query, *steps]

    single = np.float32
    fused = attention(query.astype(single), key.astype(single), value.astype(single))
    layer = MultiHeadAttention(D_MODEL, HEADS, seed=seed)
    return {
        "steps": {"step": list(EXPECTED), "shape": ["×".join(map(str, x.shape)) for x in shapes]},
        "words": table(
            {"from": WORDS[i], "to": WORDS[j], "score": scores[i, j], "scaled": scaled[i, j]}
            | {"weight_unscaled": raw[i, j], "weight": weights[i, j]}
            for raw in [_softmax(scores)]
            for i in range(3)
            for j in range(3)
        ),
        "checks": {
            "engine_difference": [float(np.abs(fused - output).max())],
            "heads_difference": [_heads_difference(layer, words)],
            "head_leak": [_leak(seed)],
            "same_order": [float((scores.argsort() == scaled.argsort()).all(axis=1).mean())],
            "top_weight_unscaled": [float(_softmax(scores).max(axis=1).mean())],
            "top_weight": [float(weights.max(axis=1).mean())],
        },
    }


def _five_steps(query: Array, key: Array, value: Array) -> tuple[Array, ...]:
    scores = query @ key.T
    scaled = scores / query.shape[1] ** 0.5
    weights = _softmax(scaled)
    products = weights[:, :, None] * value[None]
    return scores, scaled, weights, products, products.sum(axis=1)


def _softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return weights


def _heads_difference(layer: MultiHeadAttention, words: Array) -> float:
    """Each head's five steps, concatenated and projected, against the layer in one call."""
    outputs = []
    for head in range(HEADS):
        columns = slice(head * D_K, (head + 1) * D_K)
        mine = (
            w[:, columns].astype(np.float64) for w in (layer.w_query, layer.w_key, layer.w_value)
        )
        outputs.append(_five_steps(*(words @ w for w in mine))[-1])
    by_hand = np.concatenate(outputs, axis=1) @ layer.w_output.astype(np.float64)
    return float(np.abs(layer(words.astype(np.float32)) - by_hand).max())


def _leak(seed: int) -> float:
    """How much the first head's output changes when all others get other inputs."""
    first = normal(seed, 3, HEADS, len(WORDS), D_K)
    second = normal(seed + 1, 3, HEADS, len(WORDS), D_K)
    second[:, 0] = first[:, 0]
    return float(np.abs(attention(*first)[0] - attention(*second)[0]).max())


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    checks = {name: values[:, 0] for name, values in figures["checks"].items()}
    steps = zip(*(figures["steps"][column][0] for column in ("step", "shape")), strict=True)
    return {
        "shapes": "; ".join(f"{step} {shape}" for step, shape in steps),
        "engine": checks["engine_difference"].max(),
        "heads": checks["heads_difference"].max(),
        "leak": checks["head_leak"].max(),
        "same_order": Spread(checks["same_order"]),
        "top_raw": Spread(checks["top_weight_unscaled"]),
        "top_scaled": Spread(checks["top_weight"]),
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if every shape is as claimed, the engine agrees, and heads do not affect each other."""
    found = numbers(runs)
    wrong = {
        step: shape
        for run in runs
        for step, shape in zip(run["steps"]["step"], run["steps"]["shape"], strict=True)
        if EXPECTED.get(step) != shape
    }
    checks = {
        "the shapes are as claimed": not wrong,
        f"the engine matches the steps within {found['engine']:.0e}": found["engine"] <= TOLERANCE,
        f"eight heads match within {found['heads']:.0e}": found["heads"] <= TOLERANCE,
        f"other heads change a head by {found['leak']:g}": found["leak"] == 0,
        "the division keeps the order of the scores": found["same_order"] == 1,
    }
    passed, failed = (
        [text for text, right in checks.items() if bool(right) is wanted]
        for wanted in (True, False)
    )
    if not failed:
        why = f"all {len(checks)} checks pass; the engine matches the five steps within"
        return "holds", f"{why} {found['engine']:.0e}. Checked: {', '.join(passed)}."
    why = f"{len(failed)} of {len(checks)} checks fail. Not so: {', '.join(failed)}"
    got = f" (got {wrong})" if wrong else ""
    return ("holds partly" if passed else "does not hold"), f"{why}{got}."


def plot(runs: Runs) -> list[Spec]:
    """The 3×3 matrices of the first seed: the same shape, other weights."""
    words = runs[0]["words"]
    titles = {
        "score": "1: scores QKᵀ",
        "scaled": "2: divided by √64",
        "weight_unscaled": "3 without 2: softmax",
        "weight": "3: softmax",
    }
    pictures = []
    for column, title in titles.items():
        cells = np.array(words[column]).reshape(3, 3)
        heat: Spec = {
            **{"type": "heatmap", "x": list(WORDS), "y": list(WORDS), "z": cells.tolist()},
            **{"texttemplate": "%{z:.2f}", "showscale": False, "xgap": 2, "ygap": 2},
            "hovertemplate": "%{y} → %{x}: %{z:.3f}<extra></extra>",
            # The page has its own colours for these two names.
            **(
                {"colorscale": "both ways", "zmin": -20, "zmax": 20}
                if "weight" not in column
                else {"colorscale": "heat", "zmin": 0, "zmax": 1}
            ),
        }
        sides = axis("key"), axis("query", autorange="reversed")
        pictures.append(picture(title, [heat], *sides, height=260))
    return pictures
