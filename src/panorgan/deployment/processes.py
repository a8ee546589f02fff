"""Run a server or a site in the foreground, from its kit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from panorgan.deployment.addresses import refuse_another_address
from panorgan.deployment.approval import require_approved
from panorgan.deployment.engine_command import engine_command, engine_environment
from panorgan.deployment.folders import Kit, ServerKit, SiteKit
from panorgan.deployment.refusals import forget_refusal, raise_refusal
from panorgan.deployment.rotation import rotating
from panorgan.deployment.server_log import AUDIT_LOG, ENGINE_LOG, listen
from panorgan.errors import ConfigError, RunError
from panorgan.federation.files import write_atomically
from panorgan.federation.transports.nvflare.handshakes import SECRETIVE, TRACING

_RESTART_AFTER = 5.0
_STOP_WITHIN = 15.0
_LINUX_PARENT_DEATH_SIGNAL = 1

OnLine = Callable[[str], None]


def run_server(kit: ServerKit, on_line: OnLine | None = None) -> int:
    """Run the server until it is stopped; returns its exit code."""
    refuse_another_address(kit)
    return _run(kit, on_line)


def run_site(kit: SiteKit, on_line: OnLine | None = None) -> int:
    """Run a site until it is stopped. If the engine ends by itself (no server yet), it is started again."""
    return _run(kit, on_line, again=True)


def stop_process(kit: Kit) -> bool:
    """Stop the process of this kit on this machine; returns whether there was one."""
    if (process := running_process(kit)) is None:
        return False
    os.kill(process, signal.SIGTERM)
    ends = time.monotonic() + _STOP_WITHIN + 5
    while time.monotonic() < ends:
        if running_process(kit) is None:
            return True
        time.sleep(0.1)
    raise RunError(
        "The process does not stop.",
        code="does-not-stop",
        where=str(kit.path),
        why=f"process {process} still runs",
        fix=f"End it: kill -9 {process}",
    )


def write_process_id(kit: Kit, process: int) -> None:
    """Record the process of this kit; with its path, because a copy of the kit holds a copy of the record."""
    write_atomically(kit.process_id, f"{process} {kit.path.resolve()}")


def running_process(kit: Kit) -> int | None:
    """Process id of this kit on this machine."""
    try:
        number, _, place = kit.process_id.read_text().partition(" ")
        if place and Path(place) != kit.path.resolve():
            return None
        process = int(number)
        os.kill(process, 0)
        command = Path(f"/proc/{process}/cmdline")
        # After a reboot the number may belong to another process.
        return process if not command.exists() or b"panorgan" in command.read_bytes() else None
    except (OSError, ValueError):
        return None


def _run(kit: Kit, on_line: OnLine | None, again: bool = False) -> int:
    command = engine_command(kit)
    if any(character.isspace() for character in str(kit.path)):
        raise ConfigError(
            "A kit cannot run from a folder with spaces in its path.",
            code="spaces-in-path",
            where=str(kit.path),
            why="the network engine starts its jobs through a command line that would break there",
            fix="Move the kit to a path without spaces.",
        )
    if (other := running_process(kit)) is not None and other != os.getpid():
        raise RunError(
            "A process is running from this kit already.",
            code="already-running",
            where=str(kit.path),
            why=f"process {other}",
            fix="Stop it first.",
        )
    write_process_id(kit, os.getpid())
    try:
        while True:
            if isinstance(kit, SiteKit):
                require_approved(kit)
            with rotating([kit.path / ENGINE_LOG, kit.path / AUDIT_LOG]):
                forget_refusal(kit)
                code, stopped = _run_once(kit, command, on_line)
            if stopped or not again:
                return 0 if stopped else code
            raise_refusal(kit)
            if on_line:
                on_line(f"the connection ended; retrying in {_RESTART_AFTER:.0f} seconds")
            time.sleep(_RESTART_AFTER)
    finally:
        kit.process_id.unlink(missing_ok=True)


def _run_once(kit: Kit, command: list[str], on_line: OnLine | None) -> tuple[int, bool]:
    """Exit code, and whether the end was requested."""
    for folder in ("tmp", "transfer"):  # temporary files of the engine stay in the kit
        (kit.path / folder).mkdir(exist_ok=True)
    environment = engine_environment(kit)
    if isinstance(kit, ServerKit):
        environment |= TRACING
    else:
        environment |= SECRETIVE
    asked_to_stop = threading.Event()
    with (kit.path / ENGINE_LOG).open("ab") as engine_log:
        process = subprocess.Popen(
            command,
            cwd=kit.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if isinstance(kit, ServerKit) else engine_log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    if isinstance(kit, ServerKit):
        assert process.stdout is not None
        listen(process.stdout, kit)
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *about: asked_to_stop.set()) for number in signals}
    try:
        if on_line:
            on_line(f"running, process {process.pid}; the engine's own output is in engine.out and log.txt")
        while process.poll() is None and not asked_to_stop.is_set():
            asked_to_stop.wait(0.2)
        return (0, True) if asked_to_stop.is_set() else (process.returncode, False)
    finally:
        _end(process)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the whole process group; kill it if it does not end."""
    for number, patience in ((signal.SIGTERM, _STOP_WITHIN), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)  # includes processes left by an engine that ended by itself
            process.wait(patience)
            if number == signal.SIGTERM:
                time.sleep(0.2)


def _die_with_parent() -> None:
    """On Linux: if this process is killed, its child must end too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_LINUX_PARENT_DEATH_SIGNAL, signal.SIGKILL)
