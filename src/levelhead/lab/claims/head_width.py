"""Claim 4: the head's width counts, not the model's."""

from __future__ import annotations

import numpy as np

from ...scaling import SCALE_RULES
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._inputs import health, normal
from .._plot import BLUE, COLOURS, NAMES, ORANGE, Spec, axis, band, guide, line, picture

CLAIM = 4
VERSION = 1
TITLE = "The head's d_k sets the scale, not the model's d"
SAID = """
The dimension to divide by is the head's, d_k, not the model's, d. Dividing by √d would be wrong by
a factor of √heads: √8 for 512/8 = 64, √96 for GPT-3's 12288/96 = 128.
"""
DONE = """
Words as wide as the model, with unit variance, were projected to one head's queries and keys, for
models from 512/8 to GPT-3's 12288/96. Two series fix one width and vary the other, to tell their
effects apart. Each row had {keys} keys.
"""
FOUND = """
At d_k = 64 the unscaled variance is {fixed_low:.1f} to {fixed_high:.1f}, however wide the model is
(64 to 4096); at d = 1024 it is {one_head:.0f} with one head and {many_heads:.1f} with 64. With
1/√d_k the standard deviation is {right_512:.3f±} for 512/8 and {right_gpt3:.3f±} for GPT-3; with
1/√d it is {wrong_512:.3f±} and {wrong_gpt3:.4f±}, too small by factors of {off_512:.2f} and
{off_gpt3:.2f} (√8 = 2.83, √96 = 9.80).
"""
LIMITS = """
Too small a scale does not saturate the softmax, it flattens it: in GPT-3's heads a row spreads its
weight over {keys_wrong:.1%} of its keys with 1/√d and over {keys_right:.0%} with 1/√d_k. The
factor is fixed, so training can make up for it by growing W_q or W_k; claim 9 measures what that
costs. With a single head the two rules are the same.
"""
KEY = {
    "standard deviation with 1/√d_k, d = 512, 8 heads": "{right_512:.3f±}",
    "with 1/√d, d = 512, 8 heads": "{wrong_512:.3f±}",
    "with 1/√d_k, d = 12288, 96 heads": "{right_gpt3:.3f±}",
    "with 1/√d, d = 12288, 96 heads": "{wrong_gpt3:.3f±}",
}
SHOW = ("models",)
SECONDS = {"tiny": 0.4, "quick": 0.5, "full": 1.0}

MODELS = {"512/8": (512, 8), "768/12": (768, 12), "4096/32": (4096, 32), "12288/96": (12288, 96)}
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
HEADS = (1, 2, 4, 8, 16, 32, 64)
LENGTH = {"tiny": 192, "quick": 256, "full": 768}
TOLERANCE = 0.05


