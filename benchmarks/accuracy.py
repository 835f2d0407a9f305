"""python -m benchmarks.accuracy: the errors that docs/numerics.md states, measured here.

Three computations a case: the truth (one precision up), the yardstick (plain NumPy in the same
precision) and the engine. tests/test_numerics.py asserts the bounds; this prints the numbers.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import levelhead as lh
from levelhead import _engine

CASES = {  # (heads, L, S, D) and the standard deviation of the scores
    "decode": ((4, 1, 4096, 64), 1.0),
    "prefill": ((4, 256, 512, 64), 1.0),
    "prefill, large scores": ((4, 256, 512, 64), 30.0),
    "wide heads": ((2, 128, 512, 128), 1.0),
}
DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def plain(q: Any, k: Any, v: Any, scale: float, work: Any) -> Any:
    """The textbook, every step in the precision `work`."""
    q, k, v = (x.astype(work) for x in (q, k, v))
    scores = (q @ k.swapaxes(-1, -2)) * work(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ v


def output_errors() -> list[str]:
    rows = ["| dtype | case | plain NumPy | Levelhead | ratio |", "|---|---|---|---|---|"]
    for name, dtype in DTYPES.items():
        work, exact = (np.float64, np.longdouble) if name == "float64" else (np.float32, np.float64)
        for case, ((heads, length, size, d), spread) in CASES.items():
            rng = np.random.default_rng(0)
            q = rng.standard_normal((heads, length, d)).astype(dtype)
            k, v = rng.standard_normal((2, heads, size, d)).astype(dtype)
            scale = spread / np.sqrt(d)
            truth = plain(q, k, v, scale, exact)
            results = (
                plain(q, k, v, scale, work).astype(dtype),
                lh.attention(q, k, v, scale=scale),
            )
            theirs, ours = (float(np.abs(r.astype(exact) - truth).max()) for r in results)
            rows.append(f"| {name} | {case} | {theirs:.1e} | {ours:.1e} | {ours / theirs:.2f} |")
    return rows


def exp2_errors() -> list[str]:
    rows = ["| dtype | worst error of 2^x |", "|---|---|"]
    for dtype, lowest, exact in (
        (np.float32, -126, np.float64),
        (np.float64, -1022, np.longdouble),
    ):
        x = np.concatenate(
            [np.linspace(lowest, 0, 2_000_001), -np.logspace(-30, 0, 200_001, base=2)]
        ).astype(dtype)
        x = x[x >= lowest]
        y = np.empty_like(x)
        _engine.exp2(x, y)
        truth = np.exp2(x.astype(exact))
        digits = np.finfo(dtype).nmant + 1
        ulp = np.ldexp(exact(1), np.frexp(truth)[1] - digits)
        error = float((np.abs(y.astype(exact) - truth) / ulp).max())
        rows.append(f"| {np.dtype(dtype).name} | {error:.2f} ulp |")
    return rows


def gradients(g: Any, q: Any, k: Any, v: Any, scale: float, work: Any) -> tuple[Any, ...]:
    """Weights, dq, dk and dv by the textbook, every step in the precision `work`."""
    g, q, k, v = (x.astype(work) for x in (g, q, k, v))
    scores = (q @ k.swapaxes(-1, -2)) * work(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dweights = g @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))
    dq, dk = dscores @ k * work(scale), dscores.swapaxes(-1, -2) @ q * work(scale)
    return weights, dq, dk, weights.swapaxes(-1, -2) @ g


def ours(g: Any, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, ...]:
    r = lh.attention(q, k, v, scale=scale, return_lse=True, return_weights=True)
    return r.weights, *lh.attention_backward(g, q, k, v, r.output, r.lse, scale=scale)[:3]


def large_scores() -> list[str]:
    """Float32, the worst of a dozen draws: plain NumPy's error, then ours."""
    rows = [
        "| largest score | sums of weights | weights | dq | dk | dv |",
        "|---|---|---|---|---|---|",
    ]
    for largest in (1.0, 10.0, 100.0, 1e4, 1e6):
        errors, sums = [], 0.0
        for seed in range(12):
            rng = np.random.default_rng(seed)
            g, q = rng.standard_normal((2, 2, 70, 16), np.float32)
            k, v = rng.standard_normal((2, 2, 300, 16), np.float32)
            scale = float(largest / np.abs(q @ k.swapaxes(-1, -2)).max())
            truth = gradients(g, q, k, v, scale, np.float64)
            results = gradients(g, q, k, v, scale, np.float32), ours(g, q, k, v, scale)
            errors.append([[np.abs(x - y).max() for x, y in zip(r, truth, strict=True)]
                           for r in results])  # fmt: skip
            sums = max(sums, np.abs(results[1][0].sum(-1, dtype=np.float64) - 1).max())
        cells = [f"{a:.0e}, {b:.0e}" for a, b in zip(*np.max(errors, axis=0), strict=True)]
        rows.append(f"| {largest:,.0f} | 1 ± {sums:.0e} | {' | '.join(cells)} |")
    return rows


