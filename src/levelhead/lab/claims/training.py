"""Claim 9: training without the scale is slower, less stable, or falls apart."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .._corpus import GUESSING
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._plot import BLUE, COLOURS, NAMES, ORANGE, RED, Spec, axis, band, guide, picture
from .._train import Budget, Trained, train

CLAIM = 9
VERSION = 1
TITLE = "Training without the scale is slower, less stable, or falls apart"
SAID = """
Without the scale a model trains more slowly, less stably, or not at all; and attention that is too
confident generalises worse.
"""
DONE = """
Small transformer language models ({depth} layers, 2 heads, width {width}, LayerNorm before
attention, Adam) read stories and answered questions about them, for {steps} steps of {batch}
stories. Text, order and initial weights were the same for every scale, and the width was the same
for every d_k. What a model has learned is its loss on the answers in stories that it has not read;
guessing among the words that fit costs {guessing:.2f} (grey in the maps). Four scales were
combined with d_k from {smallest} to {largest} and learning rates from {slowest:g} to {fastest:g};
then depth, the place of LayerNorm, the initial queries and keys, and the number of stories were
varied. levelhead.torch.watch recorded every run.
"""
FOUND = """
At its best learning rate the unscaled model ends at {best_none_small:.2f±} with d_k = {smallest}
and at {best_none_large:.2f±} with {largest}; scaled by 1/√d_k, at {best_root_small:.2f±} and
{best_root_large:.2f±}. At the same learning rate it is behind by more than {least:g} {behind}, and
no better than guessing {lost}. At d_k = {largest} and a rate of {rate:g}, the watch saw
{start_none:.0%} of the unscaled rows saturated at the start and {end_none:.0%} at the end
({start_root:.0%} and {end_root:.0%} scaled), and the share of the gradient that gets through the
softmax was {survival_start:.2g} at the start and {survival_end:.2g} at the end (scaled:
{survival_first:.2g} and {survival_root:.2g}). Trained twice as long on the same {stories} stories,
the unscaled model's loss on answers is {seen_none:.2f} in those and {unseen_none:.2f±} in others;
scaled, it is {seen_root:.2f} and {unseen_root:.2f±}.
"""
LIMITS = """
Does it fall apart? {broke} of {runs} unscaled runs ended with a loss that was not a number, and
the largest setback of the loss along the way is {rise_none:.2f} unscaled and {rise_root:.2f}
scaled, on average. Do other weights, another place for LayerNorm or a smaller rate make up for the
scale, at d_k = {middle}? {shelters}. By depth, unscaled against scaled: {depths}. Is 1/√d_k the
best there is? At its best learning rate 1/d_k, which theory calls too small, ends at
{best_dk_small:.2f±} and {best_dk_large:.2f±}, and 1/√d_model at {best_dmodel_small:.2f±} and
{best_dmodel_large:.2f±} (d_k = {smallest} and {largest}). Training makes scores grow (claim 15),
and a smaller scale can leave them more room: at d_k = {largest} and a rate of {rate:g}, as in the
first picture, the loss ends at {wide_root:.2f±} with 1/√d_k, at {wide_none:.2f±} without a scale
and at {wide_dk:.2f±} with 1/d_k. Models this small with budgets this short show which is ahead,
not which would win in the end.
"""
KEY = {
    "loss on answers with 1/√d_k, d_k = {largest}, best rate": "{best_root_large:.2f±}",
    "without a scale": "{best_none_large:.2f±}",
    "with 1/d_k": "{best_dk_large:.2f±}",
    "guessing": "{guessing:.2f}",
    "unscaled runs that broke down": "{broke} of {runs}",
}
NEEDS = ("torch",)
SHOW = ("grid", "shelter", "depths", "few_stories")
SEEDS = {"tiny": 2, "quick": 3, "full": 3}
SECONDS = {"tiny": 1.2, "quick": 18.0, "full": 400.0}
PIECES = {"quick": 24, "full": 118}

RULES = ("sqrt_dk", "none", "dk", "sqrt_dmodel")
BOTH = RULES[:2]
RATE = 5e-3
# What a model and its training are unless said otherwise.
USUAL: dict[str, Any] = {
    **{"d_k": 16, "rate": RATE, "depth": 2, "width": 64, "batch": 16},
    **{"weights": "unit", "norm": "pre", "corpus": None},
}
WEIGHTS = {"unit": "unit weights", "linear": "nn.Linear's weights", "small": "weights of 0.02"}
NORMS = {"pre": "LayerNorm before", "post": "LayerNorm after", "none": "no LayerNorm"}
# middle is the d_k of depths and shelters; a shelter is (weights, norm, rate).
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        **{"steps": 6, "every": 3, "d_k": (16, 32), "rates": (RATE,), "middle": 32},
        **{"depths": (1, 2), "shelter": (("small", "none", RATE),), "stories": (16,)},
    },
    "quick": {
        **{"steps": 100, "every": 10, "d_k": (16, 64), "rates": (RATE, 1.5e-2), "middle": 64},
        **{"depths": (1, 2), "stories": (32,)},
        "shelter": (("small", "pre", RATE), ("unit", "none", RATE)),
    },
    "full": {
        **{"steps": 400, "every": 10, "d_k": (16, 32, 64, 128, 256), "middle": 64},
        **{"rates": (5e-4, 1.5e-3, RATE, 1.5e-2), "depths": (1, 2, 4, 8), "stories": (32, 64, 128)},
        "shelter": (
            *((weights, norm, RATE) for norm in NORMS for weights in WEIGHTS),
            *((weights, "pre", 1.5e-3) for weights in WEIGHTS),
        ),
    },
}
BEHIND = 0.2  # in the loss of answers


def measure(size: str, seed: int) -> Figures:
    """Train every combination that the size asks for."""
    sizes = SIZES[size]
    steps, every = sizes["steps"], sizes["every"]

    @cache
    def trained(batch: int, corpus: int | None, **setting: Any) -> Trained:
        budget = Budget(2 * steps if corpus else steps, batch, corpus=corpus, every=every)
        return train(budget, seed, **setting)

    def run(rule: str, **changed: Any) -> Trained:
        return trained(rule=rule, **USUAL | changed)

    grid = [
        {"scale": rule, "d_k": d_k, "rate": rate} | _outcome(run(rule, d_k=d_k, rate=rate))
        for rule in RULES
        for d_k in sizes["d_k"]
        for rate in sizes["rates"]
    ]
    middle = {"d_k": sizes["middle"]}
    depths = [
        {"scale": rule, "depth": depth, "answers": run(rule, depth=depth, **middle).unseen}
        for depth in sizes["depths"]
        for rule in BOTH
    ]
    shelter = [
        {"scale": rule, "weights": weights, "norm": norm, "rate": rate}
        | {"answers": run(rule, weights=weights, norm=norm, rate=rate, **middle).unseen}
        for weights, norm, rate in sizes["shelter"]
        for rule in BOTH
    ]
    few = [
        {"scale": rule, "stories": corpus, "seen": one.seen, "unseen": one.unseen}
        for corpus in sizes["stories"]
        for rule in (RULES if size == "full" else BOTH)
        for one in [run(rule, corpus=corpus)]
    ]
    widest = {rule: run(rule, d_k=sizes["d_k"][-1]) for rule in RULES}
    curves = [
        {"scale": rule, "step": step, "answers": float(one.answers[step - every : step].mean())}
        for rule, one in widest.items()
        for step in range(every, steps + 1, every)
    ]
    heads = [{"scale": rule} | row for rule, one in widest.items() for row in one.heads()]
    return {
        **{"grid": table(grid), "depths": table(depths), "shelter": table(shelter)},
        **{"few_stories": table(few), "curves": table(curves), "heads": table(heads)},
        **{"steps": steps, "middle": sizes["middle"]},
    }


def _outcome(run: Trained) -> dict[str, float]:
    """Where a run ended and how it got there, and its heads at the first and the last look."""
    smooth = np.convolve(run.loss, np.full(5, 0.2), "valid")
    learned = np.flatnonzero(run.answers < GUESSING / 2)
    rows = list(run.heads())
    return {
        **{"answers": run.unseen, "words": run.unseen_words, "broke": float(run.broke)},
        "learned_at": float(learned[0] if learned.size else run.loss.size),
        "rise": float((smooth - np.minimum.accumulate(smooth)).max()),
        **{
            f"{look}_{name}": float(np.nanmean([row[name] for row in rows if row["step"] == step]))
            for look, step in (("first", rows[0]["step"]), ("last", rows[-1]["step"]))
            for name in ("score_std", "saturated", "survival")
        },
    }


def _best(grid: dict[str, Array], rule: str, d_k: float) -> Array:
    """The loss of answers by seed, at the learning rate that is best for the scale."""
    cells = grid["answers"][:, (grid["scale"][0] == rule) & (grid["d_k"][0] == d_k)]
    best: Array = cells[:, cells.mean(axis=0).argmin()]
    return best


def _against(part: dict[str, Array], chosen: Array) -> str:
    """The unscaled model's loss of answers and the scaled one's."""
    none, root = (
        part["answers"][:, chosen & (part["scale"][0] == rule)].mean()
        for rule in ("none", "sqrt_dk")
    )
    return f"{none:.2f} against {root:.2f}"


def _shelters(shelter: dict[str, Array]) -> str:
    """Which settings let the unscaled model keep up, and with which it does best."""
    answers, scale = shelter["answers"].mean(axis=0), shelter["scale"][0]
    none, root = answers[scale == "none"], answers[scale == "sqrt_dk"]
    kinds = zip(
        *(shelter[name][0][scale == "none"] for name in ("weights", "norm", "rate")), strict=True
    )
    names = [f"{WEIGHTS[weights]}, {NORMS[norm]}, rate {rate:g}" for weights, norm, rate in kinds]
    keeps_up = (none - root <= BEHIND) & (none < GUESSING / 2)
    hidden = [name for name, one in zip(names, keeps_up, strict=True) if one]
    best = int(none.argmin())
    return (
        f"In {len(hidden) or 'none'} of {len(names)} settings"
        + f" ({'; '.join(hidden)})" * bool(hidden)
        + f". The unscaled model does best with {names[best]}: {none[best]:.2f}, against "
        f"{root[best]:.2f} scaled"
    )


def _cells(grid: dict[str, Array], chosen: Array) -> str:
    """Which combinations of d_k and learning rate these are; one value each, in grid order."""
    cells = zip(
        *(grid[name][0][grid["scale"][0] == "none"] for name in ("d_k", "rate")), strict=True
    )
    named = [f"{d_k:.0f} at {rate:g}" for d_k, rate in cells]
    if chosen.all() or not chosen.any():
        return "at every d_k and learning rate" if chosen.all() else "nowhere"
    few, words = (chosen, "") if chosen.mean() <= 0.5 else (~chosen, "everywhere except ")
    return f"{words}with d_k = " + ", ".join(
        name for name, one in zip(named, few, strict=True) if one
    )


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    grid, few, depths = figures["grid"], figures["few_stories"], figures["depths"]
    widths, rates, counts = (
        np.unique(column[0]) for column in (grid["d_k"], grid["rate"], few["stories"])
    )
    small, large, fastest = int(widths[0]), int(widths[-1]), float(rates[-1])
    stories = int(counts[len(counts) // 2])

    def cell(column: str, rule: str) -> Spread:
        return at(grid, column, scale=rule, d_k=large, rate=RATE)

    unscaled, scaled = (grid["scale"][0] == rule for rule in ("none", "sqrt_dk"))
    answers = grid["answers"].mean(axis=0)
    found: dict[str, Any] = {
        **{name: USUAL[name] for name in ("depth", "width", "batch")},
        **{name: int(figures[name][0]) for name in ("steps", "middle")},
        **{"guessing": GUESSING, "smallest": small, "largest": large, "stories": stories},
        **{"slowest": rates[0], "fastest": fastest, "rate": RATE},
        "least": BEHIND,
        "behind": _cells(grid, answers[unscaled] - answers[scaled] > BEHIND),
        "lost": _cells(grid, answers[unscaled] >= GUESSING),
        "runs": int(unscaled.sum()) * len(runs),
        "broke": int(grid["broke"][:, unscaled].sum()),
        "shelters": _shelters(figures["shelter"]),
        "depths": "; ".join(
            f"{depth:.0f} layer{'s' if depth > 1 else ''} "
            + _against(depths, depths["depth"][0] == depth)
            for depth in np.unique(depths["depth"][0])
        ),
        "survival_start": cell("first_survival", "none"),
        "survival_end": cell("last_survival", "none"),
        "survival_first": cell("first_survival", "sqrt_dk"),
        "survival_root": cell("last_survival", "sqrt_dk"),
    }
    for short, rule in zip(("root", "none", "dk", "dmodel"), RULES, strict=True):
        found[f"best_{short}_small"] = Spread(_best(grid, rule, small))
        found[f"best_{short}_large"] = Spread(_best(grid, rule, large))
        found[f"wide_{short}"] = cell("answers", rule)
        found[f"start_{short}"] = cell("first_saturated", rule)
        found[f"end_{short}"] = cell("last_saturated", rule)
        found[f"rise_{short}"] = grid["rise"][:, grid["scale"][0] == rule].mean()
        if rule in BOTH:
            found[f"seen_{short}"] = at(few, "seen", scale=rule, stories=stories)
            found[f"unseen_{short}"] = at(few, "unseen", scale=rule, stories=stories)
    return found


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if the unscaled model is behind at every d_k and generalises worse.

    Partly true if only one of the two, or at some d_k. Each scale is judged at its best learning
    rate, because a smaller rate may make up for a missing scale.
    """
    grid, found = stack(runs)["grid"], numbers(runs)
    lags = {
        int(d_k): float((_best(grid, "none", d_k) - _best(grid, "sqrt_dk", d_k)).mean())
        for d_k in np.unique(grid["d_k"][0])
    }
    behind = [lag > BEHIND for lag in lags.values()]
    gap_none, gap_root = (found[f"unseen_{x}"] - found[f"seen_{x}"] for x in ("none", "root"))
    hidden = found["shelters"].partition(". ")[0]
    worse = gap_none - gap_root > BEHIND and found["unseen_none"] > found["unseen_root"]
    why = (
        f"at their best rates the unscaled loss is higher by {min(lags.values()):.2f} to "
        f"{max(lags.values()):.2f}, depending on d_k (guessing costs {GUESSING:.2f}). By d_k: "
        + ", ".join(f"{lag:.2f} at {d_k}" for d_k, lag in lags.items())
        + f"; {found['broke']} of {found['runs']} unscaled runs broke down. From the "
        f"{found['stories']} training stories to new ones the "
        f"loss rises by {gap_none:.2f} unscaled and by {gap_root:.2f} scaled. Other weights, norms "
        f"or rates make up for the scale {hidden[0].lower()}{hidden[1:]}."
    )
    if all(behind) and worse:
        return "holds", why
    return ("holds partly" if any(behind) or worse else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """How answers are learned, where that ends by d_k and rate, and what the watch saw."""
    figures = stack(runs)
    grid, curves, heads = figures["grid"], figures["curves"], figures["heads"]
    widths, largest = np.unique(grid["d_k"][0]), int(grid["d_k"].max())
    steps, looks = np.unique(curves["step"][0]), np.unique(heads["step"][0])
    learning, ends = [guide("guessing", steps, GUESSING)], [guide("guessing", widths, GUESSING)]
    saturated = []
    for rule in RULES:
        name, colour = NAMES[rule], COLOURS[rule]
        learned = curves["answers"][:, curves["scale"][0] == rule]
        learning += band(name, steps, learned, colour, mode="lines")
        ends += band(name, widths, np.stack([_best(grid, rule, d) for d in widths], 1), colour)
        mine = heads["saturated"][:, heads["scale"][0] == rule]
        share = mine.reshape(len(runs), len(looks), -1).mean(axis=-1)
        saturated += band(name, looks, share, colour, mode="lines")
    loss, step = axis("loss of answers", rangemode="tozero"), axis("step")
    d_k = axis("d_k", log=True, ticks=widths)
    return [
        picture(f"Learning to answer (d_k = {largest}, rate {RATE:g})", learning, step, loss),
        picture("Where each scale ends at its best learning rate", ends, d_k, loss),
        picture(
            f"Saturated rows while learning (d_k = {largest}, rate {RATE:g})",
            saturated,
            step,
            axis("share of rows", tickformat=".0%"),
        ),
        *(_heat(grid, rule) for rule in BOTH),
        _generalising(figures["few_stories"]),
    ]


def _heat(grid: dict[str, Array], rule: str) -> Spec:
    """The loss of answers by d_k and learning rate."""
    widths, rates = (np.unique(grid[name][0]) for name in ("d_k", "rate"))
    means = grid["answers"].mean(axis=0)[grid["scale"][0] == rule].reshape(len(widths), len(rates))
    most = 1.5 * GUESSING
    cells = {
        **{"type": "heatmap", "z": means.T.round(3).tolist(), "zmin": 0, "zmax": round(most, 3)},
        **{"x": [f"{d:.0f}" for d in widths], "y": [f"{rate:g}" for rate in rates]},
        # Grey is guessing.
        "colorscale": [[0, BLUE], [GUESSING / most, "#e5e7eb"], [1, RED]],
        **{"texttemplate": "%{z:.2f}", "colorbar": {"title": {"text": "loss"}}},
        "hovertemplate": "d_k %{x}, rate %{y}: %{z:.2f}<extra></extra>",
    }
    return picture(
        f"Loss of answers: {NAMES[rule]}",
        [cells],
        axis("d_k", type="category"),
        axis("learning rate", type="category"),
    )


def _generalising(few: dict[str, Array]) -> Spec:
    """Bars: the loss of answers in stories trained with, and in others."""
    names = [
        f"{NAMES[rule]}, {stories:.0f}"
        for rule, stories in zip(few["scale"][0], few["stories"][0], strict=True)
    ]
    bars = [
        {
            **{"type": "bar", "name": label, "x": names, "marker": {"color": colour}},
            **{"y": few[column].mean(axis=0).round(4).tolist()},
            "error_y": {"type": "data", "array": few[column].std(axis=0).round(4).tolist()},
        }
        for column, label, colour in (
            ("seen", "stories trained with", BLUE),
            ("unseen", "other stories", ORANGE),
        )
    ]
    return picture(
        "Trained on few stories", bars, axis("scale, number of stories"), axis("loss of answers")
    )
