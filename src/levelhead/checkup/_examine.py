"""Run a subject, listen to its attention, and gather what was seen as one plain dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .._health import Evidence, Health
from .._health.describe import describe, missing_calls
from ..scaling import scale_rule
from ._errors import TargetError, install, told
from ._pictures import Album
from ._subject import Input, Subject

if TYPE_CHECKING:
    from ..torch import Call

# What else the scores could have been multiplied by.
ALTERNATIVES = ("none", "dk", "sqrt_dmodel")


Listen = Callable[[Callable[[Any], None], Any, Callable[[str], None]], AbstractContextManager[Any]]


class _Layer:
    """All calls from one place in the model, merged head by head."""

    def __init__(self, call: Call, width: int | None) -> None:
        _, heads, _, _ = call.shape
        self.d_k, self.scale = call.dk, call.scale
        self.d_model = width or heads * call.dk
        self.factors = {
            name: scale_rule(name)(self.d_k, self.d_model) / self.scale
            for name in ALTERNATIVES
            if self.scale
        }
        self.calls = 0
        self._parts: dict[str, list[Health]] = {name: [] for name in ("used", *self.factors)}

    def add(self, call: Call) -> None:
        self.calls += 1
        self._parts["used"].append(call.health.over_batch())
        for name, factor in self.factors.items():
            self._parts[name].append(call.rescaled(factor).over_batch())

    def result(self, name: str) -> dict[str, Any]:
        merged = {rule: Health.merge(*parts) for rule, parts in self._parts.items()}
        heads = {rule: describe(Evidence({name: health}))[name] for rule, health in merged.items()}
        return {
            "name": name,
            "calls": self.calls,
            "d_k": self.d_k,
            "d_model": self.d_model,
            "scale": self.scale,
            "heads": heads["used"],
            "scales": {
                rule: {"scale": factor * (self.scale or 0.0), "heads": heads[rule]}
                for rule, factor in self.factors.items()
            },
        }


def examine(
    subject: Subject,
    *,
    pictures: bool = False,
    on_input: Callable[[int, int], None] = lambda done, total: None,
    listen: Listen | None = None,
) -> dict[str, Any]:
    """The health of every head of a model, as a dict of plain numbers and strings.

    pictures: also keep the attention itself, for pages
    on_input: called with (inputs done, inputs in all)
    listen:   `levelhead.torch.listen`, or a stand-in

    A place in the model that attends twice in one call gives two layers, the second named
    "place #2": shared weights see different queries at every depth.
    """
    layers: dict[str, _Layer] = {}
    not_understood: Counter[str] = Counter()
    album = Album()

    def miss(module: str) -> None:
        not_understood[_name(module)] += 1

    for done, given in enumerate(subject.inputs):
        on_input(done, len(subject.inputs))
        seen: dict[str, int] = {}

        def add(call: Call, given: Input = given, seen: dict[str, int] = seen) -> None:
            seen[call.module] = seen.get(call.module, 0) + 1
            name = _name(call.module, seen[call.module])
            layer = layers.setdefault(name, _Layer(call, subject.width))
            layer.add(call)
            if pictures:
                album.add(name, call, given, list(layer.factors.values()))

        _run(subject, given, (listen or _listen())(add, subject.model, miss))
    on_input(len(subject.inputs), len(subject.inputs))
    if not layers:
        raise TargetError(
            f"{subject.name} made no attention call that can be seen; a checkup needs a model "
            "that calls scaled_dot_product_attention, nn.MultiheadAttention or a softmax of scores"
            + "".join(f". {line}" for line in missing_calls(not_understood))
        )
    return {
        "model": subject.name,
        "notes": list(subject.notes),
        "inputs": [
            {"text": given.label, "tokens": max(map(len, given.tokens), default=None)}
            for given in subject.inputs
        ],
        "not_understood": dict(not_understood),
        "layers": [layer.result(name) for name, layer in layers.items()],
        "pictures": album.result(list(layers)) if pictures else None,
    }


def _name(module: str, occurrence: int = 1) -> str:
    name = module or "(outside any module)"
    return name if occurrence == 1 else f"{name} #{occurrence}"


def _listen() -> Listen:
    try:
        from ..torch import listen  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise TargetError(f"the checkup needs PyTorch: {install('torch')}") from error
    return listen


def _run(subject: Subject, given: Input, listening: AbstractContextManager[Any]) -> None:
    import torch  # noqa: PLC0415

    try:
        with _evaluating(subject.model), torch.no_grad(), listening:
            subject.model(*given.args, **given.kwargs)
    except Exception as error:
        raise TargetError(
            f"{subject.name} raised {told(error)} when it was called; --debug shows where"
        ) from error


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout and batch statistics; the training flag of each part is put back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
