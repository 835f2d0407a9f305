"""A Trainer of two processes: their health as one, one of them writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from levelhead.store import list_runs, read_run

TRAIN = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from trainer_support import losses, trainer
from levelhead.hf import WatchCallback, watch_trainer

torch.set_num_threads(1)
folder = Path(sys.argv[1])
options = {"every": 2, "timeout": 100}
steps = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
steps["ddp_find_unused_parameters"] = False
first = trainer(folder, [WatchCallback(store=folder / "first.db", **options)], max_steps=3, **steps)
second = trainer(folder, max_steps=3, **steps)
watch_trainer(second, store=folder / "second.db", **options)
for each in (first, second):
    each.train()
if dist.get_rank() == 0:
    (folder / "losses.json").write_text(json.dumps([losses(first), losses(second)]))
dist.destroy_process_group()
"""


def test_two_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    paths = [str(Path(__file__).parent), *sys.path]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, script, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    logged = json.loads((tmp_path / "losses.json").read_text())
    for name, losses in zip(("first", "second"), logged, strict=True):
        path = tmp_path / f"{name}.db"
        run = read_run(path)
        assert (len(list_runs(path)), run.ranks, run.steps) == (1, 2, [0, 2])
        for _, health in run.health(run.layers[0]):  # of both: two batches of two texts each
            assert health.rows.tolist() == [2 * 2 * 2 * 12] * 2
        found = dict(zip(*(part.tolist() for part in run.scalars["loss"]), strict=True))
        assert found == pytest.approx({0: losses["0"], 2: losses["2"]}, rel=1e-6)
