"""Claim 17: four things that are often said about √d_k are confusions."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ... import attention, attention_backward
from ...scaling import SCALE_RULES
from .._corpus import GUESSING
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._inputs import health, normal, queries_and_keys
from .._plot import COLOURS, GREEN, NAMES, ORANGE, Spec, axis, band, guide, picture
from .._train import Budget, Trained, train

CLAIM = 17
VERSION = 1
TITLE = "Four common confusions about √d_k are wrong"
SAID = """
Four things that are often said are wrong: “d_k is the number of words”; “scaling changes the shape
of the attention matrix”; “softmax normalises anyway, so no scale is needed”; “dividing by d_k would
do as well”.
"""
DONE = """
Each was put to a test that it could have passed. Words: from {fewest} to {most} words were crossed
with d_k from {fewest} to {most}, and the engine reported the variance of q·k. Shape: the engine
returned its weights at those numbers of words with three scales. Softmax: with {keys} keys, its
rows were added up without a scale, and the signal was recorded that they leave for the gradient;
then every score was raised by {shift:g}, or multiplied by {factor:g}. d_k: the same at
initialisation with 1/d_k, and small language models were trained with it for {steps} steps, with
the same text, order and initial weights as with 1/√d_k, each scale at the best of the learning
rates {rates}.
"""
FOUND = """
Words: at d_k = {middle}, {most} words instead of {fewest} change the variance by a factor of
{by_words:.2f±}; at {middle} words, a d_k of {most} instead of {fewest} changes it by
{by_d_k:.0f±}. Over the whole table it grows as words^{slope_words:.2f±} and d_k^{slope_d_k:.2f±}.
Divided by √words instead, it would be {few_words:.1f} with {fewest} words and {many_words:.2f} with
{most}. Shape: in {same} of {shapes} cases the matrix is words×words; only its entries change: with
{most} words the top weight is {top_none:.2f±} unscaled, {top_root:.3f±} with 1/√d_k and
{top_dk:.4f±} with 1/d_k. Softmax: without a scale every row sums to 1 within {sum_error:.0e}, yet
at d_k = {widest} {saturated:.0%} of the rows have put more than 0.99 on one key, and their signal
1 − Σp² is {signal_none:.2f±} ({signal_root:.2f±} with 1/√d_k). Raising every score by {shift:g}
moves {shift_moved:.0e} of the weight, multiplying by {factor:g} moves {factor_moved:.0%}. d_k: at
initialisation, 1/d_k leaves a variance of {variance_dk:.4f} at d_k = {widest}, and a row spreads
over {share_dk:.1%} of its keys ({share_root:.0%} with 1/√d_k). After training, 1/d_k has a loss on
answers of {loss_dk:.2f±}, and 1/√d_k of {loss_root:.2f±} (d_k = {widest_trained}; guessing costs
{guessing:.2f}).
"""
LIMITS = """
The number of words does matter elsewhere: it sets the size of the matrix, and a row of more keys
needs larger scores to single one out (claim 5). Softmax does make up for one thing, an amount that
is added to all scores, and at d_k = {fewest} the missing scale costs little: the signal is
{signal_small_none:.2f} without it and {signal_small_root:.2f} with it. And 1/d_k is wrong only for
queries and keys that are unrelated, as they are at the start. Training moves W_q and W_k, and Adam
moves them at about the same pace however small the gradient is: each scale at its best learning
rate, the loss with 1/d_k ends {lags} than with 1/√d_k. At the slowest rate, {slowest:g}, and
d_k = {widest_trained}, it is {half_dk:.2f±} against {half_root:.2f±} after {half} steps, and
{slow_dk:.2f±} against {slow_root:.2f±} at the end. Claim 9 trains longer, at more learning rates;
larger models and plain gradient descent were not measured.
"""
KEY = {
    "variance of q·k, {most} words instead of {fewest}": "times {by_words:.2f±}",
    "variance of q·k, d_k = {most} instead of {fewest}": "times {by_d_k:.0f±}",
    "matrices that are words×words, whatever the scale": "{same} of {shapes}",
    "signal without a scale, d_k = {widest}": "{signal_none:.2f±}",
    "share of the keys attended to with 1/d_k": "{share_dk:.1%}",
    "loss on answers with 1/d_k and with 1/√d_k": "{loss_dk:.2f±} and {loss_root:.2f±}",
}
NEEDS = ("torch",)
SHOW = ("words", "shapes", "softmax", "training")
SEEDS = {"full": 5}
SECONDS = {"tiny": 0.6, "quick": 1.8, "full": 20.0}
PIECES = {"quick": 4, "full": 8}

CROSSED = (4, 16, 64, 256)  # words, and d_k
MIDDLE = 64
D_K = (4, 16, 64, 256, 1024)
RULES = ("none", "sqrt_dk", "dk")
SHIFT, FACTOR = 10.0, MIDDLE**0.5
DEPTH, WIDTH, BATCH = 2, 64, 16
# rows: of the tables by words; keys: of the softmax; the others: of the training.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"rows": 512, "keys": 64, "steps": 4, "every": 2, "d_k": (8, 16), "rates": (5e-3,)},
    "quick": {
        "rows": 1024,
        "keys": 256,
        "steps": 40,
        "every": 4,
        "d_k": (16, 64),
        "rates": (5e-3,),
    },
    "full": {
        **{"rows": 4096, "keys": 256, "steps": 200, "every": 10},
        **{"d_k": (16, 128), "rates": (1.5e-3, 5e-3)},
    },
}
NEAR = 0.1  # of an exponent
FLAT, SELECTIVE = 0.95, 0.6  # of the keys
BEHIND = 0.2  # in the loss on answers, as in claim 9


def measure(size: str, seed: int) -> Figures:
    """Each confusion's own test."""
    sizes = SIZES[size]
    rows, keys = sizes["rows"], sizes["keys"]
    return {
        "words": table(_variance(seed, rows, words, d_k) for words in CROSSED for d_k in CROSSED),
        "shapes": table(
            {"words": words, "scale": rule} | row
            for words in CROSSED
            for rule, row in _matrices(seed, words).items()
        ),
        "pattern": _pattern(seed),
        "softmax": table(_softmax(seed, keys, d_k, rule) for d_k in D_K for rule in RULES),
        **_moved(seed, keys),
        **_training(sizes, seed),
        **{"keys": keys, "steps": sizes["steps"]},
    }


