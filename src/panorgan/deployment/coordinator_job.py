"""The class that a job names at the server. Kits allow only this class, by this path, so it must stay here."""

from __future__ import annotations

from pathlib import Path

from panorgan.deployment.folders import ServerKit
from panorgan.deployment.segment import run_and_report
from panorgan.federation.engine import NetworkTransport
from panorgan.federation.transports.nvflare.controller import SegmentController


class CoordinatorJob(SegmentController):
    """Takes no arguments: the server's kit holds all settings."""

    def run_segment(self, transport: NetworkTransport, kit: Path, job: str) -> None:
        """Called in a process of its own for every segment."""
        run_and_report(ServerKit(kit), transport, job)
