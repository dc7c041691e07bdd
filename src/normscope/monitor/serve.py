"""Server of the page of a run: on loopback only, for whoever knows its address, and for no other page."""

import contextlib
import errno
import hmac
import json
import secrets
import socketserver
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from normscope.errors import UsageError, describe
from normscope.monitor.page import Document, Figures

LOOPBACK = "127.0.0.1"
_OWN = {None, "none", "same-origin"}
"""Sec-Fetch-Site of a request of the page itself, of an address that was typed, or of no browser."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Server(ThreadingHTTPServer):
    """Server of one page; `serve_forever` answers until it is interrupted.

    Args:
        page: the page.
        figures: what the page asks for.
        port: port to listen on; 0 for a free one.

    Raises:
        UsageError: the port is in use, or may not be used.
    """

    daemon_threads = True

    def __init__(self, page: Document, figures: Figures, port: int = 0) -> None:
        self.page, self.figures = page, figures
        self.token, self.ticket = secrets.token_urlsafe(32), ""
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            said = "in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
            do = "choose another, or leave it out for a free one"
            raise UsageError(f"--port {port} ({said})", "a free port of 1024 or above", do) from error

    def server_bind(self) -> None:
        """Bind, without asking the network for the machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which a request may ask; browsers leave port 80 out."""
        end = "" if self.server_port == 80 else f":{self.server_port}"
        return tuple(f"{name}{end}" for name in (LOOPBACK, "localhost"))

    @property
    def url(self) -> str:
        """Address of the page; it holds the token."""
        return f"http://{self.hosts[0]}/{self.token}/"

    def open_browser(self) -> None:
        """Open the page in a browser, where there is one.

        The browser gets an address that works once: other users of the machine can see its command line.
        """
        self.ticket = secrets.token_urlsafe(32)
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(f"http://{self.hosts[0]}/{self.ticket}")

    def handle_error(self, request: object, client_address: object) -> None:
        """Let go of a connection that broke."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "normscope", ""
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        """Send the page or its figures."""
        address = urlsplit(self.path)
        key, _, rest = address.path.removeprefix("/").partition("/")
        if not self._is_from_own_page():
            self._refuse()
        elif self.server.ticket and _is(key, self.server.ticket):
            self.server.ticket = ""
            self._send(HTTPStatus.SEE_OTHER, "", location=f"/{self.server.token}/")
        elif not _is(key, self.server.token):
            self._refuse()
        elif rest == "":
            page = self.server.page
            self._send(HTTPStatus.OK, page.html, kind="text/html", policy=page.policy)
        elif rest == "data":
            self._send_figures(dict(parse_qsl(address.query)))
        else:
            self._send(HTTPStatus.NOT_FOUND, "not found\n")

    def _other_method(self) -> None:
        key = self.path.removeprefix("/").partition("/")[0]
        if self._is_from_own_page() and _is(key, self.server.token):
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, "GET only\n")
        else:
            self._refuse()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _other_method

    def _is_from_own_page(self) -> bool:
        """Whether no other page can have sent this request: its host is ours, and so is where it comes from.

        A foreign name that resolves to this machine (DNS rebinding) is no host of ours.
        """
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            return False
        origins = self.headers.get_all("Origin", [])
        sites = self.headers.get_all("Sec-Fetch-Site", [None])
        return set(origins) <= {f"http://{hosts[0]}"} and set(sites) <= _OWN

    def _refuse(self) -> None:
        self._send(HTTPStatus.FORBIDDEN, "This page needs the whole address that normscope watch printed.\n")

    def _send_figures(self, asked: dict[str, str]) -> None:
        try:
            status, answer = HTTPStatus.OK, self.server.figures.answer(asked)
        except UsageError as error:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        except Exception as error:  # the page says so, and asks again
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": describe(error)}
        self._send(status, json.dumps(answer, allow_nan=False), kind="application/json")

    def _send(
        self,
        status: HTTPStatus,
        text: str,
        *,
        kind: str = "text/plain",
        policy: str = "default-src 'none'",
        location: str = "",
    ) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        more = {"Location": location} if location else {}
        more |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in (_HEADERS | more | {"Content-Security-Policy": policy}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is none, without repeating any of it."""
        self.close_connection = True
        if not hasattr(self, "request_version") or not self.request_version:
            self.request_version = "HTTP/1.0"
        self.command = self.command or "GET"
        self._send(HTTPStatus(code), f"{HTTPStatus(code).phrase}\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the address holds the token."""


def _is(given: str, secret: str) -> bool:
    """Whether both are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())
