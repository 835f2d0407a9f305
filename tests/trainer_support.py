"""What the tests of trainers share: a tiny GPT-2, its texts, the Trainer's arguments."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 12  # of a text
LAYERS = ["transformer.h.0.attn", "transformer.h.1.attn"]


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def texts(many):
    tokens = torch.randint(30, (many, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(folder, callbacks=(), *, model=None, kind=Trainer, **args):
    """A Trainer of six steps, two texts a batch, that logs each of them."""
    usual = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": []}
    usual |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return kind(
        gpt2() if model is None else model,
        TrainingArguments(str(folder / "out"), **(usual | args)),
        train_dataset=texts(64),
        eval_dataset=texts(4),
        callbacks=list(callbacks),
    )


def losses(trained):
    """{step: loss} as the Trainer logged them; it counts a step when it is over."""
    history = trained.state.log_history
    return {entry["step"] - 1: entry["loss"] for entry in history if "loss" in entry}
