"""How a site's engine starts a job: from a kit whose engine files the hospital approved. Kits name it by this path."""

from __future__ import annotations

from pathlib import Path

from panorgan.deployment.approval import deviations
from panorgan.deployment.folders import SiteKit
from panorgan.federation.failures import NotApprovedError
from panorgan.federation.transports.nvflare.launcher import SiteProcessLauncher


class SiteLauncher(SiteProcessLauncher):
    """Named in the site's `resources.json`. `SiteMachine` checks settings and egress policy; it answers by a code."""

    def check_kit(self, kit: Path) -> None:
        """No job starts while files that decide what it may run differ from the approval."""
        if found := deviations(SiteKit(kit)).of_the_engine():
            self.logger.error("no job is started: not as approved: %s", ", ".join(found))
            raise NotApprovedError("Files of the engine are not as approved.", where=", ".join(found))
