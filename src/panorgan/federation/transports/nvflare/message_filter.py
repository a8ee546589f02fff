"""The message filter: at the server it checks every message before NVFlare handles it, at a site it reads refusals.

NVFlare accepts every holder of a certificate of the federation, and a token that it issued once stays valid. The
server's half is a component of its `resources.json` that puts filters before NVFlare's own handling: it drops a message
of a revoked kit, or answers it with the reason where NVFlare sends an answer. The site's half is a component of the
site's `resources.json`: it sends the machine's id, compares the clocks, and ends the process when the server refuses
it. NVFlare alone would try again for ever, and would not write the reason into any log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.core_cell import make_reply
from nvflare.fuel.f3.cellnet.defs import IdentityChallengeKey, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellChannel, CellChannelTopic, CellMessageHeaderKeys

from panorgan.federation.engine import CERTIFICATES, CLOCK, CLOCK_OFF_SECONDS, REFUSALS, REFUSED
from panorgan.federation.files import write_atomically
from panorgan.federation.revocation import REVOKED, RevocationList
from panorgan.federation.site_identity import IdentityCheck, Refusal
from panorgan.federation.transports.nvflare.handshakes import refusal_line

MACHINE = "panorgan_machine"
"""Under this name a site sends its machine's id, when it registers and with every heartbeat."""

# -- at the server ---------------------------------------------------------------------------------------------------


