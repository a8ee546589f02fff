"""A small web server for the browser of this machine: pages of panorgan that need more than a file.

It listens on 127.0.0.1 only. Every address begins with a random token, so relative links carry it and another user of
the machine cannot guess it. A request whose Host header is not this server's is refused: a page from elsewhere may let
its own name point at 127.0.0.1 (DNS rebinding), and would send that name. Routes get names and ids, never paths of
files.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from panorgan.errors import PanorganError

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
# Scripts, styles and data of this server; nothing inline, nothing from elsewhere. Workers and pictures may be made by
# the page itself.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PIECE = 1 << 20
_IDLE_SECONDS = 60
_RANGE = re.compile(r"bytes=(\d*)-(\d*)$")


@dataclass(frozen=True)
class Request:
    """What a route is asked: the parts of the address behind its name, and the query."""

    parts: tuple[str, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """What a route answers. A file goes in pieces, and in ranges on request; an iterable as its pieces come."""

    body: bytes | Path | Iterable[bytes]
    content_type: str = "application/octet-stream"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    policy: str = CONTENT_POLICY


Route = Callable[[Request], Response]


def html(text: str, policy: str = CONTENT_POLICY) -> Response:
    """A page."""
    return Response(text.encode(), "text/html; charset=utf-8", policy=policy)


def as_json(content: Any, status: int = HTTPStatus.OK) -> Response:
    """Data for a script. Numbers that JSON does not have must be None already."""
    return Response(json.dumps(content, allow_nan=False).encode(), "application/json", status)


def not_found() -> Response:
    """Nothing of that name or id."""
    return Response(b"not found", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)


class LocalServer:
    """Answers GET requests for `<url>NAME/part/part?query` by `routes[NAME]`; the name of the first page is "".

    Parameters
    ----------
    routes : name → what answers it. Called in several threads at once.
    port : 0 takes a free one.

    `stopping` is set before the server stops: an answer that goes on for long (events) looks at it.
    """

    def __init__(self, routes: Mapping[str, Route], port: int = 0) -> None:
        self.routes = dict(routes)
        self.token = secrets.token_urlsafe(24)
        self.stopping = threading.Event()
        self._http = _Http((ADDRESS, port), self)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """The address of the first page, token included. Ends with a slash."""
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def start(self) -> None:
        """Begin to answer, in threads of this process."""
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing more, and give the port back."""
        self.stopping.set()
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()

    def wait(self, seconds: float | None = None) -> None:
        """Until `stop`, or for so many seconds."""
        self.stopping.wait(seconds)

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def answer(self, target: str) -> Response:
        """The response to a path with its query, token included."""
        address = urlsplit(target)
        token, _, path = address.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return Response(b"no such address", "text/plain; charset=utf-8", HTTPStatus.FORBIDDEN)
        name, *rest = [unquote(part) for part in path.split("/")]
        route = self.routes.get(name)
        if route is None:
            return not_found()
        try:
            return route(Request(tuple(rest), dict(parse_qsl(address.query))))
        except PanorganError as error:
            facts = {"error": error.what, "code": error.code, **dict(error.details())}
            return as_json(facts, HTTPStatus.UNPROCESSABLE_ENTITY)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], local: LocalServer) -> None:
        self.local = local
        super().__init__(address, _Handler)
        self.hosts = {f"{name}:{self.server_address[1]}" for name in (ADDRESS, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection is no error; anything else goes to the log, not to the terminal."""
        log.debug("a request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "panorgan"
    sys_version = ""
    timeout = _IDLE_SECONDS
    server: _Http

    def do_GET(self) -> None:
        if self.server.local.stopping.is_set():  # a connection that the browser kept open: it shall make a new one
            self.close_connection = True
            return
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host not in self.server.hosts or (origin is not None and origin != f"http://{host}"):
            self._send(Response(b"no such host", "text/plain; charset=utf-8", HTTPStatus.FORBIDDEN))
            return
        try:
            response = self.server.local.answer(self.path)
        except Exception:
            log.exception("no answer to a request")
            response = Response(b"this failed", "text/plain; charset=utf-8", HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(response)

    do_HEAD = do_GET  # noqa: N815 - the base class finds methods by these names

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line in the terminal."""

    def _send(self, response: Response) -> None:
        if isinstance(response.body, bytes):
            self._head(response, response.status, {"Content-Length": str(len(response.body))})
            if self.command != "HEAD":
                self.wfile.write(response.body)
        elif isinstance(response.body, Path):
            self._send_file(response, response.body)
        else:
            self._send_pieces(response, response.body)

    def _head(self, response: Response, status: int, more: Mapping[str, str]) -> None:
        self.send_response(status)
        fixed = {**_HEADERS, "Content-Security-Policy": response.policy, "Content-Type": response.content_type}
        for name, value in {**fixed, **response.headers, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_file(self, response: Response, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            wanted = _wanted_range(self.headers.get("Range"), size)
            if wanted is None:
                self._head(response, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, _no_such_range(size))
                return
            first, end = wanted
            more = {"Accept-Ranges": "bytes", "Content-Length": str(end - first)}
            if (first, end) == (0, size):
                self._head(response, response.status, more)
            else:
                more["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
                self._head(response, HTTPStatus.PARTIAL_CONTENT, more)
            if self.command != "HEAD":
                self._copy(file, first, end)

    def _copy(self, file: BinaryIO, first: int, end: int) -> None:
        file.seek(first)
        while first < end:
            piece = file.read(min(_PIECE, end - first))
            if not piece:  # the file became shorter: the browser sees that the rest is missing
                self.close_connection = True
                return
            self.wfile.write(piece)
            first += len(piece)

    def _send_pieces(self, response: Response, pieces: Iterable[bytes]) -> None:
        self._head(response, response.status, {"Transfer-Encoding": "chunked"})
        try:
            if self.command == "HEAD":
                return
            for piece in pieces:
                if piece:  # an empty piece would be the end
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except BaseException:
            self.close_connection = True
            raise
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:  # a generator that was left in the middle gives back what it holds
                close()


def _no_such_range(size: int) -> dict[str, str]:
    return {"Content-Range": f"bytes */{size}", "Content-Length": "0"}


def _wanted_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and end. The whole file where no single range is asked for; None where there is no such range."""
    match = _RANGE.match(header or "")
    if match is None or match.groups() == ("", ""):
        return 0, size
    first, last = match.groups()
    if not first:  # the last bytes of the file
        return (max(0, size - int(last)), size) if int(last) else None
    end = min(size, int(last) + 1) if last else size
    return (int(first), end) if int(first) < end else None
