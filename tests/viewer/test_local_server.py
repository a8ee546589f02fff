"""The server for pages on this machine: who may ask, what is refused, files in pieces."""

from __future__ import annotations

import http.client
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from panorgan.errors import DataError
from panorgan.viewer.local_server import LocalServer, Request, Response, as_json, html


def _refuse(_: Request) -> Response:
    raise DataError("Not so.", code="not-3d", fix="Otherwise.")


@pytest.fixture
def big_file(tmp_path: Path) -> Path:
    path = tmp_path / "big.bin"
    path.write_bytes(bytes(range(256)) * 8192)  # 2 MiB: more than one piece
    return path


@pytest.fixture
def server(big_file: Path) -> Iterator[LocalServer]:
    routes = {
        "": lambda _: html("<p>first"),
        "ask": lambda request: as_json({"parts": request.parts, "query": dict(request.query)}),
        "file": lambda _: Response(big_file),
        "events": lambda _: Response((f"data: {i}\n\n".encode() for i in range(3)), "text/event-stream"),
        "refuse": _refuse,
        "break": lambda _: 1 / 0,
    }
    with LocalServer(routes) as local:
        yield local


def _get(server: LocalServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def test_pages_come_with_the_headers_that_keep_other_pages_out(server: LocalServer) -> None:
    status, headers, body = _get(server, f"/{server.token}/")
    assert (status, body) == (200, b"<p>first")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"  # the token stands in the address
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "", "/ask", "/{short}/", "/{token}x/", "/x/{token}/", "/../{token}/"])
def test_every_address_needs_the_token(server: LocalServer, path: str) -> None:
    status, _, body = _get(server, path.format(token=server.token, short=server.token[:-1]) or "*")
    assert status == 403
    assert server.token.encode() not in body


def test_tokens_differ_and_are_long() -> None:
    one, two = LocalServer({}), LocalServer({})
    try:
        assert one.token != two.token
        assert len(one.token) >= 32
    finally:
        one.stop()
        two.stop()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}", ""]
)
def test_a_request_under_another_name_is_refused(server: LocalServer, host: str) -> None:
    status, _, _ = _get(server, f"/{server.token}/", Host=host.format(port=server.port))
    assert status == 403


def test_the_name_localhost_is_this_machine(server: LocalServer) -> None:
    assert _get(server, f"/{server.token}/", Host=f"localhost:{server.port}")[0] == 200


def test_scripts_of_other_pages_are_refused(server: LocalServer) -> None:
    own = f"http://127.0.0.1:{server.port}"
    assert _get(server, f"/{server.token}/", Origin=own)[0] == 200
    for other in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}"):
        assert _get(server, f"/{server.token}/", Origin=other)[0] == 403


def test_only_reading_is_possible(server: LocalServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert _get(server, f"/{server.token}/", method)[0] == 501


def test_it_listens_on_this_machine_only(server: LocalServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert server._http.server_address[0] == "127.0.0.1"


def test_routes_get_the_parts_and_the_query(server: LocalServer) -> None:
    _, _, body = _get(server, f"/{server.token}/ask/a%2Fb/..?organ=liver&x=1")
    assert body == b'{"parts": ["a/b", ".."], "query": {"organ": "liver", "x": "1"}}'
    assert _get(server, f"/{server.token}/nothing")[0] == 404


def test_errors_become_answers(server: LocalServer) -> None:
    status, _, body = _get(server, f"/{server.token}/refuse")
    assert status == 422
    assert b'"code": "not-3d"' in body
    status, _, body = _get(server, f"/{server.token}/break")
    assert status == 500
    assert b"division" not in body


def test_a_file_comes_whole_and_in_ranges(server: LocalServer, big_file: Path) -> None:
    content, path = big_file.read_bytes(), f"/{server.token}/file"
    status, headers, body = _get(server, path)
    assert (status, body) == (200, content)
    assert headers["Accept-Ranges"] == "bytes"
    for asked, piece in {
        "bytes=0-9": content[:10],
        "bytes=1500000-": content[1500000:],
        "bytes=-5": content[-5:],
        "bytes=2097150-9999999": content[2097150:],
    }.items():
        status, headers, body = _get(server, path, Range=asked)
        assert (status, body) == (206, piece), asked
        assert headers["Content-Range"].endswith(f"/{len(content)}")
    for asked in ("bytes=2097152-", "bytes=9-3", "bytes=-0"):
        assert _get(server, path, Range=asked)[0] == 416, asked
    assert _get(server, path, Range="bytes=0-1,4-5")[0] == 200  # several ranges: the whole file is a right answer


def test_asking_for_the_head_sends_no_body(server: LocalServer, big_file: Path) -> None:
    status, headers, body = _get(server, f"/{server.token}/file", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == big_file.stat().st_size


def test_events_come_one_by_one_and_the_connection_stays_usable(server: LocalServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for _ in range(2):
        connection.request("GET", f"/{server.token}/events")
        response = connection.getresponse()
        assert response.getheader("Transfer-Encoding") == "chunked"
        assert response.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    connection.close()


def test_endless_events_end_with_the_server() -> None:
    local: LocalServer

    def ticks(_: Request) -> Response:
        return Response(
            b"tick" for _ in itertools.takewhile(lambda _: not local.stopping.wait(0.01), itertools.count())
        )

    local = LocalServer({"ticks": ticks})
    local.start()
    connection = http.client.HTTPConnection("127.0.0.1", local.port, timeout=20)
    connection.request("GET", f"/{local.token}/ticks")
    response = connection.getresponse()
    assert response.read(4) == b"tick"
    local.stop()
    rest = response.read()
    assert set(rest.replace(b"tick", b"x")) <= {ord("x")}
    connection.close()


def test_a_stopped_server_gives_its_port_back() -> None:
    local = LocalServer({"": lambda _: html("x")})
    local.start()
    port = local.port
    local.stop()
    with LocalServer({"": lambda _: html("y")}, port) as again:
        assert again.port == port


def test_a_connection_kept_open_is_not_answered_by_a_stopped_server() -> None:
    server = LocalServer({"": lambda request: html("page")})
    with server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", f"/{server.token}/")
        assert connection.getresponse().read() == b"page"
    connection.request("GET", f"/{server.token}/")
    with pytest.raises(http.client.RemoteDisconnected):
        connection.getresponse()
