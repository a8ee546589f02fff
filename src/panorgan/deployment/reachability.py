"""Can the server be reached from here, in the way of the network engine: name, connection, mutual TLS, HTTP/2.

Nothing but a greeting is sent. Every step names its own cause, because firewall, proxy and certificate belong
to different people in a hospital.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import socket
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from panorgan.deployment.check import Check
from panorgan.errors import ConfigError
from panorgan.federation.certificates import Credentials, issuer_name

TITLES = ("server name", "connection", "encryption")
TIMEOUT_SECONDS = 10.0

# gRPC reads these, in this order, and only the lower-case names.
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_DIRECT_VARIABLES = ("no_grpc_proxy", "no_proxy")

# The client's opening line and an empty settings frame; a server answers with its own settings (frame type 4).
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_FRAME_HEAD = 9
_HTTP2_SETTINGS = 4

# From OpenSSL's x509_vfy.h.
_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_NAME = (62, 64)


@dataclass(frozen=True)
class Proxy:
    """A machine that makes outgoing connections for others. `login` is `user:password`, and never shown."""

    host: str
    port: int
    login: str = field(default="", repr=False)


@dataclass(frozen=True)
class Address:
    """The server's address, and the proxy on the way to it if this machine uses one."""

    host: str
    port: int
    proxy: Proxy | None = None

    @property
    def first_hop(self) -> tuple[str, int]:
        """What this machine connects to."""
        return (self.proxy.host, self.proxy.port) if self.proxy else (self.host, self.port)

    def __str__(self) -> str:
        via = f" through the proxy {self.proxy.host}:{self.proxy.port}" if self.proxy else ""
        return f"{self.host}:{self.port}{via}"


def parse_address(server: str) -> Address:
    """`host:port`, as in site.yaml; the proxy comes from the environment."""
    host, colon, port = server.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(
            f"The server's address {server!r} cannot be used.",
            code="bad-address",
            where="server",
            fix="Write it as host:port.",
        )
    host = host.strip("[]")
    return Address(host, int(port), _proxy_for(host))


def check_reachability(address: Address, credentials: Credentials, timeout: float = TIMEOUT_SECONDS) -> list[Check]:
    """Name, connection and encryption, in that order; what follows a failed one is skipped."""
    checks: list[Check] = []
    for check in (_check_name, _check_connection):
        checks.append(check(address, timeout))
        if checks[-1].verdict == "failed":
            break
    else:
        checks.append(_check_encryption(address, credentials, timeout))
    return checks + [Check(title, "skipped", "the step before it failed") for title in TITLES[len(checks) :]]


def _check_name(address: Address, timeout: float) -> Check:
    host, port = address.first_hop
    whose = "The proxy" if address.proxy else "The server"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or "unknown"
        fix = f"Check the spelling, or ask IT for the DNS entry of {host} (or a line in the hosts file)."
        what = f"{whose}'s name {host!r} cannot be resolved here ({reason})."
        return Check(TITLES[0], "failed", what, fix, "unknown-host")
    addresses = ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
    return Check(TITLES[0], "ok", f"{host} is {addresses}" if addresses != host else f"{host} is an address")


def _check_connection(address: Address, timeout: float) -> Check:
    host, port = address.first_hop
    try:
        with contextlib.closing(_connect(address, timeout)):
            return Check(TITLES[1], "ok", f"connected to {address}")
    except TimeoutError:
        return Check(
            TITLES[1],
            "failed",
            f"No answer from {host}:{port} within {timeout:.0f} s.",
            f"A firewall probably drops it: ask IT to allow outgoing TCP to {address.host} port {address.port}. "
            "Inbound connections are not needed.",
            "connection-timeout",
        )
    except ConnectionRefusedError:
        return Check(
            TITLES[1],
            "failed",
            f"{host} refuses connections at port {port}.",
            "The machine is up and nothing listens: the coordinator must start 'panorgan federation server'. "
            "Some firewalls refuse in the same way.",
            "connection-refused",
        )
    except OSError as error:
        what = f"No connection to {address}: {error.strerror or error}."
        fix = "Check the network and the proxy settings of this machine."
        return Check(TITLES[1], "failed", what, fix, "no-connection")


def _check_encryption(address: Address, credentials: Credentials, timeout: float) -> Check:
    """A real handshake with this participant's certificate, then HTTP/2's greeting.

    With TLS 1.3 the client is done before the server has verified its certificate: only the answer to the greeting
    shows that the server accepts it.
    """
    title = TITLES[2]
    try:
        context = _context(credentials)
    except (OSError, ssl.SSLError):
        return Check(title, "skipped", "certificate or key of this kit cannot be used; see above")
    known = False  # whether the server has presented the right certificate
    try:
        with (
            contextlib.closing(_connect(address, timeout)) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as secured,
        ):
            known = True
            secured.sendall(_HTTP2_GREETING)
            answer = _read(secured, _HTTP2_FRAME_HEAD)
            protocol, version = secured.selected_alpn_protocol(), secured.version()
    except ssl.SSLCertVerificationError as error:
        return _server_not_trusted(title, error, address, timeout)
    except TimeoutError:
        fix = f"Ask IT whether a device between here and {address.host} inspects encrypted connections."
        what = f"Connected, but no answer to a TLS greeting within {timeout:.0f} s."
        return Check(title, "failed", what, fix, "tls-timeout")
    except OSError as error:
        return _broken(title, error, known)
    if not answer:
        return _broken(title, OSError("closed without a reason"), known)
    if protocol != "h2" or len(answer) < _HTTP2_FRAME_HEAD or answer[3] != _HTTP2_SETTINGS:
        fix = f"Check host and port with the coordinator: something else listens at {address.host}:{address.port}."
        what = "The certificates match, but the responder is not a federation server."
        return Check(title, "failed", what, fix, "not-a-federation-server")
    return Check(title, "ok", f"{version}, both sides accept each other's certificate")


