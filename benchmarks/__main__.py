"""python -m benchmarks: race, print, judge."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.backward import BackwardResult, run_backward
from benchmarks.bars import Results, bars
from benchmarks.cases import MORE, SUITE, Case
from benchmarks.forward import ForwardResult, run_forward
from benchmarks.machine import cores, cpu_name
from benchmarks.memory import BARS_MB, HEADS, run_memory
from benchmarks.peers import Peer, load_peers
from benchmarks.tiny import run_tiny

SECTIONS = ("forward", "backward", "tiny", "memory")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Levelhead against the other CPU attentions."
    )
    parser.add_argument("--quick", action="store_true", help="a third of the time, more noise")
    parser.add_argument("--seconds", type=float, default=6.0, help="budget per race (default 6)")
    parser.add_argument(
        "--sweeps", type=int, default=2, help="times the suite is gone through (default 2)"
    )
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--only", choices=SECTIONS, help="only this section")
    parser.add_argument("--more", action="store_true", help="also shapes outside the suite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is not reached")
    options = parser.parse_args(arguments)
    if options.seconds <= 0:
        parser.error(f"--seconds must be positive, got {options.seconds}")
    if options.sweeps < 1:
        parser.error(f"--sweeps must be at least 1, got {options.sweeps}")
    return options


class Progress:
    """What runs now and how many remain, on stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = time.perf_counter()

    def step(self, what: str) -> None:
        self._done += 1
        seconds = time.perf_counter() - self._start
        print(f"[{self._done}/{self._total}, {seconds:.0f} s] {what}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, peers: list[Peer]) -> Results:
    wanted = {options.only} if options.only else set(SECTIONS)
    cases: list[Case] = [
        c for c in (*SUITE, *(MORE if options.more else ())) if options.case in c.name
    ]
    with_torch = any(p.name == "PyTorch" for p in peers)
    forward = cases if "forward" in wanted else []
    backward = [c for c in cases if c.train] if "backward" in wanted and with_torch else []
    tiny = "tiny" in wanted and with_torch and options.case in "tiny"
    memory = [(w, h) for w in BARS_MB for h in HEADS] if "memory" in wanted else []
    if options.case and options.only != "memory":
        memory = []
    seconds = (options.seconds / 3 if options.quick else options.seconds) / options.sweeps
    races = options.sweeps * (len(forward) + len(backward))
    progress = Progress(races + tiny + len(memory) + 1)
    results = Results(outside={c.name for c in MORE})

    progress.step("the machine's limits")
    results.limits.measure()
    ahead: dict[Case, ForwardResult] = {}
    both: dict[Case, BackwardResult] = {}
    for _ in range(options.sweeps):  # minutes apart, so that no busy spell decides a race
        for case in forward:
            progress.step(f"forward {case.name} {case.shape_text}")
            result = run_forward(case, peers, seconds, results.limits.binding(case))
            ahead.setdefault(case, result).join(result)
            results.limits.join(result.limit)
        for case in backward:
            progress.step(f"forward and backward {case.name} {case.shape_text}")
            trained = run_backward(case, seconds)
            both.setdefault(case, trained).join(trained)
    results.forward, results.backward = list(ahead.values()), list(both.values())
    if tiny:
        progress.step("one tiny call")
        results.tiny = run_tiny(seconds * options.sweeps)
    for what, heads in memory:
        progress.step(f"memory of {what}, heads: {heads}")
        results.memory.append(run_memory(what, heads))
    return results


def heading(results: Results, peers_line: str) -> str:
    limits = results.limits
    return (
        f"{cpu_name()}, {cores()} cores: {limits.arithmetic.best:.0f} GFLOP/s FMA peak (float32), "
        f"{limits.reading.best:.1f} GB/s read.\n{peers_line}"
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    peers, missing = load_peers()
    results = run(options, peers)
    top = heading(results, report.peers_line(peers, missing))
    sections = report.sections(results)
    print(top)
    for title, body in sections:
        print(f"\n## {title}\n\n{body}")
    for note in report.notes(results):
        print(f"\nNot raced: {note}")
    wrong = report.mismatches(results)
    for text in wrong:
        print(f"\nMISMATCH, not raced: {text}")
    if options.json:
        data = report.as_json(results, peers, missing, cpu_name())
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        body = "".join(f"\n### {title}\n\n{text}\n" for title, text in sections)
        options.markdown.write_text(f"{top}\n{body}", encoding="utf-8")
    failed = [b for b in bars(results) if not b.passed]
    if wrong or (options.check and failed):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
