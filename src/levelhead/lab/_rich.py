"""Text as HTML."""

from __future__ import annotations

import re
from html import escape


def rich(text: str) -> str:
    r"""Text as HTML, with real subscripts; lines do not break at an equals sign.

    >>> rich("1/√d_k < 1, d_k = 64")
    '1/√d<sub>k</sub> &lt; 1, d<sub>k</sub>\xa0=\xa064'
    """
    whole = re.sub(" ([=±]) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", escape(text, False))
    return re.sub(r"(?<![\w])([dWp])_(model|[a-z])(?![\w])", r"\1<sub>\2</sub>", whole)
