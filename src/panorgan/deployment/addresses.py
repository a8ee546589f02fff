"""The server's address: set by the provisioned kits, which `coordinator.yaml` must not contradict."""

from __future__ import annotations

import yaml

from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import ServerKit
from panorgan.errors import ConfigError


def refuse_another_address(kit: ServerKit) -> None:
    """Refuse a port or host changed only in `coordinator.yaml`: it has no effect, as every kit has the old one."""
    used = network_engine().server_address(kit.path, "server")
    try:
        content = yaml.safe_load(kit.settings.read_text(encoding="utf-8"))
        written = f"{content['host']}:{content['port']}"
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError):
        return  # reading the whole file reports the error
    if used and written != used:
        raise ConfigError(
            f"{kit.settings.name} says {written}, but the kits of this federation say {used}.",
            code="address-mismatch",
            where=f"{kit.settings}: host, port",
            why="the server listens, and every hospital connects, as its startup folder says",
            fix=f"Write {used} back. For another address, change federation.yaml and make new kits for all "
            "participants with 'panorgan federation init --out NEW-FOLDER'.",
        )
