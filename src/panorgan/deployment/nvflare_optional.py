"""NVFlare is optional: the adapter, or an error that says how to install it."""

from __future__ import annotations

from panorgan.errors import ConfigError

try:
    from panorgan.federation.transports.nvflare.jobs import write_job
    from panorgan.federation.transports.nvflare.session import AdminSession, NotConnectedError, SystemState
except ImportError as error:
    raise ConfigError(
        "The network engine is not installed.",
        code="nvflare-missing",
        why=str(error),
        fix="Install it with: pip install 'panorgan[network]'",
    ) from error

open_session = AdminSession

__all__ = ["AdminSession", "NotConnectedError", "SystemState", "open_session", "write_job"]
