"""Run a server or a site in the foreground, from its kit: with installed code, and nothing from the kit's folder."""

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
from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import Kit, ServerKit, SiteKit
from panorgan.deployment.refusals import forget_refusal, raise_refusal
from panorgan.deployment.rotation import rotating
from panorgan.deployment.server_log import ENGINE_LOG, keep_output
from panorgan.errors import ConfigError, RunError
from panorgan.federation.engine import EngineProcess
from panorgan.federation.files import write_atomically

_RESTART_AFTER = 5.0
_STOP_WITHIN = 15.0
_LINUX_PARENT_DEATH_SIGNAL = 1

INSTALLED_CODE_ONLY = {"PYTHONSAFEPATH": "1"}
"""Environment in which Python, and every Python that it starts, leaves the working folder out of its path."""

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
        # After a reboot another process may have the number.
        return process if not command.exists() or b"panorgan" in command.read_bytes() else None
    except (OSError, ValueError):
        return None


def engine_command(process: EngineProcess) -> list[str]:
    """Its command line. With `-P` Python leaves the working folder, which is the kit, out of its path."""
    return [sys.executable, "-P", "-u", "-m", process.module, *process.arguments]


def engine_environment(kit: Kit, process: EngineProcess) -> dict[str, str]:
    """The environment of the engine and of all that it starts."""
    environment = {**os.environ, "TMPDIR": str(kit.path / "tmp")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment.setdefault("MALLOC_ARENA_MAX", "4")  # glibc would otherwise keep memory that it no longer needs
    environment |= process.environment
    folders = environment.pop("PYTHONPATH", "").split(os.pathsep)
    if allowed := [folder for folder in folders if _may_be_on_path(folder, kit)]:
        environment["PYTHONPATH"] = os.pathsep.join(allowed)
    return {**environment, **INSTALLED_CODE_ONLY}


def _may_be_on_path(folder: str, kit: Kit) -> bool:
    """An empty or relative entry means the working folder, which is the kit."""
    return Path(folder).is_absolute() and not Path(folder).resolve().is_relative_to(kit.path.resolve())


def _run(kit: Kit, on_line: OnLine | None, again: bool = False) -> int:
    process = network_engine().process(kit.path, "server" if isinstance(kit, ServerKit) else "site")
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
            fix=f"Stop it first: Ctrl-C in its terminal, or 'panorgan federation stop {kit.path}'.",
        )
    write_process_id(kit, os.getpid())
    try:
        while True:
            if isinstance(kit, SiteKit):
                require_approved(kit)
            with rotating([kit.path / log for log in (ENGINE_LOG, *process.logs)]):
                forget_refusal(kit)
                code, stopped = _run_once(kit, process, on_line)
            if stopped or not again:
                return 0 if stopped else code
            raise_refusal(kit)
            if on_line:
                on_line(f"the connection ended; retrying in {_RESTART_AFTER:.0f} seconds")
            time.sleep(_RESTART_AFTER)
    finally:
        kit.process_id.unlink(missing_ok=True)


def _run_once(kit: Kit, engine: EngineProcess, on_line: OnLine | None) -> tuple[int, bool]:
    """Exit code, and whether the user asked for the end."""
    for folder in ("tmp", *engine.folders):
        (kit.path / folder).mkdir(exist_ok=True)
    asked_to_stop = threading.Event()
    with (kit.path / ENGINE_LOG).open("ab") as engine_log:
        process = subprocess.Popen(
            engine_command(engine),
            cwd=kit.path,
            env=engine_environment(kit, engine),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if engine.read_output else engine_log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    if engine.read_output:
        assert process.stdout is not None
        keep_output(process.stdout, ServerKit(kit.path), engine.read_output)
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
    """Ask the whole process group to end; kill it if it does not."""
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