def _variance(seed: int, rows: int, words: int, d_k: int) -> dict[str, float]:
    """Of all scores within sentences of so many words; as many rows for all."""
    query, key = queries_and_keys(seed, rows // words, words, d_k)
    variance = float(health(query, key, 1.0).score_var[0])
    return {
        **{"words": words, "d_k": d_k, "variance": variance},
        **{"divided_by_d_k": variance / d_k, "divided_by_words": variance / words},
    }


def _weights(query: Array, key: Array, scale: float, **options: Any) -> Array:
    result = attention(query, key, key, scale=scale, return_weights=True, **options)
    weights: Array = result.weights
    return weights


def _matrices(seed: int, words: int) -> dict[str, dict[str, Any]]:
    """The attention matrix of one head with each scale: its shape, and what is in it."""
    query, key = queries_and_keys(seed, 1, words, MIDDLE)
    every = {rule: _weights(query, key, SCALE_RULES[rule](MIDDLE, None))[0] for rule in RULES}
    return {
        rule: {
            "matrix": "×".join(map(str, weights.shape)),
            "same_top": float((weights.argmax(1) == every["none"].argmax(1)).mean()),
            "top_weight": float(weights.max(axis=1).mean()),
        }
        for rule, weights in every.items()
    }


def _pattern(seed: int, words: int = 8) -> dict[str, list[Any]]:
    """All weights of a short sentence, for the picture."""
    query, key = queries_and_keys(seed, 1, words, MIDDLE)
    return table(
        {"scale": rule, "query": i, "key": j, "weight": float(weights[i, j])}
        for rule in RULES
        for weights in [_weights(query, key, SCALE_RULES[rule](MIDDLE, None))[0]]
        for i in range(words)
        for j in range(words)
    )


def _softmax(seed: int, keys: int, d_k: int, rule: str) -> dict[str, Any]:
    """What the softmax makes of random scores: sums, spread, and what it lets through."""
    query, key = queries_and_keys(seed, 1, keys, d_k)
    value, gradient = normal(seed + 1000, 2, 1, keys, MIDDLE)
    scale = SCALE_RULES[rule](d_k, None)
    options: dict[str, Any] = {"return_lse": True, "return_weights": True, "return_health": True}
    r = attention(query, key, value, scale=scale, **options)
    back: Any = attention_backward(
        *(gradient, query, key, value, r.output, r.lse), scale=scale, return_health=True
    )
    return {
        **{"d_k": d_k, "scale": rule},
        "sum_error": float(np.abs(r.weights.sum(axis=-1, dtype=np.float64) - 1).max()),
        "variance": float(r.health.score_var[0]),
        "share_of_keys": float(r.health.effective_keys[0]) / keys,
        "saturated": float(r.health.saturated[0]),
        "signal": float(r.health.signal[0]),
        "survival": float(back.health.survival[0]),
    }


def _moved(seed: int, keys: int) -> dict[str, float]:
    """The share of the weight that moves if all scores are raised, and if all are multiplied."""
    query, key = queries_and_keys(seed, 1, keys, MIDDLE)
    root = MIDDLE**-0.5
    before = _weights(query, key, root)
    raised = _weights(query, key, root, mask=np.full((keys, keys), SHIFT, np.float32))
    multiplied = _weights(query, key, FACTOR * root)
    return {
        name: float(np.abs(after - before).sum(axis=-1).mean()) / 2
        for name, after in (("shift_moved", raised), ("factor_moved", multiplied))
    }


def _training(sizes: dict[str, Any], seed: int) -> Figures:
    """The same models with 1/√d_k and 1/d_k: where they end, and how the widest get there."""
    steps, every = sizes["steps"], sizes["every"]
    budget = Budget(steps, BATCH, every=every)

    @cache
    def run(rule: str, d_k: int, rate: float) -> Trained:
        return train(budget, seed, rule=rule, d_k=d_k, rate=rate, depth=DEPTH, width=WIDTH)

    grid = []
    for rule in RULES[1:]:
        for d_k in sizes["d_k"]:
            for rate in sizes["rates"]:
                one = run(rule, d_k, rate)
                learned = np.flatnonzero(one.answers < GUESSING / 2)
                row = {"scale": rule, "d_k": d_k, "rate": rate, "answers": one.unseen}
                grid.append(row | {"learned_at": float(learned[0] if learned.size else steps)})
    curves = [
        {"scale": rule, "rate": rate, "step": step, "answers": float(mean)}
        for rule in RULES[1:]
        for rate in sizes["rates"]
        for one in [run(rule, sizes["d_k"][-1], rate)]
        for step in range(every, steps + 1, every)
        for mean in [one.answers[step - every : step].mean()]
    ]
    return {"training": table(grid), "curves": table(curves)}


def _best(training: dict[str, Array], rule: str, d_k: float) -> Array:
    """The loss on answers by seed, at the learning rate that is best for the scale."""
    cells = training["answers"][:, (training["scale"][0] == rule) & (training["d_k"][0] == d_k)]
    best: Array = cells[:, cells.mean(axis=0).argmin()]
    return best


def _lags(training: dict[str, Array]) -> dict[int, float]:
    """How much higher the loss with 1/d_k is, by d_k; each scale at its best rate."""
    return {
        int(d_k): float((_best(training, "dk", d_k) - _best(training, "sqrt_dk", d_k)).mean())
        for d_k in np.unique(training["d_k"][0])
    }


def _slopes(words: dict[str, Array]) -> tuple[Spread, Spread]:
    """The exponents of words and d_k in the variance, by least squares of the logarithms."""
    count, d_k = np.log(words["words"][0]), np.log(words["d_k"][0])
    columns = np.stack([count, d_k, np.ones_like(count)], axis=1)
    found = np.linalg.lstsq(columns, np.log(words["variance"]).T, rcond=None)[0]
    return Spread(found[0]), Spread(found[1])


def _growth(words: dict[str, Array], fixed: str) -> Spread:
    """The variance at the end of the other scale over that at its beginning."""
    variance = words["variance"][:, words[fixed][0] == MIDDLE]
    return Spread(variance[:, -1] / variance[:, 0])


def _learned(training: dict[str, Array], curves: dict[str, Array]) -> dict[str, Any]:
    """What the text quotes of the training."""
    half = int(curves["step"].max()) // 2
    rates, widest = np.unique(training["rate"][0]), int(training["d_k"].max())
    slow = {"d_k": widest, "rate": rates[0]}
    return {
        **{"widest_trained": widest, "slowest": rates[0], "guessing": GUESSING},
        "rates": ", ".join(f"{rate:g}" for rate in rates),
        "loss_dk": Spread(_best(training, "dk", widest)),
        "loss_root": Spread(_best(training, "sqrt_dk", widest)),
        "lags": _words_of(_lags(training)),
        "slow_dk": at(training, "answers", scale="dk", **slow),
        "slow_root": at(training, "answers", scale="sqrt_dk", **slow),
        "half_dk": at(curves, "answers", scale="dk", rate=rates[0], step=half),
        "half_root": at(curves, "answers", scale="sqrt_dk", rate=rates[0], step=half),
        "half": half,
    }


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    words, shapes, softmax = figures["words"], figures["shapes"], figures["softmax"]
    fewest, most, widest = CROSSED[0], CROSSED[-1], D_K[-1]

    def soft(column: str, rule: str, d_k: int = widest) -> Spread:
        return at(softmax, column, scale=rule, d_k=d_k)

    square = [f"{count:.0f}×{count:.0f}" for count in shapes["words"][0]]
    slope_words, slope_d_k = _slopes(words)
    return {
        **{"fewest": fewest, "most": most, "middle": MIDDLE, "widest": widest},
        **{name: int(figures[name][0]) for name in ("keys", "steps")},
        **{"shift": SHIFT, "factor": FACTOR},
        **{"by_words": _growth(words, "d_k"), "by_d_k": _growth(words, "words")},
        **{"slope_words": slope_words, "slope_d_k": slope_d_k},
        "few_words": at(words, "divided_by_words", words=fewest, d_k=MIDDLE),
        "many_words": at(words, "divided_by_words", words=most, d_k=MIDDLE),
        **{"same": int((shapes["matrix"] == square).sum()), "shapes": shapes["matrix"].size},
        **{
            f"top_{short}": at(shapes, "top_weight", words=most, scale=rule)
            for short, rule in (("none", "none"), ("root", "sqrt_dk"), ("dk", "dk"))
        },
        "sum_error": softmax["sum_error"][:, softmax["scale"][0] == "none"].max(),
        "saturated": soft("saturated", "none"),
        **{"signal_none": soft("signal", "none"), "signal_root": soft("signal", "sqrt_dk")},
        "signal_small_none": soft("signal", "none", fewest),
        "signal_small_root": soft("signal", "sqrt_dk", fewest),
        **{name: Spread(figures[name]) for name in ("shift_moved", "factor_moved")},
        "variance_dk": soft("variance", "dk"),
        **{"share_dk": soft("share_of_keys", "dk"), "share_root": soft("share_of_keys", "sqrt_dk")},
        **_learned(figures["training"], figures["curves"]),
    }


def _words_of(lags: dict[int, float]) -> str:
    parts = (
        f"{abs(lag):.2f} {'higher' if lag > 0 else 'lower'} at d_k = {d_k}"
        for d_k, lag in lags.items()
    )
    return ", ".join(parts)


def _refuted(runs: Runs) -> dict[str, tuple[str, str]]:
    """Each confusion: whether it is refuted, in words, and the figure that says so."""
    found, lags = numbers(runs), _lags(stack(runs)["training"])
    flat = found["share_dk"] > FLAT and found["share_root"] < SELECTIVE
    behind = all(lag > BEHIND for lag in lags.values())
    either = "only at the start" if flat else "only after training" if behind else "not at all"

    def words(refuted: bool) -> str:
        return "outright" if refuted else "not at all"

    return {
        "d_k is the number of words": (
            words(abs(found["slope_words"]) < NEAR and abs(found["slope_d_k"] - 1) < NEAR),
            f"the variance of q·k grows as words^{found['slope_words']:.2f} and as "
            f"d_k^{found['slope_d_k']:.2f}",
        ),
        "scaling changes the shape of the attention matrix": (
            words(found["same"] == found["shapes"]),
            f"{found['same']} of {found['shapes']} matrices are words×words",
        ),
        "softmax normalises anyway, so no scale is needed": (
            words(found["sum_error"] < 1e-3 and found["signal_none"] < found["signal_root"] / 2),
            f"unscaled rows sum to 1 within {found['sum_error']:.0e}, but at d_k = "
            f"{found['widest']} their signal is {found['signal_none']:.2f} instead of "
            f"{found['signal_root']:.2f}",
        ),
        "dividing by d_k would do as well": (
            "outright" if flat and behind else either,
            f"a row spreads over {found['share_dk']:.1%} of its keys at the start; after training "
            f"the loss on answers is {found['lags']}",
        ),
    }


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if the figures refute all four confusions; partly true if only some, or in part.

    Words: the variance must grow with d_k and not with the number of words. Shape: every matrix
    must be words×words. Softmax: rows that sum to 1 must still lose half of their signal. Last,
    1/d_k must leave attention flat at the start, and be behind after training, too.
    """
    found, loss = _refuted(runs), numbers(runs)
    outright = sum(how == "outright" for how, _ in found.values())
    others = [
        f"“{said}” is refuted {how}. " for said, (how, _) in found.items() if how != "outright"
    ]
    details = "; ".join(f"“{said}”: {figure}" for said, (_, figure) in found.items())
    why = (
        f"{outright} of 4 are refuted outright; with 1/d_k the loss after training is "
        f"{loss['loss_dk']:.2f}, with 1/√d_k {loss['loss_root']:.2f}. {''.join(others)}{details}."
    )
    if outright == len(found):
        return "holds", why
    none = all(how == "not at all" for how, _ in found.values())
    return ("does not hold" if none else "holds partly"), why


def plot(runs: Runs) -> list[Spec]:
    """One picture, or two, for each confusion."""
    figures = stack(runs)
    return [
        _picture_of_words(figures["words"]),
        _picture_of_shapes(figures["pattern"]),
        *_pictures_of_softmax(figures["softmax"]),
        _picture_of_training(figures["curves"], int(figures["training"]["d_k"].max())),
    ]


def _picture_of_words(words: dict[str, Array]) -> Spec:
    lines = [guide(f"{MIDDLE}", CROSSED, MIDDLE)]
    for name, fixed, colour in (("words", "d_k", ORANGE), ("d_k", "words", GREEN)):
        chosen = words[fixed][0] == MIDDLE
        label = f"by {name}, {fixed} = {MIDDLE}"
        lines += band(label, CROSSED, words["variance"][:, chosen], colour)
    return picture(
        "“d_k is the number of words”: variance of q·k",
        lines,
        axis("words, or d_k", log=True, ticks=CROSSED),
        axis("variance", log=True),
    )


def _picture_of_shapes(pattern: dict[str, Array]) -> Spec:
    """The first seed's matrices side by side, with a gap between them."""
    count = int(pattern["query"].max()) + 1
    blocks = pattern["weight"][0].reshape(len(RULES), count, count)
    gap = np.full((count, 1), None)
    cells = np.concatenate([part for block in blocks for part in (block.round(4), gap)], axis=1)
    heat: Spec = {
        **{"type": "heatmap", "z": cells[:, :-1].tolist(), "colorscale": "heat"},
        **{"zmin": 0, "zmax": 1, "xgap": 1, "ygap": 1, "hoverongaps": False},
        "hovertemplate": "weight %{z:.3f}<extra></extra>",
    }
    middles = [index * (count + 1) + (count - 1) / 2 for index in range(len(RULES))]
    names = [f"{NAMES[rule]}: {count}×{count}" for rule in RULES]
    return picture(
        f"“Scaling changes the shape”: the weights of {count} words",
        [heat],
        axis("key", tickvals=middles, ticktext=names),
        axis("query", autorange="reversed", showticklabels=False),
        height=260,
    )


def _pictures_of_softmax(softmax: dict[str, Array]) -> list[Spec]:
    rules, signal, share = softmax["scale"][0], [guide("sum of a row's weights", D_K, 1.0)], []
    for rule in RULES[:2]:
        chosen = rules == rule
        signal += band(f"signal, {NAMES[rule]}", D_K, softmax["signal"][:, chosen], COLOURS[rule])
    for rule in RULES[1:]:
        values = softmax["share_of_keys"][:, rules == rule]
        share += band(NAMES[rule], D_K, values, COLOURS[rule])
    d_k = axis("d_k", log=True, ticks=D_K)
    return [
        picture(
            "“Softmax normalises anyway”: what it lets through",
            signal,
            d_k,
            axis("1 − Σp²", rangemode="tozero"),
        ),
        picture(
            "“Dividing by d_k would do as well”: at the start",
            share,
            d_k,
            axis("share of the keys attended to", tickformat=".0%", rangemode="tozero"),
        ),
    ]


def _picture_of_training(curves: dict[str, Array], d_k: int) -> Spec:
    """How the widest models learn; a line's dash is its learning rate."""
    steps, rates = np.unique(curves["step"][0]), np.unique(curves["rate"][0])
    lines = [guide("guessing", steps, GUESSING)]
    for rule in RULES[1:]:
        for rate, dash in zip(rates, ("dot", "dash", "solid")[-len(rates) :], strict=True):
            chosen = (curves["scale"][0] == rule) & (curves["rate"][0] == rate)
            mean = curves["answers"][:, chosen]
            style: Spec = {"mode": "lines", "line": {"dash": dash}}
            lines += band(f"{NAMES[rule]}, rate {rate:g}", steps, mean, COLOURS[rule], **style)
    return picture(
        f"“Dividing by d_k would do as well”: in training (d_k = {d_k})",
        lines,
        axis("step"),
        axis("loss on answers", rangemode="tozero"),
    )
