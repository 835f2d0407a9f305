"""A transformer trained by Lightning while its attention is watched.

    python examples/lightning_module.py [FOLDER]

It learns to find the largest number of a list. Lightning's CSV file has the watch's numbers beside
the module's own; the store has every head: levelhead report FOLDER/run.db.
"""

import logging
import sys
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from levelhead.lightning import WatchCallback


class FindLargest(L.LightningModule):
    """Says which of the numbers is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Linear(1, 32), nn.Linear(32, 1)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:  # noqa: D102
        numbers, place = batch
        guesses = self.score(self.layer(self.embed(numbers[..., None]))).squeeze(-1)
        loss = nn.functional.cross_entropy(guesses, place)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.Adam(self.parameters(), lr=0.003)


def main(folder: Path) -> None:
    """Train, and say how the attention is."""
    torch.manual_seed(0)
    numbers = torch.randn(2048, 12)
    data = DataLoader(TensorDataset(numbers, numbers.argmax(1)), batch_size=32)
    seen = WatchCallback(every=20, store=folder / "run.db", name="find the largest")
    logger = CSVLogger(folder)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(max_epochs=2, accelerator="cpu", logger=logger, callbacks=[seen], **quiet).fit(
        FindLargest(), data
    )
    print(Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0])
    print(seen.watch.summary())


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # quickest for a model this small
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
