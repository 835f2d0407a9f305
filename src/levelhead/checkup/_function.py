"""Targets of the form module:function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._hints import did_you_mean
from ._errors import TargetError, install, told
from ._subject import Input, Subject

_EXPECTED = "a model and the inputs of one call: return model, inputs"


def load_function(target: str) -> Subject:
    """Call module:function, found in the current folder or installed, for (model, inputs).

    The inputs are a dict of keyword arguments, a tuple or list of positional ones, or one value.
    A third item may name the tokens: a list of strings, or one such list per batch entry.
    """
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name or module_name.endswith(".py"):
        raise TargetError(
            f"{target!r} is not of the form module:function, as in my_models.bert:tiny"
        )
    function = _find(_import(module_name), module_name, function_name)
    with _here():
        try:
            returned = function()
        except (Exception, SystemExit) as error:
            raise TargetError(f"{target} raised {told(error)}; --debug shows where") from error
    return _subject(target, returned)


@contextmanager
def _here() -> Iterator[None]:
    """The current folder first among the places to import from."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _import(name: str) -> Any:
    try:
        with _here():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise TargetError(
                f"there is no module {error.name}, neither in {Path.cwd()} nor installed; "
                "run from its folder, or install it"
            ) from error
        if error.name == "torch":
            raise TargetError(f"{name} needs PyTorch: {install('torch')}") from error
        raise TargetError(
            f"{name} cannot be imported: it needs {error.name}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{name} cannot be imported: it raised {told(error)}; --debug shows where"
        ) from error


def _find(module: Any, module_name: str, name: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found), "; did you mean {}?")
            raise TargetError(f"{module_name} has no function {name}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(
            f"{module_name}:{name} is {_kind(found)}, not a function that returns {_EXPECTED}"
        )
    return found


def _subject(target: str, returned: Any) -> Subject:
    try:
        from torch.nn import Module  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise TargetError(f"the checkup needs PyTorch: {install('torch')}") from error
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise TargetError(f"{target} must return {_EXPECTED}; it returned {_kind(returned)}")
    model, inputs, *tokens = returned
    if not isinstance(model, Module):
        raise TargetError(
            f"{target} must return {_EXPECTED}; its model is {_kind(model)}, not a torch.nn.Module"
        )
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    return Subject(
        name=f"{type(model).__name__} ({target})",
        model=model,
        inputs=[_input(inputs, _tokens(target, tokens[0]) if tokens else ())],
        width=width if isinstance(width, int) else None,
    )


def _input(inputs: Any, tokens: Sequence[Sequence[str]]) -> Input:
    if isinstance(inputs, Mapping):
        return Input("the input", kwargs=inputs, tokens=tokens)
    args = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return Input("the input", args=args, tokens=tokens)


def _tokens(target: str, given: Any) -> Sequence[Sequence[str]]:
    entries = [given] if _is_text(given) else given
    if not isinstance(entries, (tuple, list)) or not all(_is_text(entry) for entry in entries):
        raise TargetError(
            f"the tokens of {target} must be a list of strings, or one such list per batch entry; "
            f"got {_kind(given)}"
        )
    return entries


def _is_text(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{size}"
