"""A job for NVFlare: three small JSON files that name installed classes. No code is shipped.

The receiver holds a job to the same form (`job_check.py`), so this module alone defines what a job may say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTROLLER = "panorgan.deployment.coordinator_job.CoordinatorJob"
"""What a job may start at the server. Kits name this path in their allow-list: it must stay."""
EXECUTOR = "panorgan.deployment.site_job.SiteJob"
"""What a job may start at a site. Kits name this path in their allow-list: it must stay."""

CONFIG = "config"
SERVER_CONFIG = "config_fed_server.json"
SITE_CONFIG = "config_fed_client.json"

_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FETCH_EVERY = 0.1
"""Seconds between a site's requests for a task."""
_HAND_OVER_WITHIN = 3600.0
"""Seconds in which the server must have fetched an answer. NVFlare's 300 would make a site behind a slow line hand it
over again and again, while the first one is still on its way."""


def write_job(
    folder: Path,
    name: str,
    controller: str,
    executor: str,
    min_sites: int,
    mandatory: Sequence[str] = (),
    sites: Sequence[str] = (),
) -> Path:
    """Write a job folder. `controller` and `executor` are dotted names of installed classes.

    It goes to `sites`, as far as they are connected; if none are given, to all sites.
    """
    meta = {
        "name": name,
        "resource_spec": {},
        "min_clients": min_sites,
        "mandatory_clients": list(mandatory),
        "deploy_map": {"app": ["server", *sites] if sites else ["@ALL"]},
    }
    config = folder / "app" / CONFIG
    config.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    (config / SERVER_CONFIG).write_text(as_text(server_config(controller, _FETCH_EVERY)))
    (config / SITE_CONFIG).write_text(as_text(site_config(executor, _FETCH_EVERY, _HAND_OVER_WITHIN)))
    return folder


def server_config(controller: str, fetch_every: float) -> dict[str, Any]:
    """What the server builds: the controller, without arguments."""
    return {
        "format_version": 2,
        "server": {"task_request_interval": fetch_every},
        "workflows": [{"id": "segment", "path": controller, "args": {}}],
    }


def site_config(executor: str, fetch_every: float, hand_over_within: float) -> dict[str, Any]:
    """What a site builds: the executor, without arguments."""
    return {
        "format_version": 2,
        "default_task_fetch_interval": fetch_every,
        "submit_task_result_timeout": hand_over_within,
        "executors": [{"tasks": ["*"], "executor": {"path": executor, "args": {}}}],
    }


def as_text(config: dict[str, Any]) -> str:
    """The one way in which a job writes its settings down."""
    return json.dumps(config, indent=1)


def is_job_id(name: object) -> bool:
    """Whether a name is one that NVFlare gives to jobs, and to their folders in a kit."""
    return isinstance(name, str) and _JOB_ID.fullmatch(name) is not None
