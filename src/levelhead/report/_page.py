"""One HTML file that needs no network: the frame that every page shares."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

# Nothing may be fetched from anywhere, whatever a model's tokens say.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def page(
    title: str,
    body: str,
    data: Any,
    script: str,
    style: str = "",
    *,
    plotly: bool = True,
    packed: Mapping[str, str] | None = None,
    served: bool = False,
) -> str:
    """A whole page: light and dark, for laptops and phones, with plotly.js inside.

    >>> from levelhead.report import page
    >>> script = 'LH.fill("who", LH.data.who)'
    >>> html = page("Hello", '<h1 id="who"></h1>', {"who": "</script>"}, script)
    >>> html.count("</script>")  # plotly, data, base, script; the one in the data is escaped
    4

    title:  plain text
    body:   HTML, trusted: text from elsewhere belongs into data
    data:   anything that JSON can hold; the script finds it as LH.data
    script: JavaScript that fills the body; assets/base.js has what it may use, as LH
    style:  CSS after that of assets/base.css
    plotly: a page that draws by itself is smaller by 4 MB without it
    packed: what is large, by name, as `pack` compresses it; LH.unpack(name) promises its bytes
    served: it may ask the server that it came from
    """
    blocks = "".join(
        f'<script type="text/plain" id="{name}">{content}</script>\n'
        for name, content in (packed or {}).items()
    )
    charts = f"<script>{_plotly()}</script>\n" if plotly else ""
    policy = f"{_POLICY}; connect-src 'self'" if served else _POLICY
    icon = '<link rel="icon" href="data:,">\n' if served else ""  # or it would be asked for
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{icon}<title>{escape(title)}</title>
<style>
{asset("base.css")}{style}</style>
{charts}</head>
<body>
<div class="page">
<noscript><p>This page draws itself with JavaScript, which is turned off here.</p></noscript>
{body}
</div>
<script type="application/json" id="data">{embed(data)}</script>
{blocks}<script>
{asset("base.js")}</script>
<script>
{script}</script>
</body>
</html>
"""


def asset(name: str) -> str:
    """A file of the assets folder."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def embed(data: Any) -> str:
    """JSON that can stand in a script element: no '<' in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _plotly() -> str:
    # Slow, and needed only here.
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # noqa: PLC0415

    source: str = get_plotlyjs()
    return source.replace("</script", "<\\/script")


@cache
def packed_plotly() -> str:
    """plotly.js at a third of its size, for a page that unpacks it: base64 of gzip."""
    return base64.b64encode(gzip.compress(_plotly().encode(), mtime=0)).decode()
