"""A head explodes, the watch tells, QK-norm cures it.

    python examples/exploding_head.py [RUN.db]

A small transformer learns at too large a rate; the second run has QK-norm. RUN.db keeps both.
"""

import logging
import sys

import torch
import torch.nn.functional as F
from torch import nn

import levelhead.torch
from levelhead.torch.nn import MultiHeadAttention

TOKENS, WIDTH, LENGTH, LAST = 16, 64, 32, 4


class Model(nn.Module):
    """Two layers of attention and nothing else."""

    def __init__(self, qk_norm: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(MultiHeadAttention(WIDTH, 4, qk_norm=qk_norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = self.tokens(ids) + self.places.weight
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)), causal=True)[0]
        return self.head(x)


def train(qk_norm: bool, store: str | None = None) -> None:
    """Train while a watch looks at every fifth step."""
    torch.manual_seed(0)
    model = Model(qk_norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.06)
    with levelhead.torch.watch(model, every=5, on_alert=print, store=store) as seen:
        for _ in range(150):
            ids = torch.randint(TOKENS, (16, LENGTH))
            shares = F.one_hot(ids, TOKENS).float().unfold(1, LAST, 1).mean(-1).flatten(0, 1)
            guesses = model(ids)[:, LAST - 1 :].log_softmax(-1).flatten(0, 1)
            loss = F.kl_div(guesses, shares, reduction="batchmean")
            seen.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"qk_norm={qk_norm}: loss {loss:.3f}, {len(seen.alerts)} alerts\n{seen.summary()}\n")


if __name__ == "__main__":
    logging.getLogger("levelhead").setLevel(logging.ERROR)  # we print its alerts ourselves
    torch.set_num_threads(1)  # quickest for a model this small
    train(False, *sys.argv[1:])
    train(True, *sys.argv[1:])
