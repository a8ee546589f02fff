"""The server's door: NVFlare asks our gate about every message that comes in.

NVFlare lets in whoever holds a certificate of the federation, and a token that it once gave stays good. This component
of the server's `resources.json` puts filters before its own handling: a message of a revoked kit is dropped, or
answered with the reason where NVFlare waits for an answer.
"""

from __future__ import annotations

import json
import threading
import time
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
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellChannel, CellChannelTopic, CellMessageHeaderKeys

from panorgan.federation.files import write_atomically
from panorgan.federation.identity_check import IdentityCheck, Refusal
from panorgan.federation.revocation import REVOKED, RevocationList

CERTIFICATES = "certificates.json"
"""In the server's kit: until when the certificates are valid that were shown, in seconds since 1970."""
DOOR = "door.json"
"""In the server's kit: who was refused last, for the driver and `status`."""
MACHINE = "panorgan_machine"
"""Under this name a site says which machine it is, when it registers and with every heartbeat."""


class Door(FLComponent):
    """Stands in the server's own process, never in a job's."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by NVFlare; by this event it listens, but has not answered anybody yet."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            server = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            kit = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            self.stand_before(server.cell.core_cell, kit, server)

    def stand_before(self, cell: Any, kit: Path, server: Any = None) -> None:
        """Filter what comes into a cell. NVFlare takes the nearest list of filters only: ours join the general one."""
        self._kit, self._server = kit, server
        self._told: dict[str, dict[str, Any]] = {}
        self._ends: dict[str, float] = {}
        self._lock = threading.Lock()
        self.gate = IdentityCheck(RevocationList(kit / "local" / REVOKED), self._tell)
        cell.add_incoming_filter("*", "*", self._drop)
        cell.add_incoming_request_filter("*", "*", self._answer)
        cell.add_outgoing_reply_filter("*", "*", self._see_token)

    def _drop(self, message: Message) -> Message | None:
        """Everything except what `_answer` answers; also what only passes through to a job."""
        if _topic(message) in (CellChannelTopic.Register, CellChannelTopic.Challenge, CellChannelTopic.HEART_BEAT):
            return None
        refusal = self.gate.hear(*_speaker(message))
        return _no(refusal) if refusal else None

    def _answer(self, message: Message) -> Message | None:
        topic = _topic(message)
        if topic == CellChannelTopic.Register:
            refusal = self._check_certificate(message)
        elif topic == CellChannelTopic.HEART_BEAT:
            refusal = self.gate.hear(
                *_speaker(message), alive=True, machine=_machine(message), address=_address(message)
            )
            if refusal is not None:
                self._log_out(_speaker(message)[1])
        else:
            return None
        return _no(refusal) if refusal else None

    def _check_certificate(self, message: Message) -> Refusal | None:
        name, _ = _speaker(message)
        payload = message.payload
        shown = payload.get(IdentityChallengeKey.CERT) if isinstance(payload, Shareable) else None
        if not isinstance(shown, bytes | str):
            return None  # NVFlare refuses that by itself
        certificate = x509.load_pem_x509_certificate(shown.encode() if isinstance(shown, str) else shown)
        self._ends[name] = certificate.not_valid_after_utc.timestamp()
        issued = certificate.not_valid_before_utc.timestamp()
        return self.gate.register(name, issued, _machine(message), _address(message))

    def _log_out(self, token: str) -> None:
        """Nobody shall wait for it until it counts as silent."""
        if self._server is not None and token in self._server.client_manager.get_clients():
            self._server.logout_client(token)

    def _see_token(self, message: Message) -> None:
        if _topic(message) == CellChannelTopic.Register and isinstance(message.payload, dict):
            token = message.payload.get(CellMessageHeaderKeys.TOKEN)
            if token:
                self.gate.admit(str(message.get_header(MessageHeaderKey.DESTINATION, "")), str(token))
                self._keep(CERTIFICATES, self._ends)

    def _tell(self, refusal: Refusal) -> None:
        """Into the log, where whoever runs the server reads it, and into a file for the driver."""
        self.logger.warning(f"the door turned away {refusal.site}: {refusal.why}")
        with self._lock:
            self._told[refusal.site] = {"code": refusal.code, "why": refusal.why, "time": time.time()}
        self._keep(DOOR, self._told)

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


def _speaker(message: Message) -> tuple[str, str]:
    return (
        str(message.get_header(CellMessageHeaderKeys.CLIENT_NAME, "")),
        str(message.get_header(CellMessageHeaderKeys.TOKEN, "")),
    )


def _machine(message: Message) -> str:
    """What the speaker says of its machine; empty where it says nothing."""
    context = message.payload.get_peer_context() if isinstance(message.payload, Shareable) else None
    return str(context.get_prop(MACHINE, "")) if context else ""


def _address(message: Message) -> str:
    return str(message.get_header(CellMessageHeaderKeys.CLIENT_IP, ""))


def _no(refusal: Refusal) -> Message:
    return make_reply(ReturnCode.UNAUTHENTICATED, error=refusal.to_text())
