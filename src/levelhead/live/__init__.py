"""A local page that follows a run while it is written."""

from ._command import live
from ._follow import Follower
from ._server import LiveError, Server

__all__ = ["Follower", "LiveError", "Server", "live"]
