"""`panorgan watch` and `panorgan federation watch`: a page on this machine that follows a run."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.cli.console import say
from panorgan.errors import ConfigError

if TYPE_CHECKING:
    from panorgan.viewer.live_status import LiveSource


def watch_run(folder: Path, port: int, open_page: bool, as_json: bool) -> None:
    """Follow a simulation, or the run in a server's kit, until Ctrl-C."""
    from panorgan.cli.federation import find_kit, server_kit
    from panorgan.viewer.live_status import DrivenRun, SimulatedRun

    place = folder.expanduser().resolve()
    if (place / "local").is_dir() and find_kit(place):
        serve(DrivenRun(server_kit(place, "watch")), port, open_page, as_json)
        return
    source = SimulatedRun(folder.expanduser())
    if not source.run.started and not as_json:
        say(f"There is no run in {folder} yet; the page will show it once it starts.")
    serve(source, port, open_page, as_json)


def serve(source: LiveSource, port: int, open_page: bool, as_json: bool) -> None:
    """Serve the page until Ctrl-C."""
    from panorgan.viewer.live_page import live_server

    try:
        server = live_server(source, port)
    except OSError as error:
        raise ConfigError(
            f"Port {port} of this machine cannot be used.",
            code="page-port-taken",
            why=error.strerror or str(error),
            fix="Choose another with --port, or leave it out.",
        ) from error
    with server:
        if as_json:
            print(json.dumps({"url": server.url}), flush=True)
        else:
            say(f"Live page: {server.url}")
            say("Only browsers on this machine can open it. Ctrl-C closes the page; the run continues.")
            say(f"From another machine: ssh -L {server.port}:127.0.0.1:{server.port} HOST, then open the same address.")
        if open_page and has_screen():
            webbrowser.open(server.url)
        server.wait()


def has_screen() -> bool:
    """Whether a browser has somewhere to appear; over SSH one that draws text would take the terminal."""
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
