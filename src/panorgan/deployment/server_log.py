"""The log of the server's engine, from its output: kept in a file, and searched for refused connections."""

from __future__ import annotations

import contextlib
import logging
import threading
from logging.handlers import RotatingFileHandler
from typing import IO

from panorgan.deployment.folders import ServerKit
from panorgan.federation.transports.nvflare.handshakes import Handshakes
from panorgan.printable import PrintableFormatter

ENGINE_LOG = "engine.out"
AUDIT_LOG = "audit.log"
"""The network engine's log of requests. The driver sends two per second."""


def listen(words: IO[bytes], kit: ServerKit) -> None:
    """Read in a thread until the engine closes its output."""
    threading.Thread(target=_keep, args=(words, kit), daemon=True, name="engine's words").start()


def _keep(words: IO[bytes], kit: ServerKit) -> None:
    """Must never stop reading: an engine whose output is not read would block."""
    log = logging.Logger("turned away")  # standalone: no other logging settings apply
    log.addHandler(RotatingFileHandler(kit.turned_away, maxBytes=1_000_000, backupCount=3, encoding="utf-8"))
    log.handlers[0].setFormatter(PrintableFormatter("%(asctime)s turned away %(message)s"))
    handshakes = Handshakes(lambda who, why: log.warning("%s: %s", who, why))
    with words, (kit.path / ENGINE_LOG).open("ab", buffering=0) as kept:
        for line in words:
            if handshakes.keep(line.decode(errors="replace")):
                with contextlib.suppress(OSError):  # a full disk
                    kept.write(line)