class ServerMessageFilter(FLComponent):
    """Works in the server's own process, never in a job's."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by NVFlare; at this event the server listens, but has not answered any message yet."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            server = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            kit = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            self.install(server.cell.core_cell, kit, server)

    def install(self, cell: Any, kit: Path, server: Any = None) -> None:
        """Filter what arrives at a cell. NVFlare uses the most specific list of filters only; ours join the general."""
        self._kit, self._server = kit, server
        self._refused: dict[str, dict[str, Any]] = {}
        self._ends: dict[str, float] = {}
        self._lock = threading.Lock()
        self._identities = IdentityCheck(RevocationList(kit / "local" / REVOKED), self._report)
        cell.add_incoming_filter("*", "*", self._drop)
        cell.add_incoming_request_filter("*", "*", self._answer)
        cell.add_outgoing_reply_filter("*", "*", self._note_token)

    def _drop(self, message: Message) -> Message | None:
        """Everything except what `_answer` answers; also what only passes through to a job."""
        if _topic(message) in (CellChannelTopic.Register, CellChannelTopic.Challenge, CellChannelTopic.HEART_BEAT):
            return None
        refusal = self._identities.check(*_sender(message))
        return _reply(refusal) if refusal else None

    def _answer(self, message: Message) -> Message | None:
        topic = _topic(message)
        if topic == CellChannelTopic.Register:
            refusal = self._check_certificate(message)
        elif topic == CellChannelTopic.HEART_BEAT:
            refusal = self._identities.check(
                *_sender(message), heartbeat=True, machine=_machine(message), address=_address(message)
            )
            if refusal is not None:
                self._log_out(_sender(message)[1])
        else:
            return None
        return _reply(refusal) if refusal else None

    def _check_certificate(self, message: Message) -> Refusal | None:
        name, _ = _sender(message)
        payload = message.payload
        shown = payload.get(IdentityChallengeKey.CERT) if isinstance(payload, Shareable) else None
        if not isinstance(shown, bytes | str):
            return None  # NVFlare itself refuses it
        certificate = x509.load_pem_x509_certificate(shown.encode() if isinstance(shown, str) else shown)
        self._ends[name] = certificate.not_valid_after_utc.timestamp()
        issued = certificate.not_valid_before_utc.timestamp()
        return self._identities.register(name, issued, _machine(message), _address(message))

    def _log_out(self, token: str) -> None:
        """At once: NVFlare would wait for it until its heartbeats are overdue."""
        if self._server is not None and token in self._server.client_manager.get_clients():
            self._server.logout_client(token)

    def _note_token(self, message: Message) -> None:
        if _topic(message) == CellChannelTopic.Register and isinstance(message.payload, dict):
            token = message.payload.get(CellMessageHeaderKeys.TOKEN)
            if token:
                self._identities.admit(str(message.get_header(MessageHeaderKey.DESTINATION, "")), str(token))
                self._keep(CERTIFICATES, self._ends)

    def _report(self, refusal: Refusal) -> None:
        """Into the log, for the operator of the server, and into a file for the driver."""
        self.logger.warning(refusal_line(refusal.site, refusal.why))
        with self._lock:
            self._refused[refusal.site] = {"code": refusal.code, "why": refusal.why, "time": time.time()}
        self._keep(REFUSALS, self._refused)

    def _keep(self, name: str, content: dict[str, Any]) -> None:
        with self._lock:
            try:
                write_atomically(self._kit / name, json.dumps(content))
            except OSError:
                self.logger.exception(f"{name} could not be written")


def _topic(message: Message) -> str:
    """The topic of a message to the server itself; empty for all others."""
    if message.get_header(MessageHeaderKey.CHANNEL) != CellChannel.SERVER_MAIN:
        return ""
    return str(message.get_header(MessageHeaderKey.TOPIC, ""))


def _sender(message: Message) -> tuple[str, str]:
    return (
        str(message.get_header(CellMessageHeaderKeys.CLIENT_NAME, "")),
        str(message.get_header(CellMessageHeaderKeys.TOKEN, "")),
    )


def _machine(message: Message) -> str:
    """The id that the sender gives its machine; empty where it gives none."""
    context = message.payload.get_peer_context() if isinstance(message.payload, Shareable) else None
    return str(context.get_prop(MACHINE, "")) if context else ""


def _address(message: Message) -> str:
    return str(message.get_header(CellMessageHeaderKeys.CLIENT_IP, ""))


def _reply(refusal: Refusal) -> Message:
    return make_reply(ReturnCode.UNAUTHENTICATED, error=refusal.to_text())


# -- at a site -------------------------------------------------------------------------------------------------------


class SiteMessageFilter(FLComponent):
    """Works in a site's own process. `end` ends it; a test gives another function."""

    def __init__(self, end: Callable[[int], Any] = os._exit) -> None:
        super().__init__()
        self._end = end
        self._clock_off: bool | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by NVFlare before the site registers."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            kit = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            site = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            fl_ctx.set_prop(MACHINE, machine_of(kit), private=False, sticky=True)
            site.cell.core_cell.add_incoming_reply_filter("*", "*", self._read_reply, kit)

    def _read_reply(self, message: Message, kit: Path) -> None:
        self._compare_clocks(message, kit)
        if message.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.UNAUTHENTICATED:
            return
        refusal = Refusal.from_text(str(message.get_header(MessageHeaderKey.ERROR, "")))
        if refusal is not None:
            self.logger.error(f"the server refuses this site: {refusal.why}")
            try:
                write_atomically(kit / REFUSED, refusal.to_text())
            finally:
                self._end(1)

    def _compare_clocks(self, message: Message, kit: Path) -> None:
        """Every message carries the time at which it was sent. TLS carries none."""
        route = message.get_header(MessageHeaderKey.ROUTE)
        if not route or route[0][0] != FQCN.ROOT_SERVER:
            return
        ahead = float(route[0][1]) - time.time()
        off = abs(ahead) > CLOCK_OFF_SECONDS
        if off == self._clock_off:
            return
        self._clock_off = off
        if off:
            way = "behind" if ahead > 0 else "ahead of"
            self.logger.warning(f"this machine's clock is {abs(ahead):.0f} s {way} the server's")
        with contextlib.suppress(OSError):
            write_atomically(kit / CLOCK, json.dumps({"server_ahead": ahead, "time": time.time()}))


def machine_of(kit: Path) -> str:
    """An id: the same when a kit starts again on this machine, another elsewhere. It reveals nothing about either."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        booted = str(int(time.time() - time.monotonic()) // 60)
    return hashlib.sha256(f"{booted} {socket.gethostname()} {kit.resolve()}".encode()).hexdigest()[:16]
