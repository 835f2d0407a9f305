"""Sinks for trackers: few numbers, whatever the tracker; the real W&B and MLflow, offline."""

import doctest
import importlib
import inspect
import operator
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_support import LAYERS, record

import levelhead as lh
from levelhead import Health, StepRecord
from levelhead.store import MLflow, Scalars, WandB
from levelhead.store._trackers import attention_scalars

COUNTS = [
    f"attention/heads_{name}" for name in ("nonfinite", "exploding", "saturated", "collapsed")
]


def of_heads(*scales, phase="training"):
    """A step of one layer whose heads have scores of these sizes."""
    q = np.stack([scale * np.eye(16) for scale in scales])
    health = lh.reference(
        q, q / q.max((1, 2), keepdims=True), q, return_health=True, scale=1
    ).health
    return StepRecord(3, 0.0, {"attn": health}, phase=phase)


def test_where_the_worst_head_is_and_how_the_others_are():
    first, second = record(4).health.values()
    scalars = attention_scalars(record(4))
    largest = np.stack([first.largest_score, second.largest_score])
    layer, head = np.unravel_index(largest.argmax(), largest.shape)
    assert scalars["attention/largest_score"] == largest.max()
    assert scalars["attention/largest_score_layer"] == layer == 1
    assert scalars["attention/largest_score_head"] == head
    assert scalars["attention/largest_score_median"] == np.median(largest)
    entropies = [*first.entropy_ratio, *second.entropy_ratio]
    assert scalars["attention/entropy_ratio_median"] == np.median(entropies)
    survivals = np.concatenate([part.survival for part in record(4).gradients.values()])
    assert scalars["attention/survival_median"] == np.median(survivals)
    assert set(map(type, scalars.values())) <= {int, float}


def test_heads_are_counted_by_verdict():
    scalars = attention_scalars(of_heads(1, 30, 5_000, 20_000, 20_000))
    assert [scalars[name] for name in COUNTS] == [0, 3, 1, 0]
    assert "attention/survival_median" not in scalars  # no backward pass ran


def test_there_are_few_however_large_the_model_is():
    wide = Health(np.tile(record(1).health[LAYERS[0]].sums, (40, 1)))
    deep = StepRecord(0, 0.0, {f"layers.{i}": wide for i in range(50)}, record(1).gradients)
    assert len(attention_scalars(deep)) == len(attention_scalars(record(1))) == 11


def test_all_heads_on_request():
    scalars = attention_scalars(record(2), heads=True)
    entropy = record(2).health[LAYERS[1]].entropy_ratio[2]
    assert scalars[f"attention/{LAYERS[1]}/2/entropy_ratio"] == entropy
    assert len(scalars) == 11 + 2 * 3 * 4


def test_heads_that_saw_nothing_have_no_numbers():
    unseen = Health(np.full_like(record(1).health[LAYERS[0]].sums, np.nan))
    assert set(attention_scalars(StepRecord(0, 0.0, {"attn": unseen}))) <= set(COUNTS)
    assert set(attention_scalars(StepRecord(0, 0.0, {}))) == set(COUNTS)


def test_any_function_is_a_tracker():
    seen = []
    with Scalars(lambda scalars, step: seen.append((step, scalars))) as sink:
        sink(record(0))
        sink(record(50))
        sink.log(50, {"loss": 1.0})
    assert seen == [(step, attention_scalars(record(step))) for step in (0, 50)]
    sink = Scalars(lambda scalars, step: seen.append(scalars), heads=True)
    sink(of_heads(1, phase="inference"))
    assert all(name.startswith("inference/attention/") for name in seen[-1])
    assert "inference/attention/attn/0/signal" in seen[-1]


def test_what_is_no_tracker_is_refused():
    with pytest.raises(TypeError, match=r"log: expected a function log\(scalars, step\) such as"):
        Scalars({"loss": 1})
    with pytest.raises(TypeError, match=r"run: expected what wandb.init\(\) returns, got 'mine'"):
        WandB("mine")


@pytest.mark.parametrize("sink, package", [(WandB, "wandb"), (MLflow, "mlflow")])
def test_without_the_package_one_sentence_says_what_to_install(sink, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^the .* sink needs {package}: pip install {package}$"):
        sink()


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # else it talks to its makers, offline too
    monkeypatch.chdir(tmp_path)
    wandb = importlib.import_module("wandb")
    yield wandb
    wandb.teardown()


def test_weights_and_biases(wandb, tmp_path):
    sink = WandB()
    with pytest.raises(RuntimeError, match=r"there is no active run: call wandb.init\(\) before"):
        sink(record(0))
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    with wandb.init(mode="offline", dir=tmp_path, settings=settings) as run:
        for step in (0, 50):
            run.log({"loss": 1.0})  # its own step grows with each call
            run.log({"loss": 2.0})
            sink(record(step))
        summary = dict(run.summary)
    expected = attention_scalars(record(50)) | {"attention/step": 50, "loss": 2.0}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "module, name",
    [("wandb", "Run.log"), ("mlflow", "log_metrics")],
)
def test_functions_of_trackers_take_scalars_and_step(module, name):
    function = inspect.unwrap(operator.attrgetter(name)(importlib.import_module(module)))
    assert [each for each in inspect.signature(function).parameters if each != "self"][1] == "step"


ACCELERATOR = """
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from store_support import record
from levelhead.store import Scalars

class Tracker(GeneralTracker):
    name, requires_logging_directory, tracker = "mine", False, None

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        print(step, len(values))

accelerator = Accelerator(cpu=True, log_with=Tracker())
accelerator.init_trackers("project")
Scalars(accelerator.log)(record(7))
"""


def test_an_accelerator_is_a_tracker():
    """In a process of its own: what an Accelerator is set to holds for all of its process."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", ACCELERATOR]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "7 11\n", done.stderr


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no other
    mlflow = importlib.import_module("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        with mlflow.start_run() as run:
            sink = MLflow()
            sink(record(0))
            sink(record(50))
        MLflow(run.info.run_id)(record(100))
        history = mlflow.MlflowClient().get_metric_history
        for name in ("attention/largest_score", "attention/heads_saturated"):
            found = [(each.step, each.value) for each in history(run.info.run_id, name)]
            assert found == [(step, attention_scalars(record(step))[name]) for step in (0, 50, 100)]
    finally:
        mlflow.set_tracking_uri(before)


def test_examples():
    module = importlib.import_module("levelhead.store._trackers")
    failed, tried = doctest.testmod(module)
    assert tried > 8
    assert failed == 0
