"""Chooses the engine. All other modules of this room use only its interface (`federation/engine.py`)."""

from __future__ import annotations

from panorgan.federation.engine import Engine
from panorgan.federation.transports.nvflare.engine import NVFlareEngine


def network_engine() -> Engine:
    """NVFlare, which is optional: if it is missing, the methods that need it say how to install it."""
    return NVFlareEngine()
