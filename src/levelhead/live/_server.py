"""The server of a live page: this machine only, with a token, GET and nothing else."""

from __future__ import annotations

import hmac
import json
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..report import live_page
from ._follow import Follower

HOST = "127.0.0.1"
# The page's own policy, as a header too, where it can also forbid frames.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PATIENCE = 10.0  # seconds for a request to arrive


class LiveError(ValueError):
    """A page that cannot be served; the message says why."""


class Server(ThreadingHTTPServer):
    """Serves one page and its data. `url` is its address, with the token in it.

    A request's path is compared with a few fixed ones and never used for anything else. Its Host
    must be this server's: a name that some site has pointed here (DNS rebinding) is refused.
    """

    def __init__(self, follower: Follower, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self.routes: dict[str, Callable[..., tuple[str, str]]] = {
            "": lambda: ("text/html; charset=utf-8", live_page(follower.path.name)),
            "data": lambda **asked: ("application/json", _json(follower.look(**asked))),
        }
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            advice = "name another one, or none for any that is free"
            raise LiveError(f"port {port} cannot be used ({error.strerror}): {advice}") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who closes the page while it is sent is nothing to tell of."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _PATIENCE
    server_version, sys_version = "levelhead", ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        token, slash, route = asked.path.removeprefix("/").partition("/")
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, "this server answers to its own address only")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "the address lacks its token: use the printed one")
        elif not slash or route not in self.server.routes:
            self._answer(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            query = parse_qs(asked.query)
            known = {k: query[k][0] for k in ("generation", "have", "stamp") if k in query}
            kind, text = self.server.routes[route](**known if route else {})
            self._answer(HTTPStatus.OK, text, kind)

    def __getattr__(self, name: str) -> Any:
        """Every other method, whatever its name, is refused."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered", Allow="GET")

    def _answer(
        self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8", **more: str
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        headers = _HEADERS | more | {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a page that asks every second would fill the terminal."""


def _json(data: Any) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
