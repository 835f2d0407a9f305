"""The checkup: load a model, run it, and gather the health of every head as one plain dict."""

from ._errors import TargetError
from ._examine import examine
from ._subject import Input, Subject
from ._target import load, load_demo

__all__ = ["Input", "Subject", "TargetError", "examine", "load", "load_demo"]
