"""The output of the server's engine: kept in a log, and read for connections that it refused."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from typing import IO

from panorgan.deployment.folders import ServerKit
from panorgan.federation.engine import KeepLine, OnRefused
from panorgan.printable import PrintableFormatter

ENGINE_LOG = "engine.out"


def keep_output(output: IO[bytes], kit: ServerKit, reader: Callable[[OnRefused], KeepLine]) -> None:
    """Read it in a thread until it ends."""
    threading.Thread(target=_keep, args=(output, kit, reader), daemon=True, name="engine output").start()


def _keep(output: IO[bytes], kit: ServerKit, reader: Callable[[OnRefused], KeepLine]) -> None:
    """This must never stop reading: an engine whose output is full would come to a halt."""
    log = logging.Logger("turned away")  # on its own: no other settings apply
    log.addHandler(RotatingFileHandler(kit.turned_away, maxBytes=1_000_000, backupCount=3, encoding="utf-8"))
    log.handlers[0].setFormatter(PrintableFormatter("%(asctime)s turned away %(message)s"))
    keep = reader(lambda name, why: log.warning("%s: %s", name, why))
    with output, (kit.path / ENGINE_LOG).open("ab", buffering=0) as kept:
        for line in output:
            if keep(line.decode(errors="replace")):
                with contextlib.suppress(OSError):  # a full disk
                    kept.write(line)
