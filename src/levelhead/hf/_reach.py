"""Which models hand their attention to a registered implementation, and which keep it."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.nn import Module
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedModel


def supports(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """As `levelhead.hf.supports`."""
    if isinstance(model, type) and issubclass(model, PreTrainedModel):
        return bool(model._can_set_attn_implementation())
    if isinstance(model, Module):
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        if parts:
            return all(part._can_set_attn_implementation() for part in parts)
    raise TypeError(f"model: expected a transformers model or its class, got {model!r:.80}")


@cache
def check_reach(config_class: type[Any]) -> None:
    """Raise for a model that asked for Levelhead, but computes attention in its own code."""
    for models in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        known = models.get(config_class, ())
        model = known[0] if isinstance(known, tuple) and known else known
        if model and not supports(model):
            raise ValueError(
                f'attn_implementation="levelhead" cannot reach {model.__name__}: transformers '
                "computes its attention in the model's own code. Use "
                'attn_implementation="eager" for it'
            )
