"""The class that a job names at a site. Kits allow it by this path, and no other class: it must stay here."""

from __future__ import annotations

from pathlib import Path

from panorgan.deployment.folders import SiteKit
from panorgan.deployment.site_machine import SiteMachine
from panorgan.federation.transports.nvflare.executor import SiteExecutor


class SiteJob(SiteExecutor):
    """Takes no arguments: the site's kit holds all settings."""

    def open_site(self, kit: Path, name: str) -> SiteMachine:
        """Called once per job."""
        return SiteMachine(SiteKit(kit), name, self.check_abort)
