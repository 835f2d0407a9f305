"""Tell transformers of Levelhead."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

NAME = "levelhead"


def register(*, ignore: Iterable[str] = ()) -> str:
    """Let every Hugging Face model run on Levelhead; returns the name to ask for.

    >>> import levelhead.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
    ...     num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    >>> config._attn_implementation = levelhead.hf.register()
    >>> LlamaForCausalLM(config).config._attn_implementation
    'levelhead'

    Models that ask for another implementation do not notice. May be called again at any time.

    ignore: names of options that attention may drop. An option that it does not know raises,
        because it may change the result; name it here if you know that it does not.
    """
    functions = load("_attention")
    masks = load("_masks")
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, functions.attention_forward)
    transformers.AttentionMaskInterface.register(NAME, masks.attention_mask)
    functions.IGNORED.update(ignore)
    return NAME


def supports(model: Any) -> bool:
    """Whether transformers lets Levelhead reach the attention of this model, or model class.

    >>> import levelhead.hf
    >>> from transformers import BertModel, BloomModel
    >>> levelhead.hf.supports(BertModel), levelhead.hf.supports(BloomModel)
    (True, False)

    Some models compute attention in code of their own. transformers takes any registered name for
    them, too, and then runs that code.
    """
    answer: bool = load("_reach").supports(model)
    return answer


def load(module: str) -> Any:
    """A module of this package that needs PyTorch and transformers."""
    try:
        importlib.import_module("transformers")
        return importlib.import_module(f"{__package__}.{module}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "levelhead":
            raise
        raise ImportError(
            f"levelhead.hf needs PyTorch and transformers 5 or newer ({error}): "
            'pip install "levelhead[hf]"',
            name=error.name,
        ) from error
