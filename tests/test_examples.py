"""The examples run as they are shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import levelhead
from levelhead.store import read_run

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments, quiet=True, launcher=()):
    """What it prints. Trainers and launchers of others are never quiet."""
    assert len((EXAMPLES / name).read_text().splitlines()) < 60
    command = [sys.executable, *launcher, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert not (quiet and done.stderr)
    return done.stdout


def test_a_head_explodes_and_the_fix_keeps_it_healthy():
    ill, cured = run("exploding_head.py").split("qk_norm=True:")
    alerts = re.findall(r"^steps? (\d+)[^,]*, (.+)$", ill, re.MULTILINE)
    assert any("the largest |score| is" in reason for _, reason in alerts)
    assert int(alerts[0][0]) > 0  # it began in health
    # In the end the scores do not grow any more, but the heads are stuck.
    assert re.search(r"layers\.\d  !{4}  head \d: saturated", ill)
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


def test_two_processes_and_one_watch(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    said = run("torchrun_watch.py", str(tmp_path / "run.db"), quiet=False, launcher=launcher)
    rows = 2 * 4 * 8 * 16  # processes, recorded steps, batch, length
    assert said.count("rows of 2 processes") == 1 and said.startswith(f"{rows} rows")
    assert "layers.1" in said and "module" not in said
    steps = read_run(tmp_path / "run.db").steps
    assert list(steps) == [0, 10, 20, 30]


# ---------------------------------------------------------------- the notebook


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook as it comes out now; an error in a cell ends it with an error."""
    out = tmp_path_factory.mktemp("executed")
    here = str(Path(levelhead.__file__).parents[1])  # for the kernel, which runs elsewhere
    subprocess.run(
        [sys.executable, EXAMPLES / "execute.py", "--out", out],
        env=os.environ | {"PYTHONPATH": here},
        timeout=300,
        check=True,
    )
    return nbformat.read(out / "health.ipynb", as_version=4)


@pytest.fixture(scope="module")
def stored():
    return nbformat.read(EXAMPLES / "health.ipynb", as_version=4)


def outputs(notebook):
    return [each for cell in notebook.cells for each in cell.get("outputs", ())]


def structure(notebook):
    """What the cells show, without the numbers, which other machines round differently."""
    return [(cell.source, [*map(parts, cell.get("outputs", ()))]) for cell in notebook.cells]


def parts(output):
    """What an output has, and the style of its drawing, which is the same on all machines."""
    html = html_of(output)
    there = [part for part in ("lh-headline", "lh-map", "<svg", "<details") if part in html]
    style = re.findall("<style>.*?</style>", html, re.DOTALL)
    return output.output_type, sorted(output.get("data", ())), there, style


def html_of(output):
    return output.get("data", {}).get("text/html", "")


def test_the_notebook_runs_and_stores_what_it_shows(executed, stored):
    nbformat.validate(stored)
    assert structure(stored) == structure(executed)  # otherwise: python examples/execute.py
    assert not [each for each in outputs(executed) if each.output_type == "error"]
    assert not [each for each in outputs(executed) if each.get("name") == "stderr"]


def test_the_notebook_tells_its_story(executed):
    result, unscaled, ill, _, cured, run, cured_run = [
        html_of(each) or each.text for each in outputs(executed)
    ]
    assert "1 of 8 heads needs attention" in result and "1 of 8 heads needs attention" in unscaled
    assert "head 2: exploding" in unscaled  # without the scale
    for html in (ill, run):  # one drawing for all calls of show() in a cell: the last
        assert "75 steps recorded, 0 to 148" in html and "no problems found" not in html
    for html in (cured, cured_run):
        assert "75 steps recorded, 0 to 148" in html and "no problems found" in html


def test_the_notebook_stores_nothing_of_its_machine(stored):
    said = "".join(map(str, outputs(stored))) + str(stored.metadata)
    paths = r"/(tmp|home|root|usr|opt|work|Users|var)/|site-packages"
    assert not re.search(rf"{paths}|localhost|127\.0\.|\b{os.uname().nodename}\b", said)
    assert all("execution" not in cell.metadata for cell in stored.cells)  # no times either
