"""Levelhead for Hugging Face models: `register()`, then attn_implementation="levelhead".

In a Trainer: `Trainer(callbacks=[WatchCallback()])`, or `watch_trainer(trainer)` for its trackers.

Importing this imports neither transformers nor torch; calling `register` does, and so does asking
for `WatchCallback` or `watch_trainer`.
"""

from typing import TYPE_CHECKING, Any

from ._register import NAME, load, register, supports

if TYPE_CHECKING:
    from ._callback import WatchCallback, watch_trainer

__all__ = ["NAME", "WatchCallback", "register", "supports", "watch_trainer"]


def __getattr__(name: str) -> Any:
    if name in ("WatchCallback", "watch_trainer"):
        return getattr(load("_callback"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
