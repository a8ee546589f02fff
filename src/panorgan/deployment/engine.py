"""The engine of this installation. All other modules of this room know its interface alone (`federation/engine.py`)."""

from __future__ import annotations

from panorgan.federation.engine import Engine
from panorgan.federation.transports.nvflare.engine import NVFlareEngine


def network_engine() -> Engine:
    """NVFlare, which is optional: methods that need it say how to install it where it is missing."""
    return NVFlareEngine()
