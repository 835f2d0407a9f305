"""From what a person types to a model and its inputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ._errors import TargetError
from ._folder import demo_folder, load_folder
from ._function import load_function
from ._hub import download, is_hub_name
from ._subject import Subject
from ._texts import SENTENCES


def load(target: str | None = None, text: str | Path | None = None) -> Subject:
    """The model that a target names, with its inputs.

    target: "module:function", a Hugging Face model folder, a name on the Hugging Face hub, or None
            for the demo model
    text:   what the model reads, for all but functions: a file, each line of it an input; "-" for
            standard input; or the text itself, if it has a space in it
    """
    if target is not None and ":" in target and not Path(target).is_dir():
        if text is not None:
            raise TargetError(
                f"--text is for model folders; the inputs of {target} come from the function itself"
            )
        return load_function(target)
    texts = SENTENCES if text is None else read_texts(text)
    return load_folder(demo_folder() if target is None else _folder(target), texts)


def _folder(target: str) -> Path:
    folder = Path(target)
    if folder.is_dir():
        return folder
    if folder.is_file() or not is_hub_name(target):
        raise TargetError(_neither(target))
    return download(target)


def load_demo(texts: Sequence[str]) -> Subject:
    """The demo model with texts of one's own."""
    return load_folder(demo_folder(), texts)


def read_texts(text: str | Path) -> tuple[str, ...]:
    """The lines that say something: of a file, of standard input ("-"), or of the text itself."""
    if text == "-":
        content, where = sys.stdin.read(), "on standard input"
    elif is_sentence(text):
        content, where = str(text), "itself"
    else:
        content, where = _read(Path(text)), str(text)
    lines = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not lines:
        raise TargetError(f"the text {where} is empty; it needs at least one line")
    return lines


def is_sentence(text: str | Path) -> bool:
    """Whether it is a text rather than the name of a file: it has a space, and no such file is."""
    return isinstance(text, str) and any(map(str.isspace, text)) and not _exists(text)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # too long for a name
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise TargetError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        advice = "" if path.exists() else "; a text of your own has a space in it"
        raise TargetError(f"cannot read the text {path}: {error.strerror}{advice}") from None


def _neither(target: str) -> str:
    path = Path(target)
    if path.is_file():
        if path.suffix == ".py":
            return (
                f"{target} is a file; name the function in it as "
                f"{path.stem}:FUNCTION, from the folder {path.parent}"
            )
        return f"{target} is a file; a target is the model's folder, or module:function"
    return f"there is no folder {target}; a target is a model folder, or module:function"
