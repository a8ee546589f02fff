"""How the engine of a server or a site is started: with installed code, and nothing from the kit's folder.

NVFlare's own `startup/sub_start.sh` ends its `PYTHONPATH` in a colon. To Python that is the working folder, the kit,
also with `PYTHONSAFEPATH`; so it is not used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from panorgan.deployment.certificates import Credentials, read_certificate
from panorgan.deployment.folders import Kit, ServerKit
from panorgan.errors import ConfigError

_SERVER = "nvflare.private.fed.app.server.server_train"
_SITE = "panorgan.federation.transports.nvflare.site_process"

INSTALLED_CODE_ONLY = {"PYTHONSAFEPATH": "1"}
"""Environment in which Python, and every Python that it starts, leaves the working folder out of its path."""


def engine_command(kit: Kit) -> list[str]:
    """The command line of a kit's engine; who it is stands in its certificate."""
    server = isinstance(kit, ServerKit)
    settings = "fed_server.json" if server else "fed_client.json"
    if not (kit.startup / settings).is_file():
        raise ConfigError(
            "This is not a kit of a server or a site.",
            code="not-a-kit",
            where=str(kit.path),
            why=f"startup/{settings} is missing",
            fix="Point to the folder that 'panorgan federation init' made for this machine.",
        )
    name, organization = _subject(kit)
    who = [f"org={organization}"] if server else [f"uid={name}", f"org={organization}"]
    start = [sys.executable, "-P", "-u", "-m", _SERVER if server else _SITE, "-m", str(kit.path), "-s", settings]
    return [*start, "--set", "secure_train=true", *who, "config_folder=config"]


def engine_environment(kit: Kit) -> dict[str, str]:
    """The environment of the engine and of all that it starts."""
    scratch = kit.path / "tmp"
    environment = {**os.environ, **INSTALLED_CODE_ONLY, "TMPDIR": str(scratch)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment.setdefault("MALLOC_ARENA_MAX", "4")  # as NVFlare recommends: glibc else keeps what it no longer needs
    folders = environment.pop("PYTHONPATH", "").split(os.pathsep)
    if allowed := [folder for folder in folders if _may_be_on_path(folder, kit)]:
        environment["PYTHONPATH"] = os.pathsep.join(allowed)
    return environment


def _may_be_on_path(folder: str, kit: Kit) -> bool:
    """An empty or relative entry means the working folder, which is the kit."""
    return Path(folder).is_absolute() and not Path(folder).resolve().is_relative_to(kit.path.resolve())


def _subject(kit: Kit) -> tuple[str, str]:
    """Name and organisation in the kit's certificate."""
    from cryptography.x509.oid import NameOID

    credentials = Credentials.of_server(kit.startup) if isinstance(kit, ServerKit) else Credentials.of_site(kit.startup)
    subject = read_certificate(credentials.certificate).subject
    name, organization = (
        "".join(str(attribute.value) for attribute in subject.get_attributes_for_oid(field))
        for field in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
    )
    return name, organization
