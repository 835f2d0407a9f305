"""Claim 14: initialisation gives zero mean and unit variance, so claim 2 applies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import Health, attention
from .._demo import demo
from .._experiment import Runs
from .._figures import Array, Figures, Spread, at, stack, table
from .._inputs import health
from .._plot import BLUE, GREY, ORANGE, Spec, axis, picture
from .._threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

CLAIM = 14
VERSION = 1
TITLE = "Initialisation gives zero mean and unit variance"
SAID = """
Queries and keys start with mean 0 and variance 1, because the weights are initialised that way; so
the variance of q·k is d_k, and dividing by √d_k is right.
"""
DONE = """
Words were projected to queries and keys ({d_model} wide, {heads} heads) with the initial weights
that PyTorch and published models really use, and the engine measured the variance of the scores.
Then every head of the demo model (all-MiniLM-L6-v2, {trained_heads} heads, d_k = {d_k}) was
measured on {texts} sentences, as trained and with new random weights.
"""
FOUND = """
After LayerNorm, square Xavier weights give entries of variance {xavier:.2f} and scaled scores of
variance {xavier_scores:.2f}. nn.MultiheadAttention, with Xavier over one matrix for q, k and v,
gives {packed:.2f} and {packed_scores:.2f}; nn.Linear's default (Kaiming with a = √5) {linear:.2f}
and {linear_scores:.2f}; Kaiming for ReLU {kaiming:.2f} and {kaiming_scores:.2f}; the 0.02 of BERT
and GPT-2 {small:.2f} and {small_scores:.3f}. Without LayerNorm, embeddings of 0.02 give scores of
variance {embedding_scores:.0e}. In the demo model with new random weights, the standard deviation
of the scaled scores is {fresh:.2f±} on average; trained, it is {trained:.2f±}, from
{trained_low:.2f} to {trained_high:.2f} depending on the head.
"""
LIMITS = """
Of {schemes} initialisations, {right} give unit variance within {tolerance:.0%}: {good}. (T5 leaves
out the 1/√d_k and puts it into W_q instead.) {small_starts} of the others start with scores that
are too small, so that attention starts flat. After training, the entries of heads have variances
from {low_entry:.2f} to {high_entry:.1f}, and for the typical head the variance of the scores is
off by a factor of {wrong:.1f} from what independent entries would give: the assumption no longer
holds. Even so, {calm:.0%} of the trained heads have a standard deviation between 0.5 and 2. The
model has found a scale of its own.
"""
KEY = {
    "initialisations of variance 1": "{right} of {schemes}",
    "variance of scaled scores, square Xavier": "{xavier_scores:.2f±}",
    "variance of scaled scores, nn.MultiheadAttention": "{packed_scores:.2f±}",
    "variance of scaled scores, Kaiming for ReLU": "{kaiming_scores:.2f±}",
    "standard deviation in trained heads": "{trained_low:.2f} to {trained_high:.2f}",
}
NEEDS = ("demo",)
SHOW = ("schemes",)
SEEDS = {"full": 5}
SECONDS = {"tiny": 0.6, "quick": 0.8, "full": 2.5}

D_MODEL, HEADS = 512, 8
D_K = D_MODEL // HEADS
LENGTH = {"tiny": 96, "quick": 256, "full": 512}
TOLERANCE = 0.1


def measure(size: str, seed: int) -> Figures:
    """What initialisations give, and what a model has before and after training."""
    rows = []
    for words, weights, scale, query, key in _initialised(seed, LENGTH[size]):
        found = health(query, key, scale)
        rows.append(
            {
                **{"words": words, "weights": weights},
                "mean": float(query.mean()),
                "variance_q": float(query.var()),
                "variance_k": float(key.var()),
                "score_variance": float(found.score_var[0]),
                "top_weight": float(found.top_weight[0]),
            }
        )
    heads, sizes = _demo(seed)
    return {"schemes": table(rows), "heads": table(heads), **sizes}


def _initialised(seed: int, length: int) -> Iterator[tuple[str, str, float, Array, Array]]:
    """Name of the words, of the weights, the scale, queries and keys of all heads."""
    import torch  # noqa: PLC0415 - an extra
    from torch import nn  # noqa: PLC0415

    with one_thread(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drawn = torch.randn(length, D_MODEL)
        words = {
            "LayerNorm": nn.functional.layer_norm(3 * drawn + 1, (D_MODEL,)),
            "unit embedding": nn.Embedding(length, D_MODEL).weight,
            "0.02 embedding": 0.02 * torch.randn(length, D_MODEL),
        }

        def square(fill: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
            return fill(torch.empty(D_MODEL, D_MODEL)), fill(torch.empty(D_MODEL, D_MODEL))

        def packed() -> tuple[Tensor, Tensor]:
            w_query, w_key, _ = nn.MultiheadAttention(D_MODEL, HEADS).in_proj_weight.chunk(3)
            return w_query, w_key

        def t5() -> tuple[Tensor, Tensor]:
            w_query, w_key = square(lambda w: w.normal_(0, D_MODEL**-0.5))
            return w_query * D_K**-0.5, w_key

        xavier = square(nn.init.xavier_uniform_)
        linear = nn.Linear(D_MODEL, D_MODEL).weight, nn.Linear(D_MODEL, D_MODEL).weight
        root = D_K**-0.5
        schemes = [
            ("LayerNorm", "square Xavier", root, xavier),
            ("LayerNorm", "nn.MultiheadAttention", root, packed()),
            ("LayerNorm", "nn.Linear", root, linear),
            ("LayerNorm", "Kaiming for ReLU", root, square(_kaiming)),
            ("LayerNorm", "normal 0.02", root, square(lambda w: w.normal_(0, 0.02))),
            ("LayerNorm", "T5 without scale", 1.0, t5()),
            ("unit embedding", "square Xavier", root, xavier),
            ("0.02 embedding", "square Xavier", root, xavier),
        ]
        for name, weights, scale, matrices in schemes:
            query, key = (_split(words[name] @ w.T, HEADS) for w in matrices)
            yield name, weights, scale, query, key


def _kaiming(weight: Tensor) -> Tensor:
    from torch import nn  # noqa: PLC0415

    return nn.init.kaiming_normal_(weight, nonlinearity="relu")


def _split(projected: Tensor, heads: int) -> Array:
    """(length, heads·d_k) as NumPy's (heads, length, d_k)."""
    array: Array = projected.detach().numpy()
    return array.reshape(len(array), heads, -1).swapaxes(0, 1)