def measure(size: str, seed: int) -> Figures:
    """Score statistics of one head of models of several widths and heads."""
    length = LENGTH[size]
    rows = []
    for name, (d_model, heads) in MODELS.items():
        query, key = _project(seed, length, d_model, d_model // heads)
        row: dict[str, float | str | int] = {"model": name, "heads": heads, "d_k": d_model // heads}
        for rule in ("sqrt_dk", "sqrt_dmodel"):
            found = health(query, key, SCALE_RULES[rule](d_model // heads, d_model))
            row[f"std_{rule}"] = float(found.score_var[0]) ** 0.5
            row[f"share_of_keys_{rule}"] = float(found.effective_keys[0]) / length
        rows.append(row)
    return {
        "models": table(rows),
        "fixed_head": {
            "d_model": list(WIDTHS),
            "variance": [_variance(seed, length, d_model, 64) for d_model in WIDTHS],
        },
        "fixed_model": {
            "heads": list(HEADS),
            "d_k": [1024 // heads for heads in HEADS],
            "variance": [_variance(seed, length, 1024, 1024 // heads) for heads in HEADS],
        },
        "keys": length,
    }


def _project(seed: int, length: int, d_model: int, d_k: int) -> tuple[Array, Array]:
    """One head's queries and keys: words of unit variance times weights of variance 1/d_model."""
    words = normal(seed, length, d_model)
    weights = normal(seed + 1000, 2, d_model, d_k) / np.float32(d_model**0.5)
    return words @ weights[0], words @ weights[1]


def _variance(seed: int, length: int, d_model: int, d_k: int) -> float:
    query, key = _project(seed, length, d_model, d_k)
    return float(health(query[None], key[None], 1.0).score_var[0])


def numbers(runs: Runs) -> dict[str, Spread | float]:
    """What the text quotes."""
    figures = stack(runs)
    models, keys = figures["models"], int(figures["keys"][0])
    fixed = figures["fixed_head"]["variance"].mean(axis=0)
    varied = figures["fixed_model"]["variance"].mean(axis=0)
    found: dict[str, Spread | float] = {
        **{"fixed_low": fixed.min(), "fixed_high": fixed.max(), "keys": keys},
        **{"one_head": varied[0], "many_heads": varied[-1]},
        "keys_right": at(models, "share_of_keys_sqrt_dk", model="12288/96"),
        "keys_wrong": at(models, "share_of_keys_sqrt_dmodel", model="12288/96"),
    }
    for short, model in (("512", "512/8"), ("gpt3", "12288/96")):
        right, wrong = (at(models, f"std_{r}", model=model) for r in ("sqrt_dk", "sqrt_dmodel"))
        found |= {f"right_{short}": right, f"wrong_{short}": wrong, f"off_{short}": 1 / wrong}
    return found


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if the variance follows d_k and not d_model, and 1/√d is off by √heads."""
    figures = stack(runs)
    models, model = figures["models"], figures["fixed_model"]
    right = models["std_sqrt_dk"].mean(axis=0)
    wrong = models["std_sqrt_dmodel"].mean(axis=0) * np.sqrt(models["heads"][0])
    head = figures["fixed_head"]["variance"].mean(axis=0) / 64
    split = model["variance"].mean(axis=0) / model["d_k"][0]
    deviations = (right, wrong, np.sqrt(head), np.sqrt(split))
    parts = [bool((np.abs(x - 1) <= TOLERANCE).all()) for x in deviations]
    why = (
        f"the standard deviation is {right.min():.3f} to {right.max():.3f} with 1/√d_k, and "
        f"1/√heads times {wrong.min():.3f} to {wrong.max():.3f} with 1/√d. That is so in "
        f"{len(right)} models; unscaled, the variance is {min(head.min(), split.min()):.3f} to "
        f"{max(head.max(), split.max()):.3f} times d_k, however wide the model."
    )
    return ("holds" if all(parts) else "holds partly" if any(parts) else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """Variance against each width with the other fixed; the deviation by model with both rules."""
    figures = stack(runs)
    head, model, models = figures["fixed_head"], figures["fixed_model"], figures["models"]
    separate = [
        *band("d_k = 64, d_model varies", WIDTHS, head["variance"], ORANGE),
        *band("d_model = 1024, d_k = 1024/heads", model["d_k"][0], model["variance"], BLUE),
        guide("variance = width", WIDTHS, WIDTHS),
    ]
    heads = models["heads"][0]
    names = [str(name) for name in models["model"][0]]
    spread = [
        line(NAMES[rule], heads, models[f"std_{rule}"].mean(axis=0), COLOURS[rule], text=names)
        for rule in ("sqrt_dk", "sqrt_dmodel")
    ]
    series = np.arange(4, 101)
    spread.append(guide("1/√heads", series, series**-0.5))
    return [
        picture(
            "Variance of the unscaled scores",
            separate,
            axis("width that varies", log=True, ticks=(16, 64, 256, 1024, 4096)),
            axis("variance", log=True),
        ),
        picture(
            "Standard deviation of the scaled scores",
            spread,
            axis("heads of the model", log=True, ticks=(8, 12, 32, 96)),
            axis("standard deviation", rangemode="tozero"),
        ),
    ]
