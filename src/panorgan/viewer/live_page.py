"""The page that follows a run: served to this machine's browsers, and kept up to date by server-sent events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import panorgan
from panorgan.viewer.live_log import LogReader
from panorgan.viewer.live_status import LatestStatus, LiveSource
from panorgan.viewer.local_server import LocalServer, Request, Response, not_found

_LOOK_SECONDS = 0.5
_QUIET_SECONDS = 15.0
"""After so long without news the state is sent again, so that both sides notice a lost connection."""
_EVENTS_AT_ONCE = 500
_PASSING = ("time", "eta_seconds")  # these change with the clock alone
_HERE = Path(panorgan.__file__).parent
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_STATIC = {
    "style.css": _HERE / "report" / "style.css",
    **{
        name: _HERE / "viewer" / "live" / name for name in ("live.css", "live.js", "charts.js", "record.js", "words.js")
    },
}


def live_server(source: LiveSource, port: int = 0) -> LocalServer:
    """A server with one page, which any number of browsers may show; not started yet."""
    latest = LatestStatus(source)
    page = (_HERE / "viewer" / "live" / "live.html").read_bytes()

    def events(request: Request) -> Response:
        return Response(stream(latest, server.stopping), "text/event-stream")

    server = LocalServer(
        {"": lambda request: Response(page, "text/html; charset=utf-8"), "static": _static, "events": events}, port
    )
    return server


def stream(latest: LatestStatus, stopping: threading.Event) -> Iterator[bytes]:
    """Server-sent events for one browser: the log from its beginning, then all that is new, and every other state."""
    yield b"retry: 1000\n\n" + _message("reset", {})
    path, reader = None, None
    shown: dict[str, Any] = {}
    last = 0.0
    while not stopping.is_set():
        if reader is None or path != latest.source.events_file:
            if reader is not None:
                yield _message("reset", {})
            path = latest.source.events_file
            reader = LogReader(path)
        begun_again, happened = reader.new()
        if begun_again:
            yield _message("reset", {})
        for first in range(0, len(happened), _EVENTS_AT_ONCE):
            yield _message("log", happened[first : first + _EVENTS_AT_ONCE])
        status = latest().as_json()
        lasting = {key: value for key, value in status.items() if key not in _PASSING}
        if happened or begun_again or lasting != shown or time.monotonic() - last > _QUIET_SECONDS:
            shown, last = lasting, time.monotonic()
            yield _message("status", status)
        stopping.wait(_LOOK_SECONDS)


def _message(kind: str, content: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(content, allow_nan=False)}\n\n".encode()


def _static(request: Request) -> Response:
    path = _STATIC.get("/".join(request.parts))
    return not_found() if path is None else Response(path, _TYPES[path.suffix])
