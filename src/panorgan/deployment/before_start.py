"""Warnings when a server or a site starts, for problems that would otherwise make it wait for ever in silence."""

from __future__ import annotations

from panorgan.deployment.certificates import Credentials, check_dates
from panorgan.deployment.folders import ServerKit, SiteKit


def startup_warnings(kit: ServerKit | SiteKit) -> list[str]:
    """A certificate that expires soon, has expired, or is not yet valid by this machine's clock."""
    own = Credentials.of_site(kit.startup) if isinstance(kit, SiteKit) else Credentials.of_server(kit.startup)
    check = check_dates(own)
    return [f"{check.name}: {check.what} {check.fix}"] if check.verdict in ("warning", "failed") else []
