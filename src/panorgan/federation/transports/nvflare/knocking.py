"""The site's message filter under its name in kits of older versions, which hospitals have approved."""

from __future__ import annotations

from panorgan.federation.transports.nvflare.message_filter import SiteMessageFilter as Knocking

__all__ = ["Knocking"]
