"""An HTTP server on the loopback interface that answers as an archive might, and as none should."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class StubArchive:
    """Every request gets the same answer; `asked` are the requests, with their headers."""

    status: int = 200
    body: bytes = b"[]"
    kind: str = "application/dicom+json"
    silent: bool = False
    url: str = ""
    asked: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append((f"{request.command} {request.path}", dict(request.headers.items())))
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.silent:
            self.closing.wait(30)
            return
        request.send_response(self.status)
        request.send_header("Content-Type", self.kind)
        request.send_header("Content-Length", str(len(self.body)))
        request.end_headers()
        request.wfile.write(self.body)


def stored(accepted: list[str], failed: Mapping[str, int]) -> bytes:
    """The answer to a request to store, in DICOM's JSON."""

    def uid(value: str) -> dict[str, Any]:
        return {"00081155": {"vr": "UI", "Value": [value]}}

    answer = {
        "00081199": {"vr": "SQ", "Value": [uid(one) for one in accepted]},
        "00081198": {
            "vr": "SQ",
            "Value": [{**uid(one), "00081197": {"vr": "US", "Value": [why]}} for one, why in failed.items()],
        },
    }
    return json.dumps({tag: content for tag, content in answer.items() if content["Value"]}).encode()


@contextmanager
def answering(certificate: Path | None = None, **how: Any) -> Iterator[StubArchive]:
    """Serve until the block ends; `certificate` holds key and certificate, for https."""
    stub = StubArchive(**how)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stub.answer(self)

        do_POST = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    stub.url = f"{'https://localhost' if certificate else 'http://127.0.0.1'}:{server.server_address[1]}/dicom-web"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
