"""Watching what Lightning trains, under both of its names."""

import importlib
import logging
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch
    import pytorch_lightning

from levelhead.lightning import WatchCallback
from levelhead.store import list_runs, read_run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(treespec|resuming|num_workers|log_every_n_steps|dirpath|val_dataloader|weights_only):"
)
DATA = torch.randn(24, 9, 16, generator=torch.Generator().manual_seed(0))

for name in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)


def module(package, **hyperparameters):
    class Encoder(package.LightningModule):
        def __init__(self, lr=0.01):
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0)
            self.losses = []

        def training_step(self, batch, _):
            loss = (self.layer(batch) - 1).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            self.layer(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    torch.manual_seed(0)
    return Encoder(**hyperparameters)


def fit(folder, callbacks, *, package=lightning.pytorch, model=None, checkpoint=None, **options):
    """Three steps of two batches each, with a sanity check before and validation between them."""
    model = module(package) if model is None else model
    usual = {"max_steps": 3, "accumulate_grad_batches": 2, "val_check_interval": 2}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = package.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=callbacks,
        enable_checkpointing=False,
        **(usual | quiet | options),
    )
    loaders = [DataLoader(DATA, batch_size=2) for _ in range(2)]
    trainer.fit(model, *loaders, ckpt_path=checkpoint, weights_only=False)
    return model, trainer


@pytest.fixture
def store(tmp_path):
    return tmp_path / "run.db"


def stored_losses(path):
    return read_run(path).scalars["loss"][1].tolist()


def means(losses):
    return pytest.approx([sum(pair) / 2 for pair in zip(losses[::2], losses[1::2], strict=True)])


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_steps_are_the_trainers(tmp_path, store, package):
    """The callback derives from one of the packages; both take it."""
    callback = WatchCallback(every=1, store=store, name="mine")
    model, _ = fit(tmp_path, [callback], package=package, model=module(package, lr=0.02))
    run = read_run(store)
    assert (run.steps, run.layers) == ([0, 1, 2], ["layer.self_attn"])
    assert (run.name, run.model, run.arguments["lr"]) == ("mine", "Encoder", 0.02)
    assert run.arguments["accumulate_grad_batches"] == 2
    for _, health in run.health("layer.self_attn"):  # two batches of two; no validation in it
        assert health.rows.tolist() == [2 * 2 * 9] * 2
    assert read_run(store, phase="before training").steps == []  # nor the sanity check
    assert stored_losses(store) == means(model.losses)
    assert callback.watch.summary().startswith("6 attention calls, 1 layer, 2 heads")


def test_the_loggers_get_few_scalars_at_every_recorded_step(tmp_path):
    loggers = importlib.import_module("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path)
    fit(tmp_path, [WatchCallback(every=2, store=None)], logger=logger)
    (path,) = tmp_path.rglob("metrics.csv")
    top, *rows = (line.split(",") for line in path.read_text().splitlines())
    assert len([name for name in top if name.startswith("attention/")]) == 12
    assert [row[top.index("step")] for row in rows] == ["0", "2"]
    assert [row[top.index("attention/step")] for row in rows] == ["0", "2"]


def test_a_fit_from_a_checkpoint_goes_on_in_the_same_run(tmp_path, store):
    _, trainer = fit(tmp_path, [WatchCallback(every=2, store=store)], max_steps=4)
    trainer.save_checkpoint(tmp_path / "at_4.ckpt")
    again, checkpoint = WatchCallback(every=2, store=store), tmp_path / "at_4.ckpt"
    fit(tmp_path, [again], checkpoint=checkpoint, max_steps=7)
    assert len(list_runs(store)) == 1
    assert read_run(store).steps == [0, 2, 4, 6]


def test_optimizers_by_hand(tmp_path, store):
    """Of which each step counts, so that numbers grow by two."""
    base = type(module(lightning.pytorch))

    class ByHand(base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
            return loss

    callback = WatchCallback(every=2, store=store)
    model, _ = fit(tmp_path, [callback], model=ByHand(), max_steps=6, accumulate_grad_batches=1)
    assert read_run(store).steps == [0, 2, 4]
    assert stored_losses(store) == pytest.approx(model.losses)


def test_a_callback_given_twice(tmp_path, store, caplog):
    callbacks = [WatchCallback(every=1, store=store) for _ in range(2)]
    fit(tmp_path, callbacks)
    assert [entry.steps for entry in list_runs(store)] == [3]
    told = [r.getMessage() for r in caplog.records if r.name == "levelhead"]
    assert told == ["WatchCallback: it was given twice; the second one does nothing"]
    model, _ = fit(tmp_path, [callbacks[0]] * 2)  # the same one
    assert read_run(store).steps == [0, 1, 2]
    assert stored_losses(store) == means(model.losses)


def test_an_error_closes_the_run(tmp_path, store):
    model = module(lightning.pytorch)
    model.validation_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, [WatchCallback(every=1, store=store)], model=model, num_sanity_val_steps=0)
    assert (read_run(store).steps, len(model._forward_hooks)) == ([0], 0)
    assert read_run(store).ended is not None


def test_without_lightning_one_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules.update({'lightning': None, 'pytorch_lightning': None})\n"
        "import levelhead.lightning\n"
        "print([name for name in ('torch',) if name in sys.modules])\n"
        "try: levelhead.lightning.WatchCallback\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    said = "levelhead.lightning needs Lightning: pip install lightning"
    assert run.stdout.splitlines() == ["[]", said]
