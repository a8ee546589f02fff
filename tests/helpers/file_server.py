"""A file server on the loopback interface that supports ranges, and misbehaves on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """One file. `break_after` bytes of an answer the connection ends, `breaks` times; `ranges` are those asked for."""

    content: bytes
    tag: str = '"v1"'
    break_after: int | None = None
    breaks: int = 0
    status: int = 200
    url: str = ""
    ranges: list[str] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range", "")
        self.ranges.append(asked)
        if self.status != 200:
            request.send_error(self.status)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if request.headers.get("If-Range") != self.tag:
            start = 0
        if start >= len(self.content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(self.content)}")
            request.end_headers()
            return
        body = self.content[start:]
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        if self.tag:
            request.send_header("ETag", self.tag)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if self.break_after is not None and self.breaks > 0:
            self.breaks -= 1
            body = body[: self.break_after]
        request.wfile.write(body)


@contextmanager
def serving(content: bytes, name: str = "set.tar", **how: object) -> Iterator[FileServer]:
    """Serve `content` under any path."""
    files = FileServer(content, **how)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    files.url = f"http://127.0.0.1:{server.server_port}/{name}"
    try:
        yield files
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
