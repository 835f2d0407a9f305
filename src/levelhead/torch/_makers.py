"""Who makes a call: the innermost module that is running, by its frame on the stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


def module_names(model: nn.Module | None) -> dict[int, str] | None:
    """Dotted name by id, without what torch.compile puts in between."""
    if model is None:
        return None
    return {
        id(module): ".".join(part for part in name.split(".") if part != "_orig_mod")
        for name, module in model.named_modules()
    }


def running_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are running, the innermost first, from a frame outwards."""
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            running = frame.f_locals.get("self")
            if isinstance(running, nn.Module):
                yield running
        frame = frame.f_back


def maker(names: dict[int, str] | None, frame: FrameType | None) -> str:
    """The name of the innermost running module that has one, "" without any.

    names: by id; None lets every module bear the name of its class
    """
    for module in running_modules(frame):
        if names is None:
            return type(module).__name__
        if id(module) in names:
            return names[id(module)]
    return ""


def heads_of(folded: int, frame: FrameType | None) -> int:
    """How many heads are folded into a dimension of this size that stands for a batch, too.

    The modules that are running know, by the names that people give it. If they do not tell, it is
    a batch of one head; without any module it is heads alone, as for `levelhead.attention`.
    """
    count = folded
    for module in running_modules(frame):
        count = 1
        for name in _HEADS:
            heads = getattr(module, name, None)
            if type(heads) is int and heads > 0 and folded % heads == 0:
                return heads
    return count
