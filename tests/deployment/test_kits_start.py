"""NVFlare starts from the kits, wherever they lie."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit_making import EXPERIMENT, federation

pytest.importorskip("nvflare", reason="the network extra is not installed")

import psutil

from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kits import make_kits
from panorgan.deployment.processes import engine_command, engine_environment

ASK_WHO_IS_THERE = """
import json, sys, time
from nvflare.fuel.flare_api.flare_api import new_secure_session
until = time.monotonic() + 150
while True:
    try:
        session = new_secure_session("ada@example.org", sys.argv[1], timeout=30)
        break
    except Exception:
        if time.monotonic() > until:
            raise
while len(names := sorted(client.name for client in session.get_system_info().client_info)) < 2:
    if time.monotonic() > until:
        break
    time.sleep(0.2)
print("\\n" + json.dumps(names))
session.close()
"""


def start(path: Path, scratch: Path) -> subprocess.Popen[bytes]:
    kit = ServerKit(path) if path.name == "server" else SiteKit(path)
    engine = network_engine().process(path, "server" if path.name == "server" else "site")
    with (path / "engine.out").open("wb") as output:
        return subprocess.Popen(
            engine_command(engine),
            cwd=path,
            env={**engine_environment(kit, engine), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def listening(process: subprocess.Popen[bytes]) -> set[str]:
    """Addresses on which a process and its children listen."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    sockets = [connection for one in family for connection in one.net_connections("inet")]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts the engine as on a Linux server")
def test_the_engine_starts_from_kits_that_were_moved(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = federation(server={"host": "localhost", "port": port})
    make_kits(settings, EXPERIMENT, tmp_path / "made here")
    home = tmp_path / "moved"
    (tmp_path / "made here").rename(home)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    kits = [home / "server", home / "sites" / "north", home / "sites" / "east-2"]
    processes = []
    try:
        processes = [start(kit, scratch) for kit in kits]
        asked = subprocess.run(
            [sys.executable, "-c", ASK_WHO_IS_THERE, str(home / "server" / "admin")],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert asked.stdout.splitlines()[-1] == '["east-2", "north"]', asked.stderr
        assert [listening(process) - {"127.0.0.1", "::ffff:127.0.0.1"} for process in processes] == [set()] * 3
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (home / "server" / "storage" / "jobs").is_dir()
    assert (home / "server" / "storage" / "snapshots").is_dir()
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "made here").exists()
    assert all((kit / "log.txt").stat().st_size for kit in kits)
