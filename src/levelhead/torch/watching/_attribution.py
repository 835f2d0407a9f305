"""Who makes a call: the innermost module that is running, by its frame on the stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn

_HEADS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads", "num_head",
    "attention_heads", "n_attention_heads", "no_heads",
)  # fmt: skip


# What compiling, FSDP and checkpointing put between a module and its own.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class ModuleNames(dict[int, str]):
    """The dotted names of a model's modules, by id, as the model was written.

    Wrappers have no part in them, so that runs of one model can be compared, wrapped or not. DDP
    and others call what they wrap `module`; a model may do so too, beside other parts of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        super().__init__(self._now())

    def _now(self) -> dict[int, str]:
        found: dict[str, str] = {"": ""}  # by the name with all wrappers
        for name, module in self._model.named_modules():
            for part, child in module._modules.items():
                path = f"{name}.{part}" if name else part
                wraps = part in _WRAPPED or (part == "module" and len(module._modules) == 1)
                written = found[name] if wraps else f"{found[name]}.{part}".lstrip(".")
                if child is not None:
                    found.setdefault(path, written)
        return {id(module): found[name] for name, module in self._model.named_modules()}

    def renew(self) -> bool:
        """Look again; whether modules have come or gone."""
        now = self._now()
        changed = now != self
        self.clear()
        self.update(now)
        return changed


def module_names(model: nn.Module | None) -> ModuleNames | None:
    return None if model is None else ModuleNames(model)


def _running(frame: FrameType | None) -> Iterator[tuple[nn.Module, FrameType]]:
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            running = frame.f_locals.get("self")
            if isinstance(running, nn.Module):
                yield running, frame
        frame = frame.f_back


def running_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are running, the innermost first, from a frame outwards."""
    for module, _ in _running(frame):
        yield module


def calling_module(names: ModuleNames | None, frame: FrameType | None) -> str | None:
    """The name of the module that makes a call; "" outside any; None in another model.

    That is the innermost running module that has a name. Modules without one that it runs in its
    forward, a helper made on the fly perhaps, are its own; those that run elsewhere are not, even
    if a method of the model calls them: a training step calls its teacher.
    names: None lets every module bear the name of its class
    """
    if names is None:
        return next((type(module).__name__ for module in running_modules(frame)), "")
    name = _calling_module(names, frame)
    return _calling_module(names, frame) if name is None and names.renew() else name


def _calling_module(names: ModuleNames, frame: FrameType | None) -> str | None:
    inside_another = False
    for module, running in _running(frame):
        if id(module) not in names:
            inside_another = True
        elif not inside_another or _is_forward(running.f_code.co_name):
            return names[id(module)]
    return None if inside_another else ""


def _is_forward(method: str) -> bool:
    return "forward" in method or method in ("_call_impl", "__call__")


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

    The modules that are running know, by the names that people give it. If they do not say, it is
    a batch of one head; without any module it is heads alone, as for `levelhead.attention`.
    """
    count = folded
    for module in running_modules(frame):
        count = 1
        for heads in _declared_by(module):
            if folded % heads == 0:
                return heads
    return count


def declared_heads(frame: FrameType | None) -> list[int]:
    """The numbers of heads of the innermost running module that has any."""
    return next(filter(None, map(_declared_by, running_modules(frame))), [])


def _declared_by(module: nn.Module) -> list[int]:
    numbers = (getattr(module, name, None) for name in _HEADS)
    return [heads for heads in numbers if type(heads) is int and heads > 0]
