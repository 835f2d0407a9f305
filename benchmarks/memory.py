"""Section: memory beyond inputs and outputs, measured in a process of its own.

The child makes the inputs, makes one tiny call (threads started, code loaded), resets the peak
that the kernel keeps for it, and calls. What the peak then rose by, less the results' own size,
is what the call needed for itself.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LENGTH, DIM = 16384, 64
BARS_MB = {"forward": 64.0, "backward": 128.0}
HEADS = (1, 4)


@dataclass(frozen=True)
class MemoryResult:
    what: str  # "forward" (with health) or "backward"
    heads: int
    extra_mb: float

    @property
    def passed(self) -> bool:
        return self.extra_mb <= BARS_MB[self.what]


def run_memory(what: str, heads: int) -> MemoryResult:
    command = [sys.executable, "-m", "benchmarks.memory", what, str(heads)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the memory measurement of {what} failed:\n{done.stderr}")
    return MemoryResult(what, heads, json.loads(done.stdout)["extra_mb"])


def status_kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Let the peak start again from now; without the right to, it stays the process's own."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_kb() -> int:
    try:
        return status_kb("VmHWM")
    except (OSError, RuntimeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(what: str, heads: int) -> float:
    """Extra megabytes (10⁶ bytes) of one call at L = S = 16 384, D = 64."""
    import levelhead as lh

    rng = np.random.default_rng(0)
    shape = (1, heads, LENGTH, DIM)
    q, k, v, grad = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
    small = [a[:, :1, :8].copy() for a in (q, k, v, grad)]
    seed = lh.attention(*small[:3], return_lse=True, return_health=True)
    lh.attention_backward(small[3], *small[:3], seed.output, seed.lse)
    if what == "forward":
        reset_peak()
        before = status_kb("VmRSS")
        result = lh.attention(q, k, v, return_lse=True, return_health=True)
        results_bytes = result.output.nbytes + result.lse.nbytes
    else:
        forward = lh.attention(q, k, v, return_lse=True)
        reset_peak()
        before = status_kb("VmRSS")
        grads = lh.attention_backward(grad, q, k, v, forward.output, forward.lse)
        results_bytes = sum(g.nbytes for g in grads[:3])
    return ((peak_kb() - before) * 1024 - results_bytes) / 1e6


if __name__ == "__main__":
    print(json.dumps({"extra_mb": measure(sys.argv[1], int(sys.argv[2]))}))
