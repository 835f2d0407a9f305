"""Results as pages, as text for the terminal, and as JSON."""

from .._files import OutputError, check_output, write_whole
from .._progress import progress
from ._checkup_page import checkup_json, checkup_page
from ._failing import failing
from ._page import asset, packed_plotly, page
from ._run_list import run_list
from ._run_page import run_page, write_run_page
from ._terminal import checkup_text

__all__ = [
    "OutputError",
    "asset",
    "check_output",
    "checkup_json",
    "checkup_page",
    "checkup_text",
    "failing",
    "packed_plotly",
    "page",
    "progress",
    "run_list",
    "run_page",
    "write_run_page",
    "write_whole",
]
