"""Paths in a kit: the folder that each participant receives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.federation.engine import CLOCK

if TYPE_CHECKING:  # the process that only keeps a site running need not load torch
    from panorgan.deployment.settings import CoordinatorFile, SiteFile


@dataclass(frozen=True)
class Kit:
    """A participant's folder. `startup/` holds keys and certificates, `local/` what may be edited."""

    path: Path

    @property
    def startup(self) -> Path:
        """Keys, certificates and connection settings, as provisioned. Signed: must not be edited."""
        return self.path / "startup"

    @property
    def local(self) -> Path:
        """Policies and settings of this participant."""
        return self.path / "local"

    @property
    def experiment(self) -> Path:
        """The experiment that the federation agreed on."""
        return self.local / "experiment.yaml"

    @property
    def process_id(self) -> Path:
        """Holds the process id, and this folder, while the participant runs."""
        return self.path / "panorgan.pid"


@dataclass(frozen=True)
class ServerKit(Kit):
    """The coordinator's machine: the server's own kit, and in `admin/` the kit of the person who may start runs."""

    @property
    def settings(self) -> Path:
        """A `CoordinatorFile`."""
        return self.local / "coordinator.yaml"

    @property
    def admin(self) -> Path:
        """Kit of the coordinator as a person."""
        return self.path / "admin"

    @property
    def start(self) -> Path:
        """The model that training starts from, where the experiment names one."""
        return self.path / "start"

    @property
    def turned_away(self) -> Path:
        """Which connections were refused, and why."""
        return self.path / "turned-away.log"

    def run(self, settings: CoordinatorFile) -> Path:
        """The run folder."""
        return self.path / settings.run

    def control(self, settings: CoordinatorFile) -> Path:
        """How `start` and `stop` communicate with the job that runs the rounds."""
        return self.run(settings) / "control"


@dataclass(frozen=True)
class SiteKit(Kit):
    """A hospital's machine."""

    @property
    def settings(self) -> Path:
        """A `SiteFile`."""
        return self.local / "site.yaml"

    @property
    def egress_policy(self) -> Path:
        """What may leave (an `EgressPolicy`)."""
        return self.local / "egress.yaml"

    @property
    def audit_log(self) -> Path:
        """What has left, hash-chained."""
        return self.path / "egress-log.jsonl"

    @property
    def log(self) -> Path:
        """What happened here, in full; it stays here."""
        return self.path / "site.log"

    @property
    def clock(self) -> Path:
        """How the clocks differed when the site was connected last."""
        return self.path / CLOCK

    @property
    def model(self) -> Path:
        """The finished model, once the federation has delivered it."""
        return self.path / "model"

    @property
    def previous_model(self) -> Path:
        """The model from before the last delivery."""
        return self.path / "model.previous"

    @property
    def scores(self) -> Path:
        """The output of `panorgan federation score`; it stays here."""
        return self.path / "scores"

    def state(self, settings: SiteFile) -> Path:
        """The site's private state."""
        return self.path / settings.state

    def cache(self, settings: SiteFile) -> Path:
        """Prepared cases."""
        return self.path / settings.cache
