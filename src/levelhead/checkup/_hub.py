"""Models by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from ._errors import TargetError, install, told

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Only data, and only what stands beside config.json: other folders hold the same weights again.
_FILES = ["*.json", "*.txt", "*.model"]


def is_hub_name(target: str) -> bool:
    """Whether it could be a model's name: 'gpt2', 'BAAI/bge-small-en-v1.5'."""
    return _NAME.fullmatch(target) is not None


def download(name: str) -> Path:
    """The folder of a model of the hub, from the cache if it is there; no code is fetched."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415
        from huggingface_hub.errors import RepositoryNotFoundError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise TargetError(
            f"{_no_folder(name)}; a model of the Hugging Face hub needs {install('hf')}"
        ) from error

    def fetch(*weights: str) -> Path:
        patterns = [*_FILES, *weights]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))

    try:
        folder = fetch("*.safetensors")
        return folder if any(folder.glob("*.safetensors")) else fetch("pytorch_model*.bin")
    except RepositoryNotFoundError as error:
        raise TargetError(
            f"{_no_folder(name)}; nor has the Hugging Face hub a model of that name "
            "that may be read without logging in"
        ) from error
    except Exception as error:
        raise TargetError(_unreachable(name, error)) from error


def _no_folder(name: str) -> str:
    return f"there is no folder {name}; a target is a model folder, or module:function"


def _unreachable(name: str, error: BaseException) -> str:
    if "/" not in name:
        return f"{_no_folder(name)}; the Hugging Face hub cannot be reached for one of that name"
    return (
        f"there is no folder {name}, and the Hugging Face hub cannot be reached "
        f"({told(error).partition(':')[0]}), so nothing is downloaded: get the model first, as in "
        f"'hf download {name} --local-dir {Path(name).name}', then name its folder"
    )
