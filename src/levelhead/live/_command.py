"""What `levelhead live` does."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path

from ..store import StoreError, read_run
from ._follow import Follower
from ._server import LiveError, Server


def live(path: Path, *, port: int = 0, open_it: bool = True) -> None:
    """Serve the page of the latest run of a store until Ctrl-C; its address is printed first.

    The file need not be there yet, but its folder must: a page may be opened before training.
    """
    _check(path)
    with suppress(KeyboardInterrupt), Server(Follower(path), port) as server:
        print(server.url, flush=True)
        if open_it:
            webbrowser.open(server.url)
        server.serve_forever()


def _check(path: Path) -> None:
    """Raise for what will never be a store."""
    if not path.parent.is_dir():
        raise LiveError(f"there is no folder {path.parent}: make it, or correct the path")
    if path.is_dir() or (path.exists() and path.stat().st_size):
        try:
            read_run(path)
        except StoreError as error:
            if "holds no run yet" not in str(error):
                raise
