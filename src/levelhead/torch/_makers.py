"""Who makes a call: the innermost module that is running, by its frame on the stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn

_HEADS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads", "num_head",
    "attention_heads", "n_attention_heads", "no_heads",
)  # fmt: skip


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


def common_frame(frame: FrameType, modules: set[int]) -> FrameType:
    """The innermost frame from here outwards in which one of these modules runs, by id.

    What two submodules do in turn, the module around them does.
    """
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_varnames[:1] == ("self",) and id(at.f_locals.get("self")) in modules:
            return at
        at = at.f_back
    return frame


def heads_of(folded: int, frame: FrameType | None) -> int:
    """How many heads are folded into a dimension of this size that stands for a batch, too.

    The modules that are running know, by the names that people give it. If they do not tell, it is
    a batch of one head; without any module it is heads alone, as for `levelhead.attention`.
    """
    count = folded
    for module in running_modules(frame):
        count = 1
        for heads in _told(module):
            if folded % heads == 0:
                return heads
    return count


def heads_told(frame: FrameType | None) -> list[int]:
    """The numbers of heads that the innermost running module tells which tells any."""
    return next(filter(None, map(_told, running_modules(frame))), [])


def _told(module: nn.Module) -> list[int]:
    numbers = (getattr(module, name, None) for name in _HEADS)
    return [heads for heads in numbers if type(heads) is int and heads > 0]
