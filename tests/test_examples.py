"""The examples run as they are shown."""

import re
import subprocess
import sys
from pathlib import Path

from levelhead.store import read_run

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments, quiet=True):
    """What it prints. A trainer of others is never quiet."""
    assert len((EXAMPLES / name).read_text().splitlines()) < 60
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert not (quiet and done.stderr)
    return done.stdout


def test_a_head_explodes_and_the_fix_keeps_it_healthy():
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


def test_a_trainer_of_transformers_is_watched(tmp_path):
    out = run("trainer.py", tmp_path, quiet=False)
    found = read_run(tmp_path / "run.db")
    assert (found.name, found.model) == ("too fast", "GPT2LMHeadModel")
    assert found.steps == [*range(0, 120, 10)] == found.scalars["loss"][0].tolist()
    logged = re.findall(
        r"^(\d+) .*'loss': ([\d.]+), 'attention/largest_score': ([\d.]+)", out, re.M
    )
    assert [int(step) for step, *_ in logged] == [20, 40, 60, 80, 100, 120]
    assert float(logged[-1][2]) > 2 * float(logged[0][2])  # it should not train so fast
    assert any(alert.level == "warning" for alert in found.alerts)
    assert re.search(r"^24 attention calls, 2 layers, 8 heads$", out, re.M)


def test_a_module_of_lightning_is_watched(tmp_path):
    out = run("lightning_module.py", tmp_path, quiet=False)
    found = read_run(tmp_path / "run.db")
    assert (found.name, found.model) == ("find the largest", "FindLargest")
    assert found.steps == [*range(0, 128, 20)] == found.scalars["loss"][0].tolist()
    losses = found.scalars["loss"][1]
    assert losses[-1] < 0.5 * losses[0]
    assert out.splitlines()[0].startswith("attention/entropy_ratio_median,")
    assert "At step 120: no problems found in 4 heads." in out
