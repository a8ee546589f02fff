"""A site at the server's door: it says which machine it is, and when it is refused it keeps the reason and ends.

NVFlare would go on knocking for ever, and would not write the reason into any log.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message

from panorgan.federation.files import write_atomically
from panorgan.federation.gate import Refusal
from panorgan.federation.transports.nvflare.door import MACHINE

REFUSED = "refused.txt"
"""In the site's kit: why the server refused it; removed with the next start."""


class Knocking(FLComponent):
    """A component of a site's `resources.json`. `end` ends the process; a test gives another."""

    def __init__(self, end: Callable[[int], Any] = os._exit) -> None:
        super().__init__()
        self._end = end

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Called by NVFlare before the site registers."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            kit = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            site = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            fl_ctx.set_prop(MACHINE, machine_of(kit), private=False, sticky=True)
            site.cell.core_cell.add_incoming_reply_filter("*", "*", self._listen, kit)

    def _listen(self, message: Message, kit: Path) -> None:
        if message.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.UNAUTHENTICATED:
            return
        refusal = Refusal.from_text(str(message.get_header(MessageHeaderKey.ERROR, "")))
        if refusal is not None:
            self.logger.error(f"the server refuses this site: {refusal.why}")
            try:
                write_atomically(kit / REFUSED, refusal.to_text())
            finally:
                self._end(1)


def machine_of(kit: Path) -> str:
    """The same for a kit that is started again on this machine, another one elsewhere; tells nothing about either."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        booted = str(int(time.time() - time.monotonic()) // 60)
    return hashlib.sha256(f"{booted} {socket.gethostname()} {kit.resolve()}".encode()).hexdigest()[:16]
