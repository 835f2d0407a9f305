"""Watching a model: every attention call is intercepted, sorted into steps, and judged."""

from ._calls import Call
from ._driven import DrivenWatch
from ._listen import listen
from ._watch import watch

__all__ = ["Call", "DrivenWatch", "listen", "watch"]
