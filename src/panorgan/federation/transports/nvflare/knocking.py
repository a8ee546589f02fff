"""A site at the server's door: it says which machine it is, compares the clocks, and ends when it is refused.

NVFlare would go on knocking for ever, and would not write the reason into any log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message

from panorgan.federation.files import write_atomically
from panorgan.federation.identity_check import Refusal
from panorgan.federation.transports.nvflare.door import MACHINE

REFUSED = "refused.txt"
"""In the site's kit: why the server refused it; removed with the next start."""


CLOCK = "clock.json"
"""In the site's kit: by how many seconds the server's clock was ahead (negative: behind), and when that was seen."""
CLOCK_OFF_SECONDS = 60.0
"""A message that took so long on its way would be rare; certificates and logs do not mind less."""


class Knocking(FLComponent):
    """A component of a site's `resources.json`. `end` ends the process; a test gives another."""

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
            site.cell.core_cell.add_incoming_reply_filter("*", "*", self._listen, kit)

    def _listen(self, message: Message, kit: Path) -> None:
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
        """Every message bears the time at which its sender sent it. TLS tells no time."""
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
    """The same for a kit that is started again on this machine, another one elsewhere; tells nothing about either."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        booted = str(int(time.time() - time.monotonic()) // 60)
    return hashlib.sha256(f"{booted} {socket.gethostname()} {kit.resolve()}".encode()).hexdigest()[:16]
