"""Those who want in and should not: strangers without a certificate, with a foreign one, and members who pose."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loopback import HOST, Loopback

from panorgan.agreement import Agreement
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.kits import make_kits
from panorgan.federation.certificates import Credentials
from panorgan.federation.engine import Participants
from panorgan.federation.transports.nvflare.provision import provision

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How every gRPC client begins: the preface of HTTP/2 and an empty SETTINGS frame."""


@dataclass(frozen=True)
class Knock:
    """A stranger's attempt: from where, and what it got to read."""

    address: str
    received: bytes


def knock(port: int, certificate: Credentials | None = None, encrypted: bool = True) -> Knock:
    """Greet the server as a gRPC client would, and read what it says."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
        address = "{}:{}".format(*plain.getsockname())
        connection: socket.socket = plain
        received = b""
        with contextlib.suppress(OSError):  # a refusal may be a closed connection
            if encrypted:
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                context.set_alpn_protocols(["h2"])
                if certificate is not None:
                    context.load_cert_chain(certificate.certificate, certificate.key)
                connection = context.wrap_socket(plain)
            connection.sendall(GREETING)
            while part := connection.recv(4096):
                received += part
                connection.settimeout(1)
        return Knock(address, received)


def foreign_kit(loopback: Loopback, agreement: Agreement, name: str, folder: Path) -> SiteKit:
    """A kit for the same server and the same name, made by another authority."""
    make_kits(loopback.settings, agreement, folder)
    return SiteKit(folder / "sites" / name)


def member_kit(loopback: Loopback, name: str, folder: Path) -> SiteKit:
    """A kit with a valid certificate of this federation for a name that the coordinator's list lacks."""
    authority = folder / "ca"
    shutil.copytree(loopback.folder / "ca", authority)
    settings = loopback.settings
    people = Participants(
        settings.name, HOST, settings.server.port, settings.server.organization, settings.coordinator, {name: name}
    )
    kits = provision(people, 10, authority, folder)
    return SiteKit(kits.sites[name])


def posing_as(kit: SiteKit, own: str, other: str, folder: Path) -> SiteKit:
    """A copy of a kit in which the site says it were another one."""
    shutil.copytree(kit.path, folder)
    path = folder / "startup" / "fed_client.json"
    text = path.read_text()
    assert f'"fqsn": "{own}"' in text
    path.write_text(text.replace(f'"fqsn": "{own}"', f'"fqsn": "{other}"'))
    return SiteKit(folder)


def bare_engine(kit: SiteKit) -> list[str]:
    """NVFlare's own command for a site, under the name that its settings give."""
    name = json.loads((kit.startup / "fed_client.json").read_text())["client"]["fqsn"]
    start = [sys.executable, "-u", "-m", "nvflare.private.fed.app.client.client_train"]
    said = ["secure_train=true", f"uid={name}", f"org={name}", "config_folder=config"]
    return [*start, "-m", str(kit.path), "-s", "fed_client.json", "--set", *said]


@contextlib.contextmanager
def running(*kits: SiteKit) -> Iterator[None]:
    """NVFlare's own site process from each kit, without panorgan around it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    processes = []
    try:
        for kit in kits:
            scratch = kit.path / "tmp"
            scratch.mkdir()
            with (kit.path / "engine.out").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        bare_engine(kit),
                        cwd=kit.path,
                        env={**os.environ, "PATH": path, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 150) -> None:
    """Until something has happened; an error if it does not."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)


def text_of(path: Path) -> str:
    """A log's content; empty where there is none yet."""
    return path.read_text(errors="replace") if path.is_file() else ""
