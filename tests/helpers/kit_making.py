"""A small federation to make kits for."""

from __future__ import annotations

from panorgan.agreement import Agreement
from panorgan.deployment.settings import FederationSettings

EXPERIMENT = Agreement(vocabulary=("liver", "spleen"), training={"optimizer": {"weight_decay": 1e-05}})


def federation(**changes: object) -> FederationSettings:
    content: dict[str, object] = {
        "name": "pilot",
        "experiment": "experiment.yaml",
        "server": {"host": "federation.example.org", "port": 8443},
        "coordinator": "ada@example.org",
        "sites": ["north", "east-2"],
        "certificate_days": 400,
        "heartbeat_seconds": 33,
    }
    return FederationSettings(**{**content, **changes})
