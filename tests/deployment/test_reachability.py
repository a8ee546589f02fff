"""Reaching the server: firewall, wrong port, wrong federation and refused certificate are distinguished."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from refusing import refused

pytest.importorskip("cryptography", reason="the network extra is not installed")

from trial_federation import Authority, Greeter, free_port, listening, tls_server

from panorgan.deployment.check import Check
from panorgan.deployment.reachability import Address, Proxy, check_reachability, parse_address
from panorgan.errors import ConfigError
from panorgan.federation.certificates import Credentials


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def site(authority: Authority, tmp_path: Path) -> Credentials:
    return authority.write(tmp_path / "site", "north")


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Credentials:
    return authority.write(tmp_path / "server", "localhost", "server", host="localhost")


def reach(port: int, credentials: Credentials, timeout: float = 5.0) -> list[Check]:
    return check_reachability(parse_address(f"localhost:{port}"), credentials, timeout)


def verdicts(checks: list[Check]) -> list[str]:
    return [check.verdict for check in checks]


def test_both_sides_know_each_other(server: Credentials, site: Credentials) -> None:
    with tls_server(server) as port:
        checks = reach(port, site)
    assert verdicts(checks) == ["ok", "ok", "ok"], checks
    assert checks[2].what.startswith("TLSv1.3")


def test_a_server_of_another_federation_is_named(server: Credentials, tmp_path: Path) -> None:
    """Also what a firewall looks like that opens encrypted connections: IT knows the name of its own authority."""
    ours = Authority("ours").write(tmp_path / "ours", "north")
    with tls_server(server) as port:
        found = reach(port, ours)[2]
    assert (found.verdict, found.code) == ("failed", "server-certificate-foreign")
    # The server asks for a certificate, so what its own was signed by can be seen with TLS 1.3 only.
    assert "'pilot'" in found.what


def test_a_server_that_does_not_accept_our_certificate(server: Credentials, site: Credentials, tmp_path: Path) -> None:
    """With TLS 1.3 the handshake seems fine; only the greeting shows it."""
    stranger = Authority("pilot").write(tmp_path / "stranger", "north")
    mixed = Credentials(stranger.certificate, stranger.key, site.root)
    with tls_server(server) as port:
        found = reach(port, mixed)[2]
    assert (found.verdict, found.code) == ("failed", "certificate-refused")


def test_a_server_that_closes_without_a_word(server: Credentials, site: Credentials) -> None:
    """So does gRPC when it does not accept a certificate."""
    with tls_server(server, Greeter(answer=b"")) as port:
        found = reach(port, site)[2]
    assert (found.verdict, found.code) == ("failed", "certificate-refused")


@pytest.mark.parametrize(
    ("begin", "end", "code"),
    [(-10, -1, "server-certificate-expired"), (2, 10, "server-certificate-not-yet-valid")],
)
def test_dates_of_the_servers_certificate_point_at_the_clock(
    authority: Authority, site: Credentials, tmp_path: Path, begin: float, end: float, code: str
) -> None:
    own = authority.write(tmp_path / "late", "localhost", "server", begin, end, host="localhost")
    with tls_server(own) as port:
        found = reach(port, site)[2]
    assert (found.verdict, found.code) == ("failed", code)
    assert "clock" in found.fix


def test_a_certificate_for_another_name(authority: Authority, site: Credentials, tmp_path: Path) -> None:
    own = authority.write(tmp_path / "named", "elsewhere", "server", host="elsewhere.example.org")
    with tls_server(own) as port:
        found = reach(port, site)[2]
    assert (found.verdict, found.code) == ("failed", "server-certificate-wrong-name")
    assert "'localhost'" in found.what


@pytest.mark.parametrize("greeter", [Greeter(answer=b"HTTP/1.1 400 Bad Request\r\n"), Greeter(protocols=("http/1.1",))])
def test_something_else_listens(server: Credentials, site: Credentials, greeter: Greeter) -> None:
    with tls_server(server, greeter) as port:
        found = reach(port, site)[2]
    assert (found.verdict, found.code) == ("failed", "not-a-federation-server")


def test_something_that_does_not_speak_tls(site: Credentials) -> None:
    with listening(lambda connection: connection.sendall(b"SSH-2.0-hello\r\n")) as port:
        checks = reach(port, site)
    assert verdicts(checks) == ["ok", "ok", "failed"]
    assert checks[2].code == "not-tls"


def test_nothing_listens(site: Credentials) -> None:
    checks = reach(free_port(), site)
    assert verdicts(checks) == ["ok", "failed", "skipped"]
    assert checks[1].code == "connection-refused"


def test_a_firewall_that_drops(site: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(address: object, timeout: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", drop)
    checks = reach(8002, site)
    assert verdicts(checks) == ["ok", "failed", "skipped"]
    assert checks[1].code == "connection-timeout"
    assert all(name in checks[1].fix for name in ("localhost", "8002"))


def test_a_name_that_nobody_knows(site: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> object:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    checks = check_reachability(Address("server.invalid", 8002), site)
    assert verdicts(checks) == ["failed", "skipped", "skipped"]
    assert checks[0].code == "unknown-host"
    assert "'server.invalid'" in checks[0].what


def test_through_a_proxy(server: Credentials, site: Credentials) -> None:
    """The proxy is asked for the server by name, with its login, and everything else passes through it."""
    asked: list[bytes] = []
    with tls_server(server) as port:

        def forward(connection: socket.socket) -> None:
            asked.append(connection.recv(1000))
            with socket.create_connection(("127.0.0.1", port)) as onward:
                connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _pump(connection, onward)

        with listening(forward) as proxy:
            address = Address("localhost", port, Proxy("127.0.0.1", proxy, "ada:secret"))
            checks = check_reachability(address, site, 5.0)
    assert verdicts(checks) == ["ok", "ok", "ok"], checks
    assert all(request.startswith(f"CONNECT localhost:{port}".encode()) for request in asked)
    assert all(b"Proxy-Authorization: Basic YWRhOnNlY3JldA==" in request for request in asked)
    assert "secret" not in "".join(check.what + check.fix for check in checks) + repr(address)


def _pump(first: socket.socket, second: socket.socket) -> None:
    """Carry bytes both ways until one side closes."""
    import select

    while True:
        ready, _, _ = select.select([first, second], [], [], 5)
        if not ready:
            return
        for source in ready:
            content = source.recv(65536)
            if not content:
                return
            (second if source is first else first).sendall(content)


def test_a_proxy_that_refuses(site: Credentials) -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    with listening(refuse) as proxy:
        found = check_reachability(Address("localhost", 8002, Proxy("127.0.0.1", proxy)), site, 5.0)[1]
    assert (found.verdict, found.code) == ("failed", "no-connection")
    assert "403" in found.what


def test_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://ada:se%40cret@proxy.example.org:3128")
    assert parse_address("server.example.org:8002").proxy == Proxy("proxy.example.org", 3128, "ada:se@cret")
    monkeypatch.setenv("no_proxy", "localhost, example.org")
    assert parse_address("server.example.org:8002").proxy is None
    assert parse_address("example.com:8002").proxy is not None


@pytest.mark.parametrize("text", ["server", "server:", ":8002", "server:http"])
def test_an_address_that_is_none(text: str) -> None:
    with refused("bad-address", ConfigError):
        parse_address(text)
