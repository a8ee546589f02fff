"""A federation's authority, kits and a server that greets, without the network engine; everything on 127.0.0.1."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from panorgan.agreement import Agreement
from panorgan.deployment.approval import record
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.federation.certificates import Credentials
from panorgan.federation.egress import default_policy, policy_text
from panorgan.federation.transports.nvflare.policies import SERVER_CLASSES

SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def in_days(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


class Authority:
    """Signs certificates, valid from `begin` to `end` in days from now."""

    def __init__(self, name: str = "pilot") -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self.name, self.key.public_key(), -400, 400, ca=True)

    def _sign(self, subject, public_key, begin: float, end: float, host: str = "", ca: bool = False):
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(in_days(begin))
            .not_valid_after(in_days(end))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if host:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def write(
        self, folder: Path, name: str, kind: str = "client", begin: float = -1, end: float = 300, host: str = ""
    ) -> Credentials:
        """`client.crt`, `client.key` and `rootCA.pem`, as in a kit's startup folder."""
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key.public_key(), begin, end, host)
        pem = serialization.Encoding.PEM
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / f"{kind}.crt").write_bytes(certificate.public_bytes(pem))
        (folder / f"{kind}.key").write_bytes(key.private_bytes(pem, *form))
        (folder / f"{kind}.key").chmod(0o600)
        (folder / "rootCA.pem").write_bytes(self.certificate.public_bytes(pem))
        return Credentials(folder / f"{kind}.crt", folder / f"{kind}.key", folder / "rootCA.pem")


def write_site_kit(
    folder: Path, authority: Authority, agreement: Agreement, data: Path, port: int, **changes: object
) -> SiteKit:
    """A site's kit with everything that preflight looks at, approved; `changes` go into site.yaml."""
    kit = SiteKit(folder)
    authority.write(kit.startup, "north")
    kit.local.mkdir()
    content = {
        "federation": "pilot",
        "name": "north",
        "server": f"localhost:{port}",
        "experiment_fingerprint": agreement.fingerprint(),
        "data": {"folder": str(data)},
        "hardware": {"device": "cpu", "workers": 1},
        "min_free_disk_gb": 0,
    }
    kit.settings.write_text(yaml.safe_dump({**content, **changes}))
    kit.experiment.write_text(yaml.safe_dump(agreement.as_json()))
    method = agreement.method["name"]
    kit.egress_policy.write_text(policy_text(default_policy(method), method))
    record(kit)
    return kit


def write_server_kit(folder: Path, agreement: Agreement, port: int = 8002, **changes: object) -> ServerKit:
    """A server's kit without certificates; `changes` go into coordinator.yaml."""
    kit = ServerKit(folder)
    kit.local.mkdir(parents=True)
    content = {
        "federation": "pilot",
        "coordinator": "ada@example.org",
        "host": "localhost",
        "port": port,
        "sites": {"north": {}, "south": {}, "west": {"joins_later": True}},
        "experiment_fingerprint": agreement.fingerprint(),
    }
    kit.settings.write_text(yaml.safe_dump({**content, **changes}))
    kit.experiment.write_text(yaml.safe_dump(agreement.as_json()))
    (kit.local / "resources.json").write_text(json.dumps({"class_allow_list": SERVER_CLASSES}))
    return kit


@dataclass
class Greeter:
    """What the server says after the handshake, and what it offers."""

    answer: bytes = SETTINGS_FRAME
    protocols: tuple[str, ...] = ("h2",)


@contextlib.contextmanager
def tls_server(own: Credentials, greeter: Greeter | None = None) -> Iterator[int]:
    """Asks for a certificate of the same authority, waits for a greeting and answers; yields its port."""
    greeter = greeter or Greeter()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    context.load_verify_locations(own.root)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(list(greeter.protocols))

    def greet(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(100)
            secured.sendall(greeter.answer)

    with listening(greet) as port:
        yield port


@contextlib.contextmanager
def listening(serve) -> Iterator[int]:
    """Calls `serve(connection)` for every connection, one after the other; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        ended = threading.Event()

        def accept() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    connection.settimeout(5)
                    with connection:
                        serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
