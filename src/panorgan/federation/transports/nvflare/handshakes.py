"""Which connections the server refused, and why: read from the output of NVFlare's server.

A client without a valid certificate fails in the TLS handshake, inside gRPC, and NVFlare's logs do not mention it. gRPC
can trace its handshakes, at length, on the process's output. This reads that output line by line and makes one sentence
of each failure. Such a client has no name that could be trusted, so its address stands for it; a member that claims to
be another one is named as in its certificate.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from panorgan.federation.engine import OnRefused

TRACING = {"GRPC_VERBOSITY": "INFO", "GRPC_TRACE": "handshaker"}
"""Environment in which gRPC traces its handshakes."""

_GRPC_LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] ")
_TRACE = re.compile(r"(handshaker\.cc|channel_trace\.h|ssl_transport_security\.cc|trace\.cc|log\.cc):\d+\] ")
_FAILED = re.compile(r"CallNextHandshakerLocked: error=(?!OK\b)(?P<why>.*)")
_PEER = re.compile(r"endpoint_peer_address=(?:ipv[46]:)?(?P<peer>[^,}]+)")
_MORE = re.compile(r"(=== Source Location Trace: ===\s*|src/core/\S+:\d+| shutdown=.*|\s*)$")
_POSES = re.compile(r"authenticated as '(?P<name>[^']*)' but claimed endpoint '(?P<claimed>[^']*)'")
_REFUSED = re.compile(r"message filter refused (?P<name>\S+): (?P<why>.*\S)")

_WORDS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not valid here",
    "WRONG_VERSION_NUMBER": "it did not speak TLS",
    "HTTP_REQUEST": "it did not speak TLS",
    "Handshake read failed": "it hung up before it had shown a certificate",
}


def refusal_line(site: str, why: str) -> str:
    """How the server's message filter logs a refusal, for `Handshakes` to find."""
    return f"message filter refused {site}: {why}"


class Handshakes:
    """Reads the server's output; calls `on_refused` for each connection that failed."""

    def __init__(self, on_refused: OnRefused) -> None:
        self._on_refused = on_refused
        self._why = ""
        self._in_trace = False

    def keep(self, line: str) -> bool:
        """Take a line; returns whether it belongs in the log (gRPC's trace of its handshakes does not)."""
        if _GRPC_LINE.match(line):
            self._in_trace = bool(_TRACE.search(line))
            self._why = found["why"].strip() if (found := _FAILED.search(line)) else ""
        elif self._in_trace and not _MORE.match(line):
            self._in_trace, self._why = False, ""
        if self._why and (peer := _PEER.search(line)):
            self._on_refused(unquote(peer["peer"]), _plainly(self._why))
            self._why = ""
        if claimed := _POSES.search(line):
            self._on_refused(claimed["name"], f"it said it was {claimed['claimed']}")
        if refused := _REFUSED.search(line):
            self._on_refused(refused["name"], refused["why"])
        return not self._in_trace


def _plainly(why: str) -> str:
    """The reason in plain words, and what OpenSSL says behind it."""
    for word, plain in _WORDS.items():
        if word in why:
            detail = why.partition(f"{word}: ")[2].removesuffix(": OK") if word == "CERTIFICATE_VERIFY_FAILED" else ""
            return f"{plain}: {detail}" if detail else plain
    return why.removesuffix(": OK")
