"""The server's address: set by the provisioned kits, which `coordinator.yaml` must not contradict."""

from __future__ import annotations

import yaml

from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import ServerKit
from panorgan.errors import ConfigError


def refuse_another_address(kit: ServerKit) -> None:
    """A port or host that was changed in `coordinator.yaml` only would be of no effect: every kit names the old one."""
    used = network_engine().server_address(kit.path, "server")
    try:
        content = yaml.safe_load(kit.settings.read_text(encoding="utf-8"))
        written = f"{content['host']}:{content['port']}"
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError):
        return  # reading the whole file says what is wrong with it
    if used and written != used:
        raise ConfigError(
            f"{kit.settings.name} says {written}, but the kits of this federation say {used}.",
            code="address-mismatch",
            where=f"{kit.settings}: host, port",
            why="the server listens, and every hospital connects, as its startup folder says",
            fix=f"Write {used} back. For another address, change federation.yaml and make new kits for all "
            "participants with 'panorgan federation init --out NEW-FOLDER'.",
        )
