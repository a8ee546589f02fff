"""Warnings in `status` of what will go wrong soon: certificates that end, a disk that is nearly full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from panorgan.deployment.certificate_checks import DAYS_LEFT_TO_WARN
from panorgan.deployment.control import read_json
from panorgan.deployment.disk_space import low_disk_message
from panorgan.deployment.folders import ServerKit
from panorgan.deployment.settings import CoordinatorFile
from panorgan.errors import ConfigError
from panorgan.federation.certificates import Credentials, day, ends, read_certificate
from panorgan.federation.engine import CERTIFICATES

_DAY = 24 * 3600.0


def status_warnings(kit: ServerKit, settings: CoordinatorFile, now: float) -> tuple[str, ...]:
    """A sentence for each, for the operator."""
    words = [
        f"The certificate of {name} {_when(end, now)} on {day(end)}: panorgan federation renew {name}"
        for name, end in _certificates(kit, settings)
        if end - now < DAYS_LEFT_TO_WARN * _DAY
    ]
    if short := low_disk_message(kit.run(settings)):
        words.append(f"{short[0].upper()}{short[1:]}. Make room; the run goes on by itself.")
    return tuple(words)


def _certificates(kit: ServerKit, settings: CoordinatorFile) -> Iterator[tuple[str, float]]:
    own = Credentials.of_server(kit.startup).certificate, Credentials.of_site(kit.admin / "startup").certificate
    with contextlib.suppress(ConfigError):  # reported by preflight
        yield "server", min(ends(read_certificate(path)) for path in own)
    shown = read_json(kit.path / CERTIFICATES)
    yield from sorted((name, float(end)) for name, end in shown.items() if name in settings.sites)


def _when(end: float, now: float) -> str:
    return "has ended" if end < now else "ends"
