"""What a server or a site says when it starts, because it would otherwise wait for ever without a word."""

from __future__ import annotations

from panorgan.deployment.certificates import Credentials, check_dates
from panorgan.deployment.folders import ServerKit, SiteKit


def warned(kit: ServerKit | SiteKit) -> list[str]:
    """A certificate that ends soon, has ended, or has not begun by this machine's clock."""
    own = Credentials.of_site(kit.startup) if isinstance(kit, SiteKit) else Credentials.of_server(kit.startup)
    check = check_dates(own)
    return [f"{check.name}: {check.what} {check.fix}"] if check.verdict in ("warning", "failed") else []
