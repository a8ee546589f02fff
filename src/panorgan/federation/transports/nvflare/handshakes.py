"""Who was turned away at the server's door, and why.

A stranger fails in the TLS handshake, inside gRPC, before NVFlare hears of it: NVFlare's logs are silent about it. gRPC
can tell its handshakes, at length, on the engine's own output. This reads that output line by line and makes one
sentence of each failure. A stranger has no name that could be believed, so it is known by its address; a member that
poses as another one is known by the name in its certificate.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote

TRACING = {"GRPC_VERBOSITY": "INFO", "GRPC_TRACE": "handshaker"}
"""Environment in which gRPC tells its handshakes."""

SECRETIVE = {"NVFLARE_SECURE_LOGGING": "true"}
"""Environment in which NVFlare tells the server the kind of an error at a site, and not its text."""

OnTurnedAway = Callable[[str, str], None]
"""Takes who it was (an address or a name) and why."""

_GRPC_LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] ")
_TRACE = re.compile(r"(handshaker\.cc|channel_trace\.h|ssl_transport_security\.cc|trace\.cc|log\.cc):\d+\] ")
_FAILED = re.compile(r"CallNextHandshakerLocked: error=(?!OK\b)(?P<why>.*)")
_PEER = re.compile(r"endpoint_peer_address=(?:ipv[46]:)?(?P<peer>[^,}]+)")
_MORE = re.compile(r"(=== Source Location Trace: ===\s*|src/core/\S+:\d+| shutdown=.*|\s*)$")
_POSES = re.compile(r"authenticated as '(?P<name>[^']*)' but claimed endpoint '(?P<claimed>[^']*)'")
_REFUSED = re.compile(r"the door turned away (?P<name>\S+): (?P<why>.*\S)")

_WORDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not valid here",
    "WRONG_VERSION_NUMBER": "it did not speak TLS",
    "HTTP_REQUEST": "it did not speak TLS",
    "Handshake read failed": "it hung up before it had shown a certificate",
}


class Handshakes:
    """Listens to the engine's output."""

    def __init__(self, on_turned_away: OnTurnedAway) -> None:
        self._on_turned_away = on_turned_away
        self._why = ""
        self._in_trace = False

    def keep(self, line: str) -> bool:
        """Take a line; returns whether it is worth keeping (gRPC's tale of its handshakes is not)."""
        if _GRPC_LINE.match(line):
            self._in_trace = bool(_TRACE.search(line))
            self._why = found["why"].strip() if (found := _FAILED.search(line)) else ""
        elif self._in_trace and not _MORE.match(line):
            self._in_trace, self._why = False, ""
        if self._why and (peer := _PEER.search(line)):
            self._on_turned_away(unquote(peer["peer"]), _plainly(self._why))
            self._why = ""
        if posed := _POSES.search(line):
            self._on_turned_away(posed["name"], f"it said it was {posed['claimed']}")
        if refused := _REFUSED.search(line):
            self._on_turned_away(refused["name"], refused["why"])
        return not self._in_trace


def _plainly(why: str) -> str:
    """The reason in plain words, and what OpenSSL says behind it."""
    for word, plain in _WORDS.items():
        if word in why:
            detail = why.partition(f"{word}: ")[2].removesuffix(": OK") if word == "CERTIFICATE_VERIFY_FAILED" else ""
            return f"{plain}: {detail}" if detail else plain
    return why.removesuffix(": OK")
