"""Watching what transformers' Trainer trains: steps, losses, logs, trackers, resumed runs."""

import doctest
import importlib
import json
import logging
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_support import LAYERS, LENGTH, gpt2, losses, texts, trainer
from transformers import Trainer, TrainerCallback

import levelhead.hf
from levelhead.hf import WatchCallback, watch_trainer
from levelhead.store import list_runs, read_run

ACCUMULATE = {"gradient_accumulation_steps": 2}
logging.getLogger("transformers").setLevel(logging.ERROR)
EVALUATE = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}


@pytest.fixture
def store(tmp_path):
    return tmp_path / "run.db"


def logged(trained):
    """Per logged step what it has of the attention."""
    return [
        {name: value for name, value in entry.items() if name.startswith("attention")}
        for entry in trained.state.log_history
        if "loss" in entry
    ]


def stored_losses(run):
    return dict(zip(*(part.tolist() for part in run.scalars["loss"]), strict=True))


# ---------------------------------------------------------------- steps and losses


@pytest.mark.parametrize("way", ["callback", "watch_trainer"])
def test_steps_are_the_trainers(tmp_path, store, way):
    callback = WatchCallback(every=2, store=store)
    given = [callback] if way == "callback" else []
    trained = trainer(tmp_path, given, **ACCUMULATE, **EVALUATE)
    if way == "watch_trainer":
        callback = watch_trainer(trained, every=2, store=store)
    trained.train()
    run = read_run(store)
    assert (run.steps, run.layers, run.model) == ([0, 2, 4], LAYERS, "GPT2LMHeadModel")
    assert run.ended is not None
    for _, health in run.health(LAYERS[0]):  # two batches of two texts; evaluation is not in it
        assert health.rows.tolist() == [2 * 2 * LENGTH] * 2
    assert [step for step, _ in run.gradients(LAYERS[1])] == [0, 2, 4]
    assert callback.watch.before_training.calls == 0
    assert read_run(store, phase="before training").steps == []
    found = losses(trained)
    assert stored_losses(run) == pytest.approx({step: found[step] for step in (0, 2, 4)}, rel=1e-6)


def test_a_loss_for_each_batch_is_averaged(tmp_path, store):
    """A model that does not know how many items the other batches have."""

    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = gpt2()

        def forward(self, input_ids, labels):
            return self.inner(input_ids, labels=labels).to_tuple()

    callback = WatchCallback(every=1, store=store)
    trained = trainer(tmp_path, [callback], model=Mean(), **ACCUMULATE)
    trained.train()
    assert stored_losses(read_run(store)) == pytest.approx(losses(trained), rel=1e-6)


def test_watch_trainer_has_the_loss_of_the_trainer_itself(tmp_path, store):
    """With label smoothing the model returns none."""
    trained = trainer(tmp_path, label_smoothing_factor=0.1, **ACCUMULATE)
    watch_trainer(trained, every=1, store=store)
    trained.train()
    assert stored_losses(read_run(store)) == pytest.approx(losses(trained), rel=1e-6)


def test_what_is_told_of_the_run(tmp_path, store):
    callback = WatchCallback(every=3, store=store, name="mine", meta={"data": "random"})
    trainer(tmp_path, [callback], learning_rate=0.01).train()
    run = read_run(store)
    assert (run.name, run.meta, run.ranks, run.start_step) == ("mine", {"data": "random"}, 1, 0)
    assert run.arguments["every"] == 3
    assert run.arguments["learning_rate"] == 0.01
    assert run.arguments["lr_scheduler_type"] == "linear"
    assert str(tmp_path) not in json.dumps(run.arguments)
    trainer(tmp_path, [WatchCallback(store=store)], run_name="named").train()
    trainer(tmp_path, [WatchCallback(store=store)]).train()
    assert [entry.name for entry in list_runs(store)] == ["mine", "named", "out"]


# ---------------------------------------------------------------- the log