def long_sums() -> list[str]:
    """Float32, 16 queries: relative error of plain NumPy and ours, by the number of keys."""
    rows = ["| keys | values | output | dq | dk | dv |", "|---|---|---|---|---|---|"]
    for size in (4096, 16_384, 65_536):
        for kind in ("uniform", "constant", "0.1, equal weights"):
            rng = np.random.default_rng(size)
            g, q = rng.standard_normal((2, 1, 16, 16), np.float32)
            k, v = rng.standard_normal((1, size, 16), np.float32), rng.random((1, size, 16))
            if kind == "constant":
                v = np.broadcast_to(v[:, :1], v.shape)
            elif kind != "uniform":
                q[:], v = 0, np.full(v.shape, 0.1)
            v = v.astype(np.float32)
            outputs = plain(q, k, v, 0.25, np.float32), lh.attention(q, k, v)
            truth = plain(q, k, v, 0.25, np.float64)
            cells = [", ".join(f"{np.abs(x - truth).max() / truth.max():.0e}" for x in outputs)]
            exact = gradients(g, q, k, v, 0.25, np.float64)[1:]
            results = gradients(g, q, k, v, 0.25, np.float32)[1:], ours(g, q, k, v, 0.25)[1:]
            zeros = 0 if kind == "uniform" else 2  # with constant values dq and dk are 0
            cells += [""] * zeros
            for x, y, z in list(zip(*results, exact, strict=True))[zeros:]:
                cells.append(
                    ", ".join(f"{np.abs(r - z).max() / np.abs(z).max():.0e}" for r in (x, y))
                )
            rows.append(f"| {size:,} | {kind} | {' | '.join(cells)} |")
    return rows


def saturated_signal() -> list[str]:
    """1 - Σp² of a row whose largest score lies so far above 29 others."""
    rows = ["| gap | truth | Levelhead | 1 - Σp² in float32 |", "|---|---|---|---|"]
    for gap in (5.0, 10.0, 20.0, 40.0):
        q, k = np.ones((1, 1), np.float32), np.zeros((30, 1), np.float32)
        k[7] = gap
        p = np.exp(k[:, 0] - np.float32(gap))
        p /= p.sum()
        textbook = np.float32(1) - (p * p).sum()
        ours, truth = (
            call(q, k, k, scale=1.0, return_health=True).health.signal[0]
            for call in (lh.attention, lh.reference)
        )
        rows.append(f"| {gap:g} | {truth:.4e} | {ours:.4e} | {textbook:.4e} |")
    return rows


def main() -> None:
    info = lh.cpu_info()
    print(f"build: {info['isa']}, {info['vector_bits']}-bit vectors")
    for title, rows in (
        ("Largest absolute error of the output", output_errors()),
        ("The exponential", exp2_errors()),
        ("Weights and gradients of large scores (plain NumPy, Levelhead)", large_scores()),
        ("Long sums (plain NumPy, Levelhead)", long_sums()),
        ("The signal of a saturated row", saturated_signal()),
    ):
        print(f"\n{title}\n")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
