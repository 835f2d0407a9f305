"""What the page replays, measured with the lab's own trainer and with the demo model.

    python -m levelhead.explore.measure            # both; some minutes on one core
    python -m levelhead.explore.measure pronoun    # one of them

The results are in data/, so that `levelhead explore` needs neither PyTorch nor a model. Needs the
extra "demo".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..lab._corpus import GUESSING
from ..lab._demo import demo_reads
from ..lab._threads import one_thread
from ..lab._train import Budget, Trained, train
from ..lab.claims.pronoun import NOUNS, SENTENCE
from ..lab.claims.training import RULES, SIZES, USUAL

HERE = Path(__file__).parent / "data"
SEED = 0
D_K = (16, 64, 256)
ENDINGS = ("fast", "tired", "round")  # left open; the dog; the ball


def training() -> dict[str, Any]:
    """Claim 9's grid, of one seed: the loss on answers and every head, every 10 steps."""
    steps, every, rates = (SIZES["full"][name] for name in ("steps", "every", "rates"))
    usual = {name: value for name, value in USUAL.items() if name not in ("batch", "corpus")}
    runs = []
    for d_k in D_K:
        for rate in rates:
            for rule in RULES:
                budget = Budget(steps, USUAL["batch"], every=every)
                run = train(budget, SEED, **usual | {"d_k": d_k, "rate": rate, "rule": rule})
                runs.append({"d_k": d_k, "rate": rate, "rule": rule} | _course(run, every))
                print(f"{len(runs)}: d_k {d_k}, rate {rate:g}, {rule}", file=sys.stderr)
    return {
        **{"d_k": D_K, "rates": rates, "rules": RULES, "every": every, "steps": steps},
        **{"guessing": _short(GUESSING), "seed": SEED, "runs": runs},
    }


def _course(run: Trained, every: int) -> dict[str, Any]:
    """The loss as the mean of so many steps, and the heads at the first of these."""
    rows = list(run.heads())
    names = sorted({(row["layer"], row["head"]) for row in rows})

    def of_heads(statistic: str) -> list[Any]:
        return [
            _short([row[statistic] for row in rows if (row["layer"], row["head"]) == name])
            for name in names
        ]

    return {
        "answers": _short(run.answers.reshape(-1, every).mean(axis=1)),
        "unseen": _short(run.unseen),
        **{name: of_heads(name) for name in ("score_std", "saturated", "survival")},
    }


def pronoun() -> dict[str, Any]:
    """The scores q·k of "it" with every token, unscaled, in every head of the trained model."""
    import torch  # noqa: PLC0415 - an extra

    from ..torch import Call, listen  # noqa: PLC0415

    subject = demo_reads(tuple(SENTENCE.format(word) for word in ENDINGS))
    config: Any = subject.model.config
    sentences = []
    for word, given in zip(ENDINGS, subject.inputs, strict=True):
        assert given.tokens is not None
        tokens = list(given.tokens[0])
        row, layers = tokens.index("it"), list[Any]()

        def keep(call: Call, row: int = row, layers: list[Any] = layers) -> None:
            scores = np.stack([call.scores(0, head)[row] for head in range(call.shape[1])])
            layers.append(_short(scores / call.scale))

        with one_thread(), torch.no_grad(), listen(keep, subject.model):
            subject.model(**given.kwargs)
        sentences.append({"ending": word, "tokens": tokens, "scores": layers})
    return {
        **{"d_k": config.hidden_size // config.num_attention_heads, "d_model": config.hidden_size},
        **{"model": "all-MiniLM-L6-v2", "nouns": NOUNS, "sentences": sentences},
    }


def _short(values: Any) -> Any:
    """Numbers with three digits, as lists; what is not finite is null."""
    array = np.asarray(values, np.float64)
    if array.ndim:
        return [_short(value) for value in array]
    number = float(f"{array:.3g}")
    if not np.isfinite(number):
        return None
    return int(number) if number == int(number) else number


def main(*wanted: str) -> None:
    """Measure what is named, or everything, and put it into data/."""
    for measure in (pronoun, training):
        if not wanted or measure.__name__ in wanted:
            text = json.dumps(measure(), separators=(",", ":"), allow_nan=False)
            path = HERE / f"{measure.__name__}.json"
            path.write_text(text.replace('{"', '\n{"').lstrip() + "\n", encoding="utf-8")
            print(f"wrote {path.name}, {path.stat().st_size / 1000:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