def test_few_scalars_are_in_the_log(tmp_path, store):
    callback = WatchCallback(every=2, store=store)
    trained = trainer(tmp_path, [callback])
    trained.train()
    entries = logged(trained)
    assert [entry.get("attention/step") for entry in entries] == [0, None, 2, None, 4, None]
    assert all(len(entry) in (0, 12) for entry in entries)
    run = read_run(store)
    largest = max(run.health(layer)[0][1].largest_score.max() for layer in LAYERS)
    assert entries[0]["attention/largest_score"] == pytest.approx(largest)
    trained.save_state()  # as JSON
    assert (tmp_path / "out" / "trainer_state.json").read_text().count("attention/step") == 3


def test_several_records_between_two_logs(tmp_path):
    trained = trainer(tmp_path, [WatchCallback(every=1, store=None)], logging_steps=4)
    trained.train()
    assert [entry["attention/step"] for entry in logged(trained)] == [3]
    assert trained.state.log_history[-1]["attention/step"] == 5  # with the final numbers


def test_alerts_are_in_the_log_once_as_text(tmp_path, caplog):
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight *= 2_000
    trained = trainer(tmp_path, [WatchCallback(every=1, store=None)], model=model)
    trained.train()
    said = [entry["attention_alerts"] for entry in logged(trained) if "attention_alerts" in entry]
    assert "exploding" in said[0] and "transformer.h.1.attn" in said[0]
    lines = "\n".join(said).splitlines()
    assert len(lines) == len(set(lines))
    warned = [r.getMessage() for r in caplog.records if r.name == "levelhead"]
    assert [line for line in lines if line in warned] == lines


# ---------------------------------------------------------------- trackers


