"""Two processes train one model, and one watch sees what both of them see.

    torchrun --nproc-per-node 2 examples/torchrun_watch.py

Each process has its own batches. On recorded steps the watch merges the health of all of them:
every process knows it, and the first one writes the store and prints the alerts.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import levelhead.torch
from levelhead.torch.nn import MultiHeadAttention

WIDTH, LENGTH = 32, 16


class Model(nn.Module):
    """Two layers of attention; the task is to tell the largest of all first features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(WIDTH, 4) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x).mean(1).squeeze(-1)


def main(store: str | None) -> None:
    """Train for forty steps, every tenth of them recorded."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # quickest for a model this small
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())  # other data on each rank
    with levelhead.torch.watch(model, every=10, store=store, on_alert=print) as seen:
        for _ in range(40):
            x = torch.randn(8, LENGTH, WIDTH)
            loss = (model(x) - x[..., 0].amax(1)).square().mean()
            seen.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    rows = int(seen.health["layers.0"].rows[0])
    if dist.get_rank() == 0:
        print(f"{rows} rows of {dist.get_world_size()} processes\n{seen.summary()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
