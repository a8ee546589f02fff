"""Where the server listens: the provisioned kits say it, and `coordinator.yaml` must not say otherwise."""

from __future__ import annotations

import json

import yaml

from panorgan.deployment.folders import ServerKit
from panorgan.errors import ConfigError


def listens_at(kit: ServerKit) -> str:
    """`host:port` in the provisioned settings; empty if they cannot be read."""
    try:
        return str(json.loads((kit.startup / "fed_server.json").read_text())["servers"][0]["service"]["target"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def refuse_another_address(kit: ServerKit) -> None:
    """A port or host that was changed in `coordinator.yaml` only would be of no effect: every kit names the old one."""
    used = listens_at(kit)
    try:
        content = yaml.safe_load(kit.settings.read_text(encoding="utf-8"))
        written = f"{content['host']}:{content['port']}"
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError):
        return  # whoever reads the file as a whole says what is wrong with it
    if used and written != used:
        raise ConfigError(
            f"{kit.settings.name} says {written}, but the kits of this federation say {used}.",
            code="address-mismatch",
            where=f"{kit.settings}: host, port",
            why="the server listens, and every hospital connects, as its startup folder says",
            fix=f"Write {used} back. For another address, change federation.yaml and make new kits for everybody with "
            "'panorgan federation init --out NEW-FOLDER'.",
        )
