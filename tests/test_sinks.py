"""The sinks besides the store: JSON lines and TensorBoard."""

import doctest
import importlib
import json
import math
import resource
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import levelhead as lh
from levelhead import GradHealth, Health
from levelhead._records import Alert, StepRecord
from levelhead.store import JsonLines, StoreError, TensorBoard
from levelhead.store._trackers import attention_scalars

KEYS = np.eye(10)
# Two heads, the second one critical; and one that sees too few keys to be judged.
MIXED = lh.reference(*np.stack([[2 * KEYS, 2e4 * KEYS]] * 3), return_health=True).health
SHORT = lh.reference(*np.ones((3, 1, 4, 8)), mask=np.zeros((4, 4), bool), return_health=True).health
GRADIENTS = GradHealth.from_sums([[4.0, 1.0], [math.nan, 1.0]])
ALERT = Alert(5, "mixed", 1, "exploding", "critical", "healthy", math.inf, "the reason", "the hint")


def record(step=5):
    health = {"mixed": MIXED, "": SHORT}
    return StepRecord(step, 1000.0 + step, health, {"mixed": GRADIENTS}, (ALERT,))


# ---------------------------------------------------------------- JSON lines


def strict(line):
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_line_holds_the_whole_record(tmp_path):
    with JsonLines(tmp_path / "run.jsonl") as sink:
        sink(record())
    (line,) = map(strict, (tmp_path / "run.jsonl").read_text().splitlines())
    assert (line["step"], line["phase"], line["time"]) == (5, "training", 1005.0)
    mixed, outside = line["layers"]
    assert (mixed["name"], outside["name"]) == ("mixed", "")
    assert [head["head"] for head in mixed["heads"]] == [0, 1]
    assert [head["verdict"] for head in mixed["heads"]] == ["healthy", "exploding"]
    assert [head["level"] for head in mixed["heads"]] == ["ok", "critical"]
    assert "critical from 10,000" in mixed["heads"][1]["reason"]
    for field in Health.FIELDS:
        assert [head[field] for head in mixed["heads"]] == getattr(MIXED, field).tolist()
    assert [head["survival"] for head in mixed["heads"]] == [0.5, None]
    assert [head["weight_grad_norm"] for head in mixed["heads"]] == [2.0, None]
    (head,) = outside["heads"]
    assert (head["verdict"], head["level"], head["reason"]) == (None, None, None)
    assert (head["entropy"], head["empty_rows"]) == (None, 4)
    assert "survival" not in head  # no backward pass there
    (alert,) = line["alerts"]
    assert (alert["layer"], alert["head"], alert["value"]) == ("mixed", 1, None)
    assert (alert["reason"], alert["hint"]) == ("the reason", "the hint")


def test_lines_are_appended_and_at_once_in_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    for step in (1, 2):
        with JsonLines(path) as sink:
            sink(record(step))
            assert strict(path.read_text().splitlines()[-1])["step"] == step
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_torn_last_line_stays_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n{"step"')
    with JsonLines(path) as sink:
        sink(record(2))
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"step"']
    assert strict(lines[2])["step"] == 2


def test_a_full_disk_loses_whole_lines_and_is_said_once(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    sink = JsonLines(path)
    sink(record(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        for step in range(1, 5):
            sink(record(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink(record(5))
    sink.close()
    sink.close()
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [0, 5]
    failed, again = (entry.getMessage() for entry in caplog.records)
    assert failed.startswith(f"{path}: step 1 could not be written ([Errno 27] File too large)")
    assert failed.endswith("What to do: free space on its disk.")
    assert again == f"{path}: written again from step 5 on; 4 steps were lost."


def test_a_file_that_cannot_be_made(tmp_path):
    with pytest.raises(StoreError, match=r"cannot be written \(No such file or directory\): make"):
        JsonLines(tmp_path / "no" / "run.jsonl")
    with pytest.raises(StoreError, match=r"cannot be written \(Is a directory\)"):
        JsonLines(tmp_path)


# ---------------------------------------------------------------- TensorBoard


def events(folder):
    """{tag: [(step, value)]} and the texts, read back from the event file."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()
    scalars = {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]
    }
    texts = [
        e.tensor_proto.string_val[0].decode()
        for tag in tags["tensors"]
        for e in accumulator.Tensors(tag)
    ]
    return scalars, texts


def test_the_worst_head_and_the_mean_of_each_layer(tmp_path):
    with TensorBoard(tmp_path) as sink:
        sink(record(5))
        sink(record(6))
    scalars, texts = events(tmp_path)
    expected = {
        "score_max/mixed": MIXED.score_max.max(),
        "score_max_mean/mixed": MIXED.score_max.mean(),
        "entropy_ratio/mixed": MIXED.entropy_ratio.min(),  # here the small one is the bad one
        "entropy_ratio_mean/mixed": MIXED.entropy_ratio.mean(),
        "saturated/mixed": 1.0,
        "saturated_mean/mixed": 0.5,
        "signal/mixed": MIXED.signal.min(),
        "signal_mean/mixed": MIXED.signal.mean(),
        "survival/mixed": 0.5,  # the other head's is NaN
        "survival_mean/mixed": 0.5,
        "worst_head/mixed": 1,
        **{"heads/critical": 1, "heads/error": 0, "heads/warning": 0},
        **attention_scalars(record(5)),
    }
    assert set(scalars) == set(expected)  # nothing of the layer whose head saw no key
    for tag, value in expected.items():
        assert scalars[tag] == [(step, pytest.approx(value, rel=1e-6)) for step in (5, 6)], tag
    assert texts == [str(ALERT)] * 2


def test_chosen_statistics_and_the_time_of_the_step(tmp_path):
    outside = StepRecord(3, 1234.0, {"": MIXED})
    with TensorBoard(tmp_path, statistics=("rows", "survival")) as sink:
        sink(outside)
    scalars, _ = events(tmp_path)
    assert scalars["rows/outside_any_module"] == [(3, 10.0)]
    assert not any(tag.startswith("survival") for tag in scalars)  # no backward pass ran
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert accumulator.Scalars("heads/critical")[0].wall_time == 1234.0


def test_the_writer_of_a_training_stays_open(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        with TensorBoard(writer) as sink:
            sink(record(1))
        scalars, _ = events(tmp_path)  # what was written is in the file
        assert scalars["worst_head/mixed"] == [(1, 1.0)]
        writer.add_scalar("loss", 2.0, 2)
    assert events(tmp_path)[0]["loss"] == [(2, 2.0)]


def test_the_event_file_grows_by_layers_not_by_heads(tmp_path):
    sizes = []
    for heads in (2, 32):
        health = Health(np.repeat(MIXED.sums[:1], heads, axis=0))
        with TensorBoard(tmp_path / str(heads)) as sink:
            for step in range(10):
                sink(StepRecord(step, 0.0, {"attn": health}))
        (file,) = (tmp_path / str(heads)).iterdir()
        sizes.append(file.stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 20


def test_an_unknown_statistic(tmp_path):
    with pytest.raises(StoreError, match=r"no statistic 'entropi': did you mean 'entropy'\?"):
        TensorBoard(tmp_path / "tb", statistics=("entropi",))
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install torch tensorboard"):
        TensorBoard(tmp_path)


def test_examples():
    failed, tried = doctest.testmod(importlib.import_module("levelhead.store._sinks"))
    assert tried > 10
    assert failed == 0
