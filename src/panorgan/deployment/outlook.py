"""Upcoming problems: expiring certificates, a nearly full disk. Each is a sentence for the operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from panorgan.deployment.certificates import DAYS_LEFT_TO_WARN, Credentials, day, ends, read_certificate
from panorgan.deployment.control import read_json
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.room import little_room
from panorgan.deployment.settings import CoordinatorFile
from panorgan.errors import ConfigError

CERTIFICATES = "certificates.json"
"""In the server's kit: expiry dates of the certificates that sites have presented."""
_DAY = 24 * 3600.0


def outlook(kit: ServerKit, settings: CoordinatorFile, now: float) -> tuple[str, ...]:
    """Warnings for `status`."""
    words = [
        f"The certificate of {name} {_when(end, now)} on {day(end)}: panorgan federation renew {name}"
        for name, end in _certificates(kit, settings)
        if end - now < DAYS_LEFT_TO_WARN * _DAY
    ]
    if short := little_room(kit.run(settings)):
        words.append(f"{short[0].upper()}{short[1:]}. Free some space; the run continues by itself.")
    return tuple(words)


def _certificates(kit: ServerKit, settings: CoordinatorFile) -> Iterator[tuple[str, float]]:
    own = Credentials.of_server(kit.startup).certificate, Credentials.of_site(kit.admin / "startup").certificate
    with contextlib.suppress(ConfigError):  # reported by preflight
        yield "server", min(ends(read_certificate(path)) for path in own)
    shown = read_json(kit.path / CERTIFICATES)
    yield from sorted((name, float(end)) for name, end in shown.items() if name in settings.sites)


def _when(end: float, now: float) -> str:
    return "has ended" if end < now else "ends"