class Tracker(TrainerCallback):
    """As a Trainer's reporter does: it keeps what it is given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


@pytest.mark.parametrize("leads", [False, True])
def test_trackers_come_before_callbacks_but_not_before_watch_trainer(tmp_path, leads):
    tracker, callback = Tracker(), WatchCallback(every=1, store=None)
    trained = trainer(tmp_path, [tracker] if leads else [tracker, callback])
    if leads:
        watch_trainer(trained, every=1, store=None)
    trained.train()
    shown = [any(name.startswith("attention/") for name in logs) for logs in tracker.seen]
    assert shown == [leads] * 6 + [False]  # the last has the numbers of the whole training


def test_tensorboard_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trained = trainer(tmp_path, report_to=["tensorboard"])
    watch_trainer(trained, every=2, store=None)
    trained.train()
    (events,) = (tmp_path / "tb").rglob("events*")
    board = EventAccumulator(str(events))
    board.Reload()
    found = [(each.step, each.value) for each in board.Scalars("train/attention/step")]
    assert found == [(1, 0), (3, 2), (5, 4)]
    assert len([tag for tag in board.Tags()["scalars"] if "attention" in tag]) == 12


def test_weights_and_biases_of_the_trainer(tmp_path, monkeypatch):
    settings = {
        "MODE": "offline",
        "DIR": str(tmp_path),
        "SILENT": "true",
        "ERROR_REPORTING": "false",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb = importlib.import_module("wandb")
    try:
        trained = trainer(tmp_path, report_to=["wandb"], max_steps=3)
        watch_trainer(trained, every=2, store=None)
        trained.train()
        shown = {
            n: v for n, v in dict(wandb.run.summary).items() if n.startswith("train/attention")
        }
        assert shown["train/attention/step"] == 2
        assert len(shown) == 12
    finally:
        wandb.finish()
        wandb.teardown()


# ---------------------------------------------------------------- resumed, broken off, twice


def test_a_resumed_run_goes_on_in_the_same_run(tmp_path, store, caplog):
    steps = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, [WatchCallback(every=2, store=store)], **steps).train()
    first = stored_losses(read_run(store))
    again = trainer(tmp_path, [WatchCallback(every=2, store=store)], **steps, max_steps=8)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    run = read_run(store)
    assert (len(list_runs(store)), run.steps) == (1, [0, 2, 4, 6])
    found = stored_losses(run)
    assert {step: found[step] for step in (0, 2)} == {step: first[step] for step in (0, 2)}
    assert found[4] == pytest.approx(losses(again)[4], rel=1e-6)
    told = [r.getMessage() for r in caplog.records if r.name == "levelhead"]
    assert [line.partition(": ")[2] for line in told] == [
        "the run 'out' goes on at step 3; what it has from there on is dropped: step 4"
    ]


def test_two_callbacks_are_told_of_and_one_works(tmp_path, store, caplog):
    callbacks = [WatchCallback(every=2, store=store) for _ in range(2)]
    trainer(tmp_path, callbacks).train()
    assert [entry.steps for entry in list_runs(store)] == [3]
    told = [r.getMessage() for r in caplog.records if r.name == "levelhead"]
    assert told == ["WatchCallback: it was given twice; the second one does nothing"]
    assert callbacks[1].watch is None


def test_one_callback_given_twice_counts_once(tmp_path, store):
    callback = WatchCallback(every=1, store=store)
    trained = trainer(tmp_path, [callback, callback])
    trained.train()
    run = read_run(store)
    assert run.steps == [*range(6)]
    assert stored_losses(run) == pytest.approx(losses(trained), rel=1e-6)


def test_watch_trainer_beside_a_callback_is_refused(tmp_path):
    trained = trainer(tmp_path, [WatchCallback(store=None)])
    with pytest.raises(ValueError, match=r"^trainer: it has a WatchCallback already"):
        watch_trainer(trained, store=None)
    with pytest.raises(TypeError, match=r"expected a transformers.Trainer, got 3"):
        watch_trainer(3)


class Broken(Trainer):
    """Breaks at its third step."""

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        return super().training_step(*args, **kwargs)


def test_a_training_that_was_broken_off_is_no_hindrance(tmp_path, store):
    model, callback = gpt2(), WatchCallback(every=1, store=store)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path, [callback], model=model, kind=Broken).train()
    trainer(tmp_path, [WatchCallback(every=1, store=store)], model=model).train()
    assert [entry.steps for entry in list_runs(store)] == [2, 2, 6]
    other = WatchCallback(every=1, store=None)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, [other], model=model, kind=Broken).train()
    assert len(model._forward_hooks) == 2
    other.close()
    assert len(model._forward_hooks) == 0


# ---------------------------------------------------------------- models, bad input


def test_a_model_with_lora(tmp_path, store):
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), config)
    trained = trainer(tmp_path, [WatchCallback(every=2, store=store)], model=model, **ACCUMULATE)
    trained.train()
    run = read_run(store)
    assert (run.model, run.steps) == ("PeftModel", [0, 2, 4])
    assert run.layers == [f"base_model.model.{layer}" for layer in LAYERS]
    assert run.total_gradients().keys() == run.total().keys()
    found = losses(trained)
    assert stored_losses(run) == pytest.approx({step: found[step] for step in (0, 2, 4)}, rel=1e-6)


def test_a_model_that_is_saved_while_it_trains(tmp_path):
    """Hooks of the callback stay behind."""

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            torch.save(model, tmp_path / "model.pt")

    trainer(tmp_path, [WatchCallback(every=1, store=None), Save()], max_steps=1).train()
    model = torch.load(tmp_path / "model.pt", weights_only=False)
    assert model(texts(1)[0]["input_ids"][None]).logits.shape == (1, LENGTH, 30)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"every": 0}, ValueError, "every: expected an integer of at least 1, got 0"),
        ({"evry": 5}, TypeError, "evry"),
        ({"start_step": 5}, TypeError, "start_step: the trainer says that"),
        ({"thresholds": {"explodes": 1}}, TypeError, "unknown threshold 'explodes'"),
    ],
)
def test_bad_options_are_refused_at_once(options, error, said):
    with pytest.raises(error, match=said):
        WatchCallback(**{"store": None, **options})


def test_a_store_that_cannot_be_written_is_said_before_training(tmp_path):
    trained = trainer(tmp_path, [WatchCallback(store=tmp_path / "no" / "run.db")])
    with pytest.raises(ValueError, match="does not exist: make it, or correct the path"):
        trained.train()
    assert trained.state.global_step == 0


def test_without_accelerate_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"needs accelerate.*: pip install accelerate$"):
        WatchCallback()


def test_names_that_there_are_not():
    with pytest.raises(AttributeError, match=r"'levelhead.hf' has no attribute 'Watch'"):
        _ = levelhead.hf.Watch


def test_examples():
    failed, tried = doctest.testmod(importlib.import_module("levelhead.hf._callback"))
    assert (failed, tried) == (0, 4)
