"""Run a subject, listen to its attention, and gather what was seen as one plain dict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .._health import Evidence, findings
from .._health.describe import describe, missing_calls
from .._health.numbers import plain
from .._moved import Moved
from ..scaling import SAME, SCALE_RULES, UNKNOWN, in_use
from ._errors import TargetError, install, told
from ._pictures import Album
from ._subject import Input, Subject
from ._what_if import SLIDER, factor_name, mean, scale_findings, what_if

if TYPE_CHECKING:
    from ..torch import Call

Listen = Callable[[Callable[[Any], None], Any, Callable[[str], None]], AbstractContextManager[Any]]


class _Layer:
    """All calls from one place in the model, merged head by head."""

    def __init__(
        self, call: Call, width: int | None, factors: Sequence[float], more: Sequence[float] = ()
    ) -> None:
        """factors: told with the layer; more: for a page only."""
        _, heads, _, _ = call.shape
        self.used = in_use(call.scale, call.dk, width or heads * call.dk)
        self.factors = {factor_name(factor): factor for factor in factors}
        if call.scale and self.used.rule != UNKNOWN:
            rules = {name: rule(call.dk, self.used.d_model) for name, rule in SCALE_RULES.items()}
            self.factors = {name: to / call.scale for name, to in rules.items()} | self.factors
        self.every = {factor_name(factor): factor for factor in more} | self.factors
        self.calls = 0
        self._parts: dict[str, list[Moved]] = {name: [] for name in ("used", *self.every)}

    def add(self, call: Call) -> None:
        self.calls += 1
        for name, factor in ({"used": 1.0} | self.every).items():
            same = math.isclose(factor, 1.0, rel_tol=SAME)
            self._parts[name].append(Moved.nowhere(call.health) if same else call.moved(factor))

    def result(self, name: str) -> dict[str, Any]:
        merged = {rule: Moved.merge(*parts) for rule, parts in self._parts.items()}
        self.health = merged["used"].health
        heads = {
            rule: describe(Evidence({name: moved.health}))[name] for rule, moved in merged.items()
        }
        self.scales = {
            rule: self._scaled(factor, heads[rule], merged[rule])
            for rule, factor in self.every.items()
        }
        return {
            "name": name,
            "calls": self.calls,
            "d_k": self.used.d_k,
            "d_model": self.used.d_model,
            "scale": self.used.scale,
            "scale_rule": self.used.rule,
            "heads": heads["used"],
            "scales": {rule: self.scales[rule] for rule in self.factors},
        }

    def _scaled(self, factor: float, heads: list[dict[str, Any]], moved: Moved) -> dict[str, Any]:
        """The heads with another scale, and how far it moves each."""
        names = ("weight_moved", "output_changed")
        far = {name: plain(getattr(moved, name)) for name in names}
        for head in heads:
            head.update({name: far[name][head["head"]] for name in names})
        scale = None if self.used.scale is None else factor * self.used.scale
        means = plain({name: mean(heads, name) for name in names})
        return {"scale": scale, "factor": factor, **means, "heads": heads}


def examine(
    subject: Subject,
    *,
    pictures: bool = False,
    factors: Sequence[float] = (),
    on_input: Callable[[int, int], None] = lambda done, total: None,
    listen: Listen | None = None,
) -> dict[str, Any]:
    """The health of every head of a model, as a dict of plain numbers and strings.

    pictures: also keep what only a page shows: the attention itself, and the heads at the many
              scales of its slider
    factors:  multiples of the scale in use to compare it with, beside the four rules
    on_input: called with (inputs done, inputs in all)
    listen:   `levelhead.torch.listen`, or a stand-in

    A place in the model that attends twice in one call gives two layers, the second named
    "place #2": shared weights see different queries at every depth.
    """
    if wrong := [factor for factor in factors if not 0 <= factor < math.inf]:
        raise TargetError(f"a scale factor must be a number from 0 on, got {wrong[0]}")
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
            if name not in layers:
                more = SLIDER if pictures else ()
                layers[name] = _Layer(call, subject.width, factors, more)
            layers[name].add(call)
            if pictures:
                album.add(name, call, given)

        _run(subject, given, (listen or _listen())(add, subject.model, miss))
    on_input(len(subject.inputs), len(subject.inputs))
    if not layers:
        raise TargetError(
            f"{subject.name} made no attention call that can be seen; a checkup needs a model "
            "that calls scaled_dot_product_attention, nn.MultiheadAttention or a softmax of scores"
            + "".join(f". {line}" for line in missing_calls(not_understood))
        )
    found = [layer.result(name) for name, layer in layers.items()]
    said = findings(Evidence({name: layer.health for name, layer in layers.items()}))
    return {
        "model": subject.name,
        "notes": list(subject.notes),
        "inputs": [
            {"text": given.label, "tokens": max(map(len, given.tokens), default=None)}
            for given in subject.inputs
        ],
        "not_understood": dict(not_understood),
        "layers": found,
        "scales": what_if(found),
        "scale_findings": scale_findings(found),
        "findings": [finding.to_dict() for finding in said],
        "pictures": album.result(list(layers)) if pictures else None,
        "slider": _slider(layers.values(), found) if pictures else None,
    }


def _slider(layers: Iterable[_Layer], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The model, and every layer's heads, at all scales: those told of and those of the slider."""
    every = [layer.scales for layer in layers]
    whole = [{**one, "scales": scales} for one, scales in zip(found, every, strict=True)]
    return {"scales": what_if(whole), "layers": every}


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
