"""Revoke a kit: the server refuses its next message. It accepts a renewed kit of the same name."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.kit_files import load_coordinator_file
from panorgan.errors import ConfigError, did_you_mean
from panorgan.federation.certificates import Credentials, begins, common_name, read_certificate
from panorgan.federation.revocation import REVOKED, read_revocations, revoke


@dataclass(frozen=True)
class Revoked:
    """`changed`: it was not on the list yet. `restart`: the server had no message filter, and must start again once."""

    name: str
    until: float
    changed: bool
    restart: bool


def revocation_file(kit: ServerKit) -> Path:
    """Read by the server with every message."""
    return kit.local / REVOKED


def revoke_kit(kit: ServerKit, who: str, now: float | None = None) -> Revoked:
    """Refuse a participant's certificates: by name all existing ones, by a kit that one and older ones."""
    place = Path(who).expanduser()
    if place.exists():
        name, until = _from_certificate(place)
    else:
        name, until = _known(kit, who), time.time() if now is None else now
    changed = revoke(revocation_file(kit), name, until)
    return Revoked(name, until, changed, network_engine().add_message_filter(kit.path))


def revoked_words(kit: ServerKit, sites: Iterable[str]) -> str:
    """For a list of sites that the run waits for: which of them had a kit revoked, and the ways out."""
    try:
        known = read_revocations(revocation_file(kit))
    except ConfigError as error:
        return f" ({error.what} {error.where}: {error.why})"
    names = [name for name in sites if name in known]
    if not names:
        return ""
    return f" (a kit of {', '.join(names)} was revoked: renew it, or remove the site from {kit.settings.name})"


def _from_certificate(place: Path) -> tuple[str, float]:
    certificate = read_certificate(Credentials.of_site(place / "startup").certificate if place.is_dir() else place)
    return common_name(certificate), begins(certificate)


def _known(kit: ServerKit, name: str) -> str:
    settings = load_coordinator_file(kit)
    names = [*settings.sites, settings.coordinator]
    if name not in names:
        raise ConfigError(
            f"There is no participant {name!r}.",
            code="unknown-participant",
            where=str(kit.settings),
            why=did_you_mean(name, names) or f"there are {', '.join(names)}",
            fix=f"Give one of these, a kit or a certificate; or write the line by hand into {revocation_file(kit)}.",
        )
    return name
