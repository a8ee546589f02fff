"""What NVFlare may do at a participant: resources, permissions and logs, in NVFlare's own files in `local/`."""

from __future__ import annotations

import copy
from typing import Any

CLASS_ALLOW_LIST = ["panorgan."]
"""Only installed classes whose path begins so may be named in a job. NVFlare's own log streamers are left out (see
below), so none of its classes is needed."""

ADMIN_TIMEOUT_SECONDS = 30.0
"""How long a site may take to accept a job; a site behind a slow line gets more than NVFlare's 10 s."""

LOG_BYTES, KEPT_LOGS = 10_000_000, 3
"""Size of a log of NVFlare, and how many older ones stay beside it."""

JOBS = "storage/jobs"
SNAPSHOTS = "storage/snapshots"

_STORAGE = "panorgan.federation.transports.nvflare.storage.KitStorage"
DOOR = {"id": "door", "path": "panorgan.federation.transports.nvflare.door.Door", "args": {}}
_KNOCKING = {"id": "knocking", "path": "panorgan.federation.transports.nvflare.knocking.Knocking", "args": {}}
_OTHER_ROLES = ("org_admin", "lead", "member")
_RIGHTS = (
    "submit_job",
    "clone_job",
    "manage_job",
    "configure_job_log",
    "download_job",
    "view",
    "operate",
    "shell_commands",
    "byoc",
    "server-predeployed-flwr",
)
_LEAVE_OUT = {"site_log_streamer", "log_receiver"}
"""Components of NVFlare that carry a site's logs to the server. File names and patient ids may stand in them."""


def server_resources(default: dict[str, Any], heartbeat_seconds: int) -> dict[str, Any]:
    """NVFlare's `resources.json` for the server: one job at a time, and everything stored inside the kit."""
    resources = _restricted(default)
    resources["servers"][0].update(heart_beat_timeout=heartbeat_seconds, admin_timeout=ADMIN_TIMEOUT_SECONDS)
    resources["servers"][0].pop("download_job_url", None)
    resources["snapshot_persistor"]["args"]["storage"] = {"path": _STORAGE, "args": {"folder": SNAPSHOTS}}
    component = {part["id"]: part for part in resources["components"]}
    # One run at a time; a job that had to wait for a site is tried again soon, not after ten minutes.
    component["job_scheduler"]["args"] |= {"max_jobs": 1, "min_schedule_interval": 2.0, "max_schedule_interval": 10.0}
    component["job_manager"]["args"]["uri_root"] = JOBS
    component["job_store"].update(path=_STORAGE, args={})
    resources["components"].append(DOOR)
    return resources


def site_resources(default: dict[str, Any]) -> dict[str, Any]:
    """NVFlare's `resources.json` for a site: no GPUs to give away (panorgan takes its own), no logs that travel."""
    resources = _restricted(default)
    resources["allow_log_streaming"] = False
    component = {part["id"]: part for part in resources["components"]}
    component["resource_manager"]["args"].update(num_of_gpus=0, mem_per_gpu_in_GiB=0)
    resources["components"].append(_KNOCKING)
    return resources


def admin_resources(default: dict[str, Any]) -> dict[str, Any]:
    """NVFlare's `resources.json` for the coordinator as a person; patient with a busy server."""
    resources = copy.deepcopy(default)
    resources["admin"].update(login_timeout=30.0, authenticate_msg_timeout=10.0)
    return resources


def _restricted(default: dict[str, Any]) -> dict[str, Any]:
    """A copy in which jobs may name panorgan's classes only."""
    resources = copy.deepcopy(default)
    resources["class_allow_list"] = list(CLASS_ALLOW_LIST)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["components"] = [part for part in resources["components"] if part["id"] not in _LEAVE_OUT]
    return resources


def connections() -> dict[str, Any]:
    """NVFlare's `comm_config.json`: the processes of one participant, too, talk to each other with mutual TLS.

    They meet on loopback, where NVFlare's default is plain TCP: whoever is on the machine could listen, or join in.
    """
    return {"internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}}}


def server_authorization() -> dict[str, Any]:
    """The coordinator may start, watch and stop jobs; nobody may send code or run commands on the machine."""
    return _authorization(
        submit_job="any", manage_job="any", view="any", operate="any", configure_site_log="none", report_version="any"
    )


def site_authorization() -> dict[str, Any]:
    """At a site the coordinator may start and stop jobs and ask whether it is alive. That is all."""
    return _authorization(submit_job="any", manage_job="any", check_status="any", report_version="any")


def _authorization(**coordinator: str) -> dict[str, Any]:
    nothing = dict.fromkeys(_RIGHTS, "none")
    permissions: dict[str, Any] = {"project_admin": {**nothing, **coordinator}}
    permissions.update({role: dict(nothing) for role in _OTHER_ROLES})
    return {"format_version": "1.0", "permissions": permissions}


def log_config(default: dict[str, Any]) -> dict[str, Any]:
    """Two files per process, `log.txt` and `error_log.txt`, and plain lines on the console without colours.

    NVFlare's default would keep 220 MB of each.
    """
    config = copy.deepcopy(default)
    for handler in ("jsonFileHandler", "FLFileHandler"):
        config["handlers"].pop(handler)
    for handler in ("logFileHandler", "errorFileHandler"):
        config["handlers"][handler].update(maxBytes=LOG_BYTES, backupCount=KEPT_LOGS)
    config["handlers"]["consoleHandler"]["formatter"] = "baseFormatter"
    config["formatters"] = {"baseFormatter": config["formatters"]["baseFormatter"]}
    config["filters"] = {}
    config["loggers"]["root"]["handlers"] = ["consoleHandler", "logFileHandler", "errorFileHandler"]
    return config