def _context(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cafile=str(credentials.root))
    context.load_cert_chain(str(credentials.certificate), str(credentials.key))
    context.set_alpn_protocols(["h2"])
    return context


def _server_not_trusted(title: str, error: ssl.SSLCertVerificationError, address: Address, timeout: float) -> Check:
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        early = error.verify_code == _NOT_YET_VALID
        what = f"The server's certificate is {'not yet valid' if early else 'expired'} by this machine's clock."
        fix = "Check this machine's clock. If it is right, the coordinator must renew the server's certificate."
        code = "server-certificate-not-yet-valid" if early else "server-certificate-expired"
        return Check(title, "failed", what, fix, code)
    if error.verify_code in _WRONG_NAME:
        fix = "Use the name from federation.yaml; the coordinator knows it."
        what = f"The server's certificate is not for {address.host!r}."
        return Check(title, "failed", what, fix, "server-certificate-wrong-name")
    signer = _who_signed(address, timeout)
    by = f" It is signed by {signer!r}." if signer else ""
    return Check(
        title,
        "failed",
        f"The server's certificate is not from this federation.{by}",
        "Either this kit belongs to another federation (ask the coordinator), or a firewall inspects encrypted "
        f"connections: then ask IT to exempt {address.host}:{address.port}.",
        "server-certificate-foreign",
    )


def _who_signed(address: Address, timeout: float) -> str:
    """Name of the authority that signed the responder's certificate; empty if unknown. Trusts and sends nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        from cryptography import x509

        with (
            contextlib.closing(_connect(address, timeout)) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as secured,
        ):
            shown = secured.getpeercert(binary_form=True)
        return issuer_name(x509.load_der_x509_certificate(shown)) if shown else ""
    except (OSError, ValueError, ImportError):
        return ""


def _broken(title: str, error: OSError, known: bool) -> Check:
    """The other side closed it. `known`: after presenting the right certificate, so it rejects ours."""
    reason = (isinstance(error, ssl.SSLError) and error.reason) or error.strerror or str(error)
    reason = reason.lower().replace("_", " ")
    if known or ("alert" in reason and any(word in reason for word in ("unknown ca", "certificate", "access"))):
        return Check(
            title,
            "failed",
            f"It is the right server, but it does not accept this site's certificate ({reason}).",
            "Ask the coordinator, whose server log has the reason: a kit of another federation, or a certificate that "
            "has expired by the server's clock.",
            "certificate-refused",
        )
    if "wrong version number" in reason or "http request" in reason or "record layer" in reason:
        return Check(title, "failed", "The responder does not use TLS.", "Check host and port.", "not-tls")
    return Check(
        title,
        "failed",
        f"The encrypted connection failed ({reason}).",
        "Ask the coordinator whether the server is up, then IT whether a firewall cuts encrypted connections.",
        "tls-broken",
    )


def _connect(address: Address, timeout: float) -> socket.socket:
    """A plain connection, through the proxy where there is one."""
    host, port = address.first_hop
    if address.proxy is None:
        return socket.create_connection((host, port), timeout=timeout)
    tunnel = http.client.HTTPConnection(host, port, timeout=timeout)
    login = address.proxy.login.encode()
    headers = {"Proxy-Authorization": f"Basic {base64.b64encode(login).decode()}"} if login else {}
    tunnel.set_tunnel(address.host, address.port, headers)
    tunnel.connect()
    return tunnel.sock


def _read(secured: ssl.SSLSocket, count: int) -> bytes:
    """Up to `count` bytes; fewer when the other side closes."""
    found = b""
    while len(found) < count and (more := secured.recv(count - len(found))):
        found += more
    return found


def _proxy_for(host: str) -> Proxy | None:
    """The proxy that gRPC would use for this host."""
    url = next((os.environ[name] for name in _PROXY_VARIABLES if os.environ.get(name)), "")
    direct = next((os.environ[name] for name in _DIRECT_VARIABLES if os.environ.get(name)), "")
    exempt = [entry.strip() for entry in direct.split(",") if entry.strip()]
    if not url or any(host == entry or host.endswith(entry if entry[0] == "." else f".{entry}") for entry in exempt):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Proxy(parts.hostname, parts.port or 80, login) if parts.hostname else None
