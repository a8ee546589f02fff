"""The files of a real federation: `federation.yaml`; `coordinator.yaml` at the server, `site.yaml` at a site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from panorgan.agreement import organs_by_name
from panorgan.anatomy import OwnOrgan
from panorgan.config import HardwareSettings, SiteSettings
from panorgan.federation.limits import HospitalLimits
from panorgan.settings import SettingError, Settings

_SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
_ORGANISATION = r"[A-Za-z0-9][A-Za-z0-9_]*"


class RoundsSettings(Settings):
    """How long the coordinator waits. None of this changes what is computed from the answers that arrive."""

    per_segment: int = Field(
        10, ge=1, description="rounds per job of the network engine; a failure costs at most the current round"
    )
    deadline_minutes: float = Field(
        60.0, gt=0, description="with proceed: a site that has not answered by then counts as missing in this round"
    )
    on_missing: Literal["wait", "proceed"] = Field(
        "wait",
        description="wait: a round needs every site that joined; proceed: training.min_sites answers are enough",
    )
    retries: int = Field(3, ge=0, description="how often a site that reports a failure is asked again in a round")
    first_wait_minutes: float = Field(
        10.0, ge=0, description="with proceed: how long the start waits for sites that are not connected yet"
    )


class ParticipantSettings(Settings):
    """One hospital, as the coordinator knows it. Its folders are private."""

    organization: str = Field("", pattern=rf"^({_ORGANISATION})?$", description="the site's name if left out")
    joins_later: bool = Field(False, description="has a kit, but the run may begin without it")


class ServerSettings(Settings):
    """Where the sites connect to: one port, inbound at the server only."""

    host: str = Field(description="the name by which every site reaches the server; it is in the certificate")
    port: int = Field(8002, ge=1, le=65535)
    organization: str = Field("coordination", pattern=rf"^{_ORGANISATION}$")


class FederationSettings(Settings):
    """`federation.yaml`: everything `panorgan federation init` needs to know."""

    name: str = Field("federation", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    experiment: Path = Field(description="the experiment file; folders and hardware in it are left out")
    server: ServerSettings
    coordinator: str = Field(
        "coordinator@panorgan.local", pattern=r"^[^@\s]+@[^@\s]+$", description="who may start and stop runs"
    )
    sites: dict[str, ParticipantSettings] = Field(min_length=1)
    rounds: RoundsSettings = RoundsSettings()
    limits: HospitalLimits = Field(
        HospitalLimits(), description="limits for what a site may claim; part of the agreed experiment"
    )
    organs: dict[str, OwnOrgan] = Field(
        default_factory=dict,
        description="organs that the catalogue does not know, besides those that the experiment file describes; part "
        "of the agreed experiment",
    )
    heartbeat_seconds: int = Field(45, ge=15, description="a site that is silent for this long counts as gone")
    certificate_days: int = Field(90, ge=1, description="validity of a kit; 'panorgan federation renew' extends it")

    @field_validator("organs", mode="before")
    @classmethod
    def _bare_organs_will_do(cls, organs: object) -> object:
        return organs_by_name(organs)

    @field_validator("sites", mode="before")
    @classmethod
    def _bare_names_will_do(cls, sites: object) -> object:
        """`sites: [north, east]` and `north:` without a value are enough."""
        if isinstance(sites, list):
            return {str(name): {} for name in sites}
        return {name: value or {} for name, value in sites.items()} if isinstance(sites, dict) else sites

    @field_validator("sites")
    @classmethod
    def _plain_names(cls, sites: dict[str, ParticipantSettings]) -> dict[str, ParticipantSettings]:
        for name in sites:
            if not re.fullmatch(_SITE_NAME, name) or name in ("server", "admin"):
                why = f"site name {name!r} may hold letters, digits, '-' and '_' only, and not be 'server'"
                raise SettingError(why, code="bad-site-name")
        return sites

    @model_validator(mode="after")
    def _some_site_begins(self) -> FederationSettings:
        if all(site.joins_later for site in self.sites.values()):
            raise SettingError("all sites join later: one must begin", code="nobody-begins")
        return self


class CoordinatorFile(Settings):
    """`local/coordinator.yaml` in the server's kit, written by `init`; the operator may change `rounds` and `run`."""

    federation: str
    coordinator: str = Field(description="who may start and stop runs")
    host: str
    port: int
    sites: dict[str, ParticipantSettings]
    rounds: RoundsSettings = RoundsSettings()
    heartbeat_seconds: int = 45
    run: Path = Field(Path("run"), description="the run folder; relative to the kit")
    mlflow: Path | None = Field(None, description="a folder for MLflow to log into too; relative to the kit")
    experiment_fingerprint: str


class SiteFile(Settings):
    """`local/site.yaml` in a site's kit: what is private to the hospital. It never leaves it."""

    federation: str
    name: str = Field(pattern=rf"^{_SITE_NAME}$", description="as in the site's certificate")
    server: str = Field(description="host:port of the server, for preflight")
    experiment_fingerprint: str = Field(description="of the experiment that this site agreed to")
    data: SiteSettings
    hardware: HardwareSettings = HardwareSettings()
    cache: Path = Field(Path("cache"), description="prepared cases; relative to the kit")
    cache_limit_gb: float | None = Field(
        None, gt=0, description="above this size the least recently used entries are removed; 100 if left out"
    )
    state: Path = Field(Path("state"), description="what the site keeps between rounds; relative to the kit")
    min_free_disk_gb: float = Field(5.0, ge=0, description="required by preflight")
    min_gpu_memory_gb: float = Field(0.0, ge=0, description="required by preflight; 0 for none")
    versions: dict[str, str] = Field(default_factory=dict, description="where the kit was made; preflight compares")
