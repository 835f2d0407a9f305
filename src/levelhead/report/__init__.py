"""Results as pages, as text for the terminal, and as JSON."""

from .._files import OutputError, check_output, write_whole
from .._progress import progress
from ._checkup_page import checkup_json, checkup_page
from ._compare import CompareError, comparison_json, comparison_text
from ._compare_page import compare_page
from ._failing import failing
from ._page import asset, packed_plotly, page
from ._points import Points, plan
from ._run_page import live_page, points_data, run_page, write_run_page
from ._terminal import checkup_text
from ._which import compare_checkups, compare_runs

__all__ = [
    "CompareError",
    "OutputError",
    "Points",
    "asset",
    "check_output",
    "checkup_json",
    "checkup_page",
    "checkup_text",
    "compare_checkups",
    "compare_page",
    "compare_runs",
    "comparison_json",
    "comparison_text",
    "failing",
    "live_page",
    "packed_plotly",
    "page",
    "plan",
    "points_data",
    "progress",
    "run_page",
    "write_run_page",
    "write_whole",
]
