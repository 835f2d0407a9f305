"""A GPT-2 trained by transformers' Trainer while its attention is watched.

    python examples/trainer.py [FOLDER]

It should learn to repeat what it read, with a learning rate that is too large for its attention.
The Trainer's log shows the watch's numbers, and so do its trackers if there are any (report_to);
the store has every head: levelhead report FOLDER/run.db.
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import levelhead.hf

TOKENS, HALF = 16, 12


def texts(many: int) -> list[dict[str, torch.Tensor]]:
    """Texts whose second half repeats the first."""
    halves = torch.randint(TOKENS, (many, HALF))
    return [{"input_ids": half.repeat(2), "labels": half.repeat(2)} for half in halves]


def main(folder: Path) -> None:
    """Train, and say how the attention is."""
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "n_positions": 2 * HALF, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        str(folder / "out"),
        max_steps=120,
        learning_rate=0.03,
        per_device_train_batch_size=16,
        logging_steps=20,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, args, train_dataset=texts(512))
    seen = levelhead.hf.watch_trainer(trainer, every=10, store=folder / "run.db", name="too fast")
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        shown = ("loss", "attention/largest_score", "attention/heads_exploding")
        print(entry["step"], {name: round(entry[name], 3) for name in shown if name in entry})
    print(seen.watch.summary())


if __name__ == "__main__":
    torch.set_num_threads(1)  # quickest for a model this small
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
