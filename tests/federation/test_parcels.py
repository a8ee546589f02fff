"""Large answers through NVFlare's own download service, between two of its cells in this process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the network extra is not installed")

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.streaming.download_service import ProduceRC
from nvflare.fuel.utils import fobs

from panorgan.federation.transports.nvflare import parcels
from panorgan.federation.transports.nvflare.parcels import Parcel, packed, unpacked

CONTENT = bytes(range(256)) * 500
PIECE = 10_000
"""So that the content takes thirteen of them, and the last one is shorter."""


@pytest.fixture(scope="module")
def cells() -> Iterator[tuple[Cell, Cell]]:
    """A server and a site."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = [
        Cell(
            fqcn=name, root_url=f"tcp://localhost:{port}", secure=False, credentials={}, create_internal_listener=False
        )
        for name in ("server", "east")
    ]
    for cell in made:
        cell.start()
    yield made[0], made[1]
    for cell in made:
        cell.stop()


@pytest.fixture
def deliver(cells: tuple[Cell, Cell], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Send something from the site to the server; gives what arrived."""
    server, site = cells
    monkeypatch.setattr(fobs.get_dot_handler(parcels._KIND), "max_chunk_size", PIECE)
    arrived: list[Any] = []

    def receive(request: CellMessage) -> CellMessage:
        arrived.append(request.payload["message"])
        return make_reply(ReturnCode.OK, body={})

    def send(content: Any) -> Any:
        request = new_cell_message({}, {"message": content})
        reply = site.send_request(channel="test", topic="answer", target="server", request=request, timeout=20)
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK
        return arrived.pop()

    server.register_request_cb(channel="test", topic="answer", cb=receive)
    return send


def test_a_large_answer_arrives_in_pieces(deliver, monkeypatch):
    served = []
    produce = parcels._Pieces.produce

    def watched(self, state, requester):
        code, data, after = produce(self, state, requester)
        served.append(len(data[1]) if data else code)
        return code, data, after

    monkeypatch.setattr(parcels._Pieces, "produce", watched)
    assert unpacked(deliver(packed(CONTENT))) == CONTENT
    assert served == [10_000] * 12 + [8_000, ProduceRC.EOF]


def test_a_small_answer_travels_as_it_is(deliver):
    small = CONTENT[:1000]
    assert packed(small) is small
    assert deliver(packed(small)) == small


def test_a_site_that_breaks_off_has_not_answered(deliver, monkeypatch):
    """NVFlare would end the server's job over an error here, and with it the round of all other sites."""
    produce = parcels._Pieces.produce

    def breaks_off(self, state, requester):
        if state and state["next"] > 3:
            raise OSError("the site was switched off")
        return produce(self, state, requester)

    monkeypatch.setattr(parcels._Pieces, "produce", breaks_off)
    arrived = deliver(packed(CONTENT))
    assert isinstance(arrived, Parcel)
    assert unpacked(arrived) is None


def test_an_error_while_fetching_is_no_answer_either(deliver, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no route to the site")

    monkeypatch.setattr(parcels, "download_object", broken)
    assert unpacked(deliver(packed(CONTENT))) is None


@pytest.mark.parametrize("found", [None, "text", 3, {"content": b""}, Parcel(None)])
def test_what_is_no_answer_is_not_taken_for_one(found):
    assert unpacked(found) is None


def test_without_a_network_a_parcel_is_written_out():
    assert unpacked(fobs.loads(fobs.dumps(Parcel(CONTENT)))) == CONTENT