def _demo(seed: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Every head of the demo model, trained and drawn anew, over all sentences but one."""
    import torch  # noqa: PLC0415 - an extra

    subject = demo()
    model: Any = subject.model
    leave_out = seed % len(subject.inputs)
    texts = [dict(given.kwargs) for i, given in enumerate(subject.inputs) if i != leave_out]
    with one_thread(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        fresh = type(model)(model.config).eval()
        rows = [
            {"state": state, "layer": layer, "head": head} | found
            for state, one in (("trained", model), ("drawn anew", fresh))
            for layer, (queries, keys) in enumerate(_projections(one, texts))
            for head, found in enumerate(_heads(queries, keys))
        ]
    sizes = {"trained_heads": len(rows) // 2, "texts": len(texts)}
    return rows, sizes | {"d_k": model.config.hidden_size // model.config.num_attention_heads}


def _projections(model: Any, texts: list[dict[str, Any]]) -> list[tuple[list[Array], list[Array]]]:
    """Per layer the queries and the keys of every sentence, (heads, length, d_k) each."""
    layers = [layer.attention.self for layer in model.encoder.layer]
    heads = model.config.num_attention_heads
    kept: list[tuple[list[Array], list[Array]]] = [([], []) for _ in layers]

    def keep(into: list[Array]) -> Callable[..., None]:
        return lambda _module, _inputs, output: into.append(_split(output[0], heads))

    hooks = [
        module.register_forward_hook(keep(into))
        for layer, pair in zip(layers, kept, strict=True)
        for module, into in zip((layer.query, layer.key), pair, strict=True)
    ]
    for text in texts:
        model(**text)
    for hook in hooks:
        hook.remove()
    return kept


def _heads(queries: list[Array], keys: list[Array]) -> list[dict[str, float]]:
    """The statistics of each head of a layer over the sentences; scores only within one."""
    first, *rest = (
        attention(query, key, key, return_health=True).health
        for query, key in zip(queries, keys, strict=True)
    )
    merged: Health = first.merge(*rest)
    variance_q, variance_k = (np.concatenate(x, axis=1).var(axis=(1, 2)) for x in (queries, keys))
    columns = {
        **{"variance_q": variance_q, "variance_k": variance_k},
        **{"score_std": merged.score_var**0.5, "score_mean": merged.score_mean},
        **{"if_independent": (variance_q * variance_k) ** 0.5, "top_weight": merged.top_weight},
    }
    return [
        {name: float(values[head]) for name, values in columns.items()}
        for head in range(len(variance_q))
    ]


def _schemes(runs: Runs) -> tuple[list[str], list[bool]]:
    """Each scheme, and whether its scores have unit variance."""
    schemes = stack(runs)["schemes"]
    names = [f"{x}, {w}" for w, x in zip(schemes["weights"][0], schemes["words"][0], strict=True)]
    near = np.abs(schemes["score_variance"].mean(axis=0) - 1) <= 2 * TOLERANCE
    return names, near.tolist()


def numbers(runs: Runs) -> dict[str, Any]:
    """What the text quotes."""
    figures = stack(runs)
    schemes, heads = figures["schemes"], figures["heads"]
    trained = heads["state"][0] == "trained"
    std = heads["score_std"].mean(axis=0)
    predicted = heads["if_independent"].mean(axis=0)
    entries = np.concatenate([heads[f"variance_{x}"].mean(axis=0)[trained] for x in "qk"])
    off = np.abs(np.log((std / predicted)[trained] ** 2))
    calm = (std > 0.5) & (std < 2)
    names, right = _schemes(runs)
    others = schemes["score_variance"].mean(axis=0)[~np.array(right)]
    found: dict[str, Any] = {
        **{"d_model": D_MODEL, "heads": HEADS, "tolerance": 2 * TOLERANCE},
        **{name: int(figures[name][0]) for name in ("trained_heads", "texts", "d_k")},
        **{"schemes": len(names), "right": sum(right), "small_starts": int((others < 1).sum())},
        "good": "; ".join(name for name, near in zip(names, right, strict=True) if near) or "none",
        "others": f"; the others {others.min():.0e} to {others.max():.1f}" if others.size else "",
        "embedding_scores": at(schemes, "score_variance", words="0.02 embedding"),
        "fresh": Spread(heads["score_std"][:, ~trained].mean(axis=1)),
        "trained": Spread(heads["score_std"][:, trained].mean(axis=1)),
        **{"trained_low": std[trained].min(), "trained_high": std[trained].max()},
        **{"low_entry": entries.min(), "high_entry": entries.max()},
        **{"wrong": float(np.exp(np.median(off))), "calm": calm[trained].mean()},
    }
    shorts = {
        **{"xavier": "square Xavier", "packed": "nn.MultiheadAttention", "linear": "nn.Linear"},
        **{"kaiming": "Kaiming for ReLU", "small": "normal 0.02"},
    }
    for short, weights in shorts.items():
        where = {"words": "LayerNorm", "weights": weights}
        found[short] = at(schemes, "variance_q", **where)
        found[f"{short}_scores"] = at(schemes, "score_variance", **where)
    return found


def verdict(runs: Runs) -> tuple[str, str]:
    """Holds if every initialisation gives unit variance; partly true if some do."""
    found, (_, right) = numbers(runs), _schemes(runs)
    why = (
        f"{sum(right)} of {len(right)} initialisations give scaled scores of variance 1 within "
        f"{found['tolerance']:.0%}{found['others']}. Right: {found['good']}. Trained heads have "
        f"standard deviations from {found['trained_low']:.2f} to {found['trained_high']:.2f}."
    )
    return ("holds" if all(right) else "holds partly" if any(right) else "does not hold"), why


def plot(runs: Runs) -> list[Spec]:
    """The variance of the scores by scheme; the deviation of every head of the demo model."""
    figures = stack(runs)
    schemes, heads = figures["schemes"], figures["heads"]
    names = [
        weights if words == "LayerNorm" else f"{weights},<br>{words}"
        for weights, words in zip(schemes["weights"][0], schemes["words"][0], strict=True)
    ]
    variance = schemes["score_variance"].mean(axis=0)
    starts = {
        **{"type": "scatter", "mode": "markers", "y": names, "x": [float(v) for v in variance]},
        **{"marker": {"color": BLUE, "size": 10}, "showlegend": False},
        "hovertemplate": "%{x:.3g}<extra></extra>",
    }
    one = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1}
    dots = []
    for state, colour in (("drawn anew", GREY), ("trained", ORANGE)):
        mine = heads["state"][0] == state
        std = heads["score_std"].mean(axis=0)[mine]
        predicted = heads["if_independent"].mean(axis=0)[mine]
        label = [
            f"layer {layer:.0f}, head {head:.0f}"
            for layer, head in zip(heads["layer"][0][mine], heads["head"][0][mine], strict=True)
        ]
        dots.append(
            {
                **{"type": "scatter", "mode": "markers", "name": state, "text": label},
                **{"x": predicted.round(4).tolist(), "y": std.round(4).tolist()},
                "marker": {"color": colour, "size": 7, "opacity": 0.8},
                "hovertemplate": "%{text}: %{y:.2f}, independent %{x:.2f}<extra></extra>",
            }
        )
    ends = [0.1, 10.0]
    diagonal = {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "name": "independent"}
    dots.append({**diagonal, "line": {"color": GREY, "dash": "dot"}, "hoverinfo": "skip"})
    return [
        picture(
            "Variance of the scaled scores at the start",
            [starts],
            axis("variance", log=True),
            {"autorange": "reversed"},
            shapes=[one | {"line": {"color": GREY, "dash": "dot"}}],
        ),
        picture(
            "Heads of the demo model: spread of the scores",
            dots,
            axis("if entries were independent", log=True, ticks=(0.1, 1, 10)),
            axis("measured", log=True, ticks=(0.1, 1, 10)),
        ),
    ]
