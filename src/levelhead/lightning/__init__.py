"""Watching a model that Lightning trains: `Trainer(callbacks=[WatchCallback()])`.

For both packages, lightning and pytorch_lightning. Importing this imports neither of them, nor
torch; asking for `WatchCallback` does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._callback import WatchCallback

__all__ = ["WatchCallback"]


def __getattr__(name: str) -> Any:
    if name == "WatchCallback":
        return importlib.import_module("._callback", __name__).WatchCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
