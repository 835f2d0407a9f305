"""From what a person types to a model and its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ._errors import TargetError
from ._folder import demo_folder, load_folder
from ._function import load_function
from ._subject import Subject
from ._texts import SENTENCES


def load(target: str | None = None, text: Path | None = None) -> Subject:
    """The model that a target names, with its inputs.

    target: "module:function", a Hugging Face model folder, or None for the demo model
    text:   a file, each line of it an input; for folders and the demo model
    """
    if target is not None and not Path(target).is_dir():
        if ":" not in target:
            raise TargetError(_neither(target))
        if text is not None:
            raise TargetError(
                f"--text is for model folders; the inputs of {target} come from the function itself"
            )
        return load_function(target)
    texts = SENTENCES if text is None else read_texts(text)
    return load_folder(demo_folder() if target is None else Path(target), texts)


def load_demo(texts: Sequence[str]) -> Subject:
    """The demo model with texts of one's own."""
    return load_folder(demo_folder(), texts)


def read_texts(path: Path) -> tuple[str, ...]:
    """The lines of a file that say something."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise TargetError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise TargetError(f"cannot read the text {path}: {error.strerror}") from None
    lines = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not lines:
        raise TargetError(f"the text {path} is empty; it needs at least one line")
    return lines


def _neither(target: str) -> str:
    path = Path(target)
    if path.is_file():
        if path.suffix == ".py":
            return (
                f"{target} is a file; name the function in it as "
                f"{path.stem}:FUNCTION, from the folder {path.parent}"
            )
        return f"{target} is a file; a target is the model's folder, or module:function"
    hint = (
        f"; nothing is downloaded: get the model first, as in 'hf download {target} "
        f"--local-dir {path.name}', then name its folder"
        if target.count("/") == 1 and not target.startswith((".", "/", "~"))
        else "; a target is a model folder, or module:function"
    )
    return f"there is no folder {target}{hint}"
