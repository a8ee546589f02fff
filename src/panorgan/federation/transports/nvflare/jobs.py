"""A job for NVFlare: three small JSON files that name installed classes. No code is shipped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_FETCH_EVERY = 0.1
"""Seconds between a site's questions whether there is something to do."""
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

    It goes to `sites`, as far as they are connected; if there are none given, to everybody.
    """
    meta = {
        "name": name,
        "resource_spec": {},
        "min_clients": min_sites,
        "mandatory_clients": list(mandatory),
        "deploy_map": {"app": ["server", *sites] if sites else ["@ALL"]},
    }
    server = {
        "format_version": 2,
        "server": {"task_request_interval": _FETCH_EVERY},
        "workflows": [{"id": "segment", "path": controller, "args": {}}],
    }
    site = {
        "format_version": 2,
        "default_task_fetch_interval": _FETCH_EVERY,
        "submit_task_result_timeout": _HAND_OVER_WITHIN,
        "executors": [{"tasks": ["*"], "executor": {"path": executor, "args": {}}}],
    }
    config = folder / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    (config / "config_fed_server.json").write_text(json.dumps(server, indent=1))
    (config / "config_fed_client.json").write_text(json.dumps(site, indent=1))
    return folder
