"""The checkup: load a model, run it, and gather the health of every head as one plain dict."""

from ._errors import TargetError
from ._examine import examine
from ._subject import Input, Subject
from ._target import is_sentence, load, load_demo

__all__ = ["Input", "Subject", "TargetError", "examine", "is_sentence", "load", "load_demo"]
