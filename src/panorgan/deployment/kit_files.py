"""Read the files of a federation: `federation.yaml`, and in the kits `coordinator.yaml` and `site.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from panorgan.agreement import Agreement
from panorgan.config import load_agreement
from panorgan.deployment.data_folder import is_blank
from panorgan.deployment.folders import Kit, ServerKit, SiteKit
from panorgan.deployment.settings import CoordinatorFile, FederationSettings, SiteFile
from panorgan.errors import ConfigError
from panorgan.federation.limits import LimitSettings
from panorgan.federation.settings import refuse_few_sites
from panorgan.settings import validated
from panorgan.yaml_files import read_yaml


def load_federation(path: Path) -> tuple[FederationSettings, Agreement]:
    """Read `federation.yaml` and the experiment that it names; that path is relative to the file."""
    settings = validated(FederationSettings, read_yaml(path, "federation file"), str(path))
    experiment = (path.parent / settings.experiment.expanduser()).resolve()
    limits = LimitSettings(**settings.limits.model_dump())
    organs = {name: own.as_json() for name, own in settings.organs.items()}
    agreement = load_agreement(experiment, organs).model_copy(update={"limits": limits})
    refuse_few_sites(agreement.training, len(settings.sites), f"{experiment}: training.aggregation")
    return settings.model_copy(update={"experiment": experiment}), agreement


def load_coordinator_file(kit: ServerKit) -> CoordinatorFile:
    """Read `local/coordinator.yaml`; its folders are returned as absolute paths."""
    content = read_yaml(kit.settings, "coordinator file")
    settings = validated(CoordinatorFile, content, str(kit.settings))
    mlflow = settings.mlflow and _in_kit(kit.path, settings.mlflow)
    return settings.model_copy(update={"run": _in_kit(kit.path, settings.run), "mlflow": mlflow})


def load_site_file(kit: SiteKit) -> SiteFile:
    """Read `local/site.yaml`; its folders are returned as absolute paths. Refuses one that was not filled in."""
    content = read_yaml(kit.settings, "site file")
    _refuse_blank(content, kit.settings)
    settings = validated(SiteFile, content, str(kit.settings))
    data = settings.data.model_copy(
        update={
            "folder": _in_kit(kit.path, settings.data.folder),
            "withheld": settings.data.withheld and _in_kit(kit.path, settings.data.withheld),
        }
    )
    return settings.model_copy(
        update={
            "data": data,
            "cache": _in_kit(kit.path, settings.cache),
            "state": _in_kit(kit.path, settings.state),
        }
    )


def load_agreed(kit: Kit, fingerprint: str) -> Agreement:
    """The kit's experiment; refuses one that was changed after the agreement."""
    agreement = load_agreement(kit.experiment)
    if agreement.fingerprint() != fingerprint:
        raise ConfigError(
            "The experiment is not the agreed one.",
            code="experiment-changed",
            where=str(kit.experiment),
            why=f"its fingerprint is {agreement.fingerprint()}, agreed was {fingerprint}",
            fix="Restore the file from the kit, or make new kits with 'panorgan federation init'.",
        )
    return agreement


def _refuse_blank(content: dict[str, Any], path: Path) -> None:
    if is_blank(content):
        data = content.get("data")
        others = ", ".join(repr(str(key)) for key in data) if isinstance(data, dict) and "folder" not in data else ""
        raise ConfigError(
            "The hospital's data folder is not filled in.",
            code="data-folder-blank",
            where=f"{path}: data.folder",
            why=f"'data' holds {others}, but no 'folder'" if others else "",
            fix=f"Fill in data.folder in {path}; the comments there say how.",
        )


def _in_kit(kit: Path, path: Path) -> Path:
    """A path in a kit's file: absolute, from the home folder, or relative to the kit."""
    return (kit / path.expanduser()).resolve()
