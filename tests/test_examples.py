"""The examples run as they are shown."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=100, check=True
    )
    assert not done.stderr
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
