"""Files are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class OutputError(ValueError):
    """A file that cannot be written; the message says why."""


def check_output(path: Path) -> None:
    """Raise `OutputError` before any work is done for a file that cannot be written."""
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: the folder {path.parent} does not allow it")


def write_whole(path: Path, text: str) -> None:
    """Write atomically: into a temporary file, then renamed, so nobody ever reads half of it."""
    check_output(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
