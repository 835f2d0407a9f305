"""The examples run as they are shown."""

import re
import subprocess
import sys
from pathlib import Path

from levelhead.store import read_run

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments, launcher=()):
    command = [sys.executable, *launcher, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert launcher or not done.stderr  # torchrun says something of threads
    return done.stdout


def test_a_head_explodes_and_the_fix_keeps_it_healthy():
    assert len((EXAMPLES / "exploding_head.py").read_text().splitlines()) < 60
    ill, cured = run("exploding_head.py").split("qk_norm=True:")
    alerts = re.findall(r"^steps? (\d+)[^,]*, (.+)$", ill, re.MULTILINE)
    assert any("the largest |score| is" in reason for _, reason in alerts)
    assert int(alerts[0][0]) > 0  # it began in health
    assert re.search(r"layers\.\d  [!E-]{4}  head \d: exploding", ill)
    assert "What to do: tame the scores: QK-norm" in ill
    assert "What to do" not in cured and ", 0 alerts" in cured
    assert "At step 145: no problems found in 8 heads." in cured
    losses = [float(re.search(r"loss ([\d.]+)", part)[1]) for part in (ill, cured)]
    assert losses[1] < 0.8 * losses[0]


def test_two_processes_and_one_watch(tmp_path):
    assert len((EXAMPLES / "torchrun_watch.py").read_text().splitlines()) < 60
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    said = run("torchrun_watch.py", str(tmp_path / "run.db"), launcher=launcher)
    rows = 2 * 4 * 8 * 16  # processes, recorded steps, batch, length
    assert said.count("rows of 2 processes") == 1 and said.startswith(f"{rows} rows")
    assert "layers.1" in said and "module" not in said
    steps = read_run(tmp_path / "run.db").steps
    assert list(steps) == [0, 10, 20, 30]
