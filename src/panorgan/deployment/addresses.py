"""The server's address: set by the provisioned kits, which `coordinator.yaml` must not contradict."""

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
    """A port or host changed only in `coordinator.yaml` would have no effect: every kit names the old one."""
    used = listens_at(kit)
    try:
        content = yaml.safe_load(kit.settings.read_text(encoding="utf-8"))
        written = f"{content['host']}:{content['port']}"
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError):
        return  # the error is reported where the whole file is read
    if used and written != used:
        raise ConfigError(
            f"{kit.settings.name} says {written}, but the kits of this federation say {used}.",
            code="address-mismatch",
            where=f"{kit.settings}: host, port",
            why="the server listens, and every hospital connects, according to its startup folder",
            fix=f"Restore {used}. For another address, change federation.yaml and make new kits for all sites with "
            "'panorgan federation init --out NEW-FOLDER'.",
        )
