"""The server's message filter under its name in kits of older versions."""

from __future__ import annotations

from panorgan.federation.transports.nvflare.message_filter import ServerMessageFilter as Door

__all__ = ["Door"]
