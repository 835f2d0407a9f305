"""The results as text: tables that read well in a terminal and are Markdown as they stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from benchmarks.backward import BackwardResult
from benchmarks.bars import Bar, Results, bars
from benchmarks.forward import ForwardResult
from benchmarks.machine import Limits
from benchmarks.peers import Missing, Peer


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """An aligned Markdown table; columns of numbers to the right."""
    body = list(rows)
    columns = list(zip(header, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1] in "0123456789+-" for cell in column[1:]) for column in columns]

    def join(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def pad(cells: list[str]) -> str:
        return join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )

    rule = (
        "-" * (width - 1) + (":" if to_right else "-")
        for width, to_right in zip(widths, right, strict=True)
    )
    return "\n".join([pad(header), join(rule), *map(pad, body)])


def time_text(seconds: float) -> str:
    """Milliseconds with three figures that mean something."""
    ms = seconds * 1e3
    return f"{ms:.4f}" if ms < 0.1 else f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def forward_table(results: list[ForwardResult]) -> str:
    header = ["case", "batch×heads×L×S×D", "ms", "best peer", "its ms", "ratio"]
    header += ["health", "ratio with health", "rate", "of limit"]
    rows = []
    for r in results:
        best = (r.best.peer, time_text(r.best.seconds)) if r.best else ("none", "")
        rows.append(
            [
                r.case.name,
                r.case.shape_text,
                time_text(r.seconds),
                *best,
                f"{r.ratio:.2f}×",
                f"{100 * r.health_overhead:+.1f} %",
                f"{r.health_ratio:.2f}×",
                f"{r.rate:.1f} {r.limit.unit}",
                f"{100 * r.share:.0f} %",
            ]
        )
    return table(header, rows)


def peers_table(results: list[ForwardResult]) -> str:
    """Every peer's best time of every case, and which way of calling it was the fastest."""
    names = sorted({t.peer for r in results for t in r.peers})
    rows = []
    for r in results:
        row = [r.case.name, time_text(r.seconds)]
        for name in names:
            best = next((t for t in r.peers if t.peer == name), None)
            row.append(f"{time_text(best.seconds)} ({best.variant})" if best else "cannot")
        rows.append(row)
    return table(["case, in ms", "levelhead", *names], rows)


def backward_table(results: list[BackwardResult], limits: Limits) -> str:
    header = ["case", "batch×heads×L×S×D", "ms", "PyTorch ms", "ratio", "rate", "of limit"]
    rows = [
        [
            r.case.name,
            r.case.shape_text,
            time_text(r.seconds),
            time_text(r.torch_seconds),
            f"{r.ratio:.2f}×",
            f"{r.gflops:.1f} GFLOP/s",
            f"{100 * r.gflops / limits.arithmetic.best:.0f} %",
        ]
        for r in results
    ]
    return table(header, rows)


def bars_table(found: list[Bar]) -> str:
    rows = []
    for bar in found:
        sign = "≥" if bar.at_least else "≤"
        verdict = "pass" if bar.passed else "FAIL"
        if bar.passed and bar.aim is not None and bar.aim_met:
            verdict = "pass, aim met"
        aim = "" if not bar.aim else f"{sign} {value_text(bar.aim, bar.unit)}"
        rows.append(
            [
                bar.what,
                value_text(bar.value, bar.unit),
                f"{sign} {value_text(bar.must, bar.unit)}",
                aim,
                verdict,
                bar.detail,
            ]
        )
    return table(["bar", "measured", "must", "aim", "verdict", "where"], rows)


def value_text(value: float, unit: str) -> str:
    return f"{value:.2f}×" if unit == "x" else f"{value:.1f} {unit}"


def peers_line(peers: list[Peer], missing: list[Missing]) -> str:
    line = "Peers: " + ", ".join(f"{p.name} {p.version}" for p in peers) + "."
    for absent in missing:
        line += f"\nMISSING: {absent.name} ({absent.reason}); the best peer is without it."
    return line


def sections(results: Results) -> list[tuple[str, str]]:
    """(title, body) of all that ran."""
    found: list[tuple[str, str]] = []
    if results.forward:
        found.append(("Forward", forward_table(results.forward)))
        found.append(("Forward, every peer", peers_table(results.forward)))
    if results.backward:
        found.append(("Forward and backward", backward_table(results.backward, results.limits)))
    if results.tiny:
        tiny = results.tiny
        rows = [
            ["levelhead from NumPy", f"{tiny.seconds * 1e6:.2f}"],
            ["levelhead from NumPy with health", f"{tiny.health_seconds * 1e6:.2f}"],
            ["PyTorch, tensors ready", f"{tiny.torch_seconds * 1e6:.2f}"],
            ["PyTorch from NumPy and back", f"{tiny.torch_from_numpy_seconds * 1e6:.2f}"],
        ]
        found.append(("One head, 3×3, D = 64", table(["call", "us"], rows)))
    if results.memory:
        rows = [[r.what, str(r.heads), f"{r.extra_mb:.1f}"] for r in results.memory]
        header = ["pass, L = S = 16384, D = 64", "heads", "MB beyond inputs and results"]
        found.append(("Memory", table(header, rows)))
    judged = bars(results)
    if judged:
        found.append(("Bars", bars_table(judged)))
    return found


def mismatches(results: Results) -> list[str]:
    ran: list[ForwardResult | BackwardResult] = [*results.forward, *results.backward]
    return [f"{r.case.name}: {text}" for r in ran for text in r.mismatches]


def notes(results: Results) -> list[str]:
    """What a peer cannot do, once each."""
    seen: dict[str, list[str]] = {}
    for r in results.forward:
        for text in r.unable:
            seen.setdefault(text, []).append(r.case.name)
    return [f"{text} ({', '.join(names)})" for text, names in seen.items()]


def as_json(
    results: Results, peers: list[Peer], missing: list[Missing], cpu: str
) -> dict[str, Any]:
    return {
        "cpu": cpu,
        "limits": [asdict(results.limits.arithmetic), asdict(results.limits.reading)],
        "peers": {p.name: p.version for p in peers},
        "missing": [asdict(m) for m in missing],
        "forward": [
            asdict(r)
            | {
                "ratio": r.ratio,
                "health_ratio": r.health_ratio,
                "health_overhead": r.health_overhead,
                "share_of_limit": r.share,
            }
            for r in results.forward
        ],
        "backward": [asdict(r) | {"ratio": r.ratio, "gflops": r.gflops} for r in results.backward],
        "tiny": asdict(results.tiny) if results.tiny else None,
        "memory": [asdict(r) for r in results.memory],
        "bars": [asdict(b) | {"passed": b.passed, "aim_met": b.aim_met} for b in bars(results)],
        "mismatches": mismatches(results),
    }
