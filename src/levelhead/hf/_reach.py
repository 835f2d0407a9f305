"""Which models hand their attention to a registered implementation, and which keep it."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel


def supports(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """As `levelhead.hf.supports`."""
    if isinstance(model, type) and issubclass(model, PreTrainedModel):
        return _dispatches(sys.modules[model.__module__])
    if isinstance(model, Module):
        parts = {type(part) for part in model.modules() if isinstance(part, PreTrainedModel)}
        if parts:
            return all(_dispatches(sys.modules[part.__module__]) for part in parts)
    raise TypeError(f"model: expected a transformers model or its class, got {model!r:.80}")


@cache
def check_reach(config_class: Any) -> None:
    """Raise for a model that asked for Levelhead, but computes attention in its own code."""
    source = config_class.__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(source)
    if module is not None and not _dispatches(module):
        raise ValueError(
            f'attn_implementation="levelhead" cannot reach {config_class.model_type} models: they '
            'compute attention in code of their own. Use attn_implementation="eager" for them'
        )


def _dispatches(module: ModuleType) -> bool:
    """Whether the models of a module look up their attention function, or have no attention."""
    if hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return True
    return not any(
        isinstance(thing, type) and issubclass(thing, Module) and "Attention" in thing.__name__
        for thing in vars(module).values()
        if getattr(thing, "__module__", None) == module.__name__
    )
