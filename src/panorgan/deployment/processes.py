"""Run a server or a site in the foreground, from its kit."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from panorgan.deployment.folders import Kit, ServerKit, SiteKit
from panorgan.errors import ConfigError, RunError
from panorgan.federation.files import write_atomically

_RESTART_AFTER = 5.0
_STOP_WITHIN = 15.0
_LINUX_PARENT_DEATH_SIGNAL = 1

OnLine = Callable[[str], None]


def run_server(kit: ServerKit, on_line: OnLine | None = None) -> int:
    """Run the server until it is stopped; returns its exit code."""
    return _run(kit, on_line)


def run_site(kit: SiteKit, on_line: OnLine | None = None) -> int:
    """Run a site until it is stopped. If the engine ends by itself (no server yet), it is started again."""
    return _run(kit, on_line, again=True)


def stop_process(kit: Kit) -> bool:
    """Stop what runs from this kit on this machine; returns whether something did."""
    if (process := running_process(kit)) is None:
        return False
    os.kill(process, signal.SIGTERM)
    ends = time.monotonic() + _STOP_WITHIN + 5
    while time.monotonic() < ends and running_process(kit) is not None:
        time.sleep(0.1)
    return True


def running_process(kit: Kit) -> int | None:
    """Process id of what runs from this kit on this machine."""
    try:
        process = int(kit.process_id.read_text())
        os.kill(process, 0)
        command = Path(f"/proc/{process}/cmdline")
        # After a reboot the number may belong to somebody else.
        return process if not command.exists() or b"panorgan" in command.read_bytes() else None
    except (OSError, ValueError):
        return None


def _run(kit: Kit, on_line: OnLine | None, again: bool = False) -> int:
    script = kit.startup / "sub_start.sh"
    if not script.is_file():
        raise ConfigError(
            "This is not a kit of a server or a site.",
            where=str(kit.path),
            why="startup/sub_start.sh is missing",
            fix="Point to the folder that 'panorgan federation init' made for this machine.",
        )
    if (other := running_process(kit)) is not None and other != os.getpid():
        raise RunError(
            "Something runs from this kit already.", where=str(kit.path), why=f"process {other}", fix="Stop it first."
        )
    write_atomically(kit.process_id, str(os.getpid()))
    try:
        while True:
            code, stopped = _run_once(kit, script, on_line)
            if stopped or not again:
                return 0 if stopped else code
            if on_line:
                on_line(f"the connection ended; trying again in {_RESTART_AFTER:.0f} seconds")
            time.sleep(_RESTART_AFTER)
    finally:
        kit.process_id.unlink(missing_ok=True)


def _run_once(kit: Kit, script: Path, on_line: OnLine | None) -> tuple[int, bool]:
    """Exit code, and whether somebody asked for the end."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    engine_log = (kit.path / "engine.out").open("ab")
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        _end(process)

    with engine_log:
        process = subprocess.Popen(
            ["bash", str(script), "--once"],
            cwd=kit.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=engine_log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if on_line:
                on_line(f"running, process {process.pid}; the engine's own words are in engine.out and log.txt")
            return process.wait(), stopped
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the whole process group to end; insist if it does not."""
    for number, patience in ((signal.SIGTERM, _STOP_WITHIN), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            break
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _die_with_parent() -> None:
    """On Linux: if this process is killed, its child must not go on by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_LINUX_PARENT_DEATH_SIGNAL, signal.SIGKILL)
