"""Which connections were refused, read from gRPC's trace of its handshakes and from the message filter's log."""

from __future__ import annotations

import pytest

from panorgan.cli.follow import _TURNED_AWAY, translate
from panorgan.federation.transports.nvflare.handshakes import Handshakes, refusal_line

HEAD = "I1115 17:08:29.243122   26181 handshaker.cc:155] CallNextHandshakerLocked: error="
TAIL = (
    " shutdown=false index=2, args={endpoint=0x7f7fe0001b70, args={grpc.internal.endpoint_local_address="
    "ipv4:127.0.0.1:45999, grpc.internal.endpoint_peer_address=PEER, grpc.resource_quota=0x5642}, exit_early=0}"
)
SSL = (
    "UNKNOWN: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:100000c0:SSL routines:OPENSSL_internal:"
)


def failure(why: str, peer: str = "ipv4:10.0.0.7:46260") -> list[str]:
    """As gRPC 1.85 words it, over several lines."""
    trace = ["=== Source Location Trace: ===\n", "src/core/util/status_helper.cc:68\n"]
    return [f"{HEAD}{why}\n", *trace, TAIL.replace("PEER", peer) + "\n"]


def heard(lines: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    away: list[tuple[str, str]] = []
    listener = Handshakes(lambda who, why: away.append((who, why)))
    return away, [line for line in lines if listener.keep(line)]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (f"{SSL}PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate: OK", "it showed no certificate"),
        (
            f"{SSL}CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "its certificate is not valid here: certificate has expired",
        ),
        (f"{SSL}WRONG_VERSION_NUMBER: Invalid certificate verification context: OK", "it did not speak TLS"),
        ("UNAVAILABLE: Handshake read failed (Socket closed)", "it hung up before it had shown a certificate"),
        ("UNKNOWN: something new: OK", "UNKNOWN: something new"),
    ],
)
def test_a_failed_handshake_becomes_one_sentence(said, why):
    assert heard(failure(said)) == ([("10.0.0.7:46260", why)], [])


def test_an_address_of_the_newer_kind():
    away, _ = heard(failure(f"{SSL}HTTP_REQUEST: x: OK", "ipv6:%5B2001:db8::7%5D:46260"))
    assert away == [("[2001:db8::7]:46260", "it did not speak TLS")]


def test_a_handshake_that_went_well_is_not_told():
    well = f"{HEAD}OK{TAIL.replace('PEER', 'ipv4:10.0.0.7:46260')}\n"
    assert heard([well, "I1115 17:08:29.24   1 channel_trace.h:396] handshake manager 0x7f: calling handshaker\n"]) == (
        [],
        [],
    )


def test_everything_else_is_kept():
    own = ["2026-11-15 17:07:48,184 - ClientManager - INFO - joined\n", "Traceback:\n", "E1115 1 other.cc:3] bad\n"]
    lines = [*failure(f"{SSL}HTTP_REQUEST: x: OK"), *own]
    assert heard(lines)[1] == own
    assert heard([lines[0], *own, lines[-1]]) == ([], [*own, lines[-1]]), "no address without its reason"


def test_a_member_that_poses_is_named():
    line = "conn_manager - ERROR - CN00005 authenticated as 'mallory' but claimed endpoint 'north' requires\n"
    assert heard([line]) == ([("mallory", "it said it was north")], [line])


def test_a_refusal_by_the_message_filter_is_found_in_its_log():
    line = f"2026-11-15 17:07:48,184 - ServerMessageFilter - WARNING - {refusal_line('north', 'It was revoked.')}\n"
    assert heard([line]) == ([("north", "It was revoked.")], [line])


def test_the_terminal_says_it_without_the_port():
    line = "2026-11-15 17:28:22,083 turned away 127.0.0.1:45126: it showed no certificate"
    assert translate(line, _TURNED_AWAY) == "turned away 127.0.0.1: it showed no certificate"
    assert translate("… turned away mallory: it said it was north", _TURNED_AWAY) == (
        "turned away mallory: it said it was north"
    )
