"""What NVFlare may do at a participant: resources, permissions and logs, in NVFlare's own files in `local/`.

Kits at hospitals name the classes below by their paths. A class that moves must stay importable under its old path.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from panorgan.errors import ConfigError
from panorgan.federation.files import write_atomically
from panorgan.federation.transports.nvflare.jobs import CONTROLLER, EXECUTOR

SITE_CLASSES = [EXECUTOR]
"""What a job may name at a site: this class, by its whole name."""
SERVER_CLASSES = [CONTROLLER]
"""What a job may name at the server. The storage is not among them: the kit names it, and no job."""

ADMIN_TIMEOUT_SECONDS = 30.0
"""How long a site may take to accept a job; a site behind a slow line gets more than NVFlare's 10 s."""

LOG_BYTES, KEPT_LOGS = 10_000_000, 3
"""Size of a log of NVFlare, and how many older ones stay next to it."""

JOBS = "storage/jobs"
SNAPSHOTS = "storage/snapshots"

_STORAGE = "panorgan.federation.transports.nvflare.storage.KitStorage"
_HERE = "panorgan.federation.transports.nvflare"
_JOB_VALIDATOR = {"path": f"{_HERE}.job_check.JobValidator", "args": {}}
"""Holds whole jobs to our own form: NVFlare's list matches by prefix, and only what is built."""
_SERVER_FILTER = {"id": "message_filter", "path": f"{_HERE}.message_filter.ServerMessageFilter", "args": {}}
_SITE_FILTER = {"id": "message_filter", "path": f"{_HERE}.message_filter.SiteMessageFilter", "args": {}}
_SERVER_FILTER_PATHS = (_SERVER_FILTER["path"], f"{_HERE}.door.Door")
"""The second is its name in kits of older versions."""
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
    resources = _restricted(default, SERVER_CLASSES)
    resources["servers"][0].update(heart_beat_timeout=heartbeat_seconds, admin_timeout=ADMIN_TIMEOUT_SECONDS)
    resources["servers"][0].pop("download_job_url", None)
    resources["snapshot_persistor"]["args"]["storage"] = {"path": _STORAGE, "args": {"folder": SNAPSHOTS}}
    component = {part["id"]: part for part in resources["components"]}
    # One run at a time; a job that had to wait for a site is tried again soon, not after ten minutes.
    component["job_scheduler"]["args"] |= {"max_jobs": 1, "min_schedule_interval": 2.0, "max_schedule_interval": 10.0}
    component["job_manager"]["args"]["uri_root"] = JOBS
    component["job_store"].update(path=_STORAGE, args={})
    component["process_launcher"].update(path=f"{_HERE}.launcher.ServerLauncher", args={})
    resources["components"].append(dict(_SERVER_FILTER))
    return resources


def site_resources() -> dict[str, Any]:
    """NVFlare's `resources.json` for a site: no GPUs to give away (panorgan takes its own), no logs that travel.

    Written out in full: a hospital compares its file with what its own installation says.
    """
    managing = "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager"
    consuming = "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
    no_gpus = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": list(SITE_CLASSES),
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "app_validator": dict(_JOB_VALIDATOR),
        "components": [
            {"id": "resource_manager", "path": managing, "args": no_gpus},
            {"id": "resource_consumer", "path": consuming, "args": {}},
            {"id": "process_launcher", "path": "panorgan.deployment.site_launcher.SiteLauncher", "args": {}},
            {"id": "app_deployer", "path": f"{_HERE}.job_check.SiteDeployer", "args": {}},
            dict(_SITE_FILTER),
        ],
    }


def site_policies() -> dict[str, str]:
    """NVFlare's files in a site's `local/`, by name: what this installation lets the engine do."""
    log_default = json.loads(files("nvflare.fuel.utils").joinpath("log_config.json").read_text(encoding="utf-8"))
    content = {
        "resources.json": site_resources(),
        "authorization.json": site_authorization(),
        "comm_config.json": connections(),
        "log_config.json": log_config(log_default),
    }
    return {name: json.dumps(policy, indent=2) + "\n" for name, policy in content.items()}


def check_server(kit: Path) -> None:
    """Raise if NVFlare would import code from the kit, or if jobs may name more than the coordinator's job.

    Kits of older versions let them.
    """
    places = ("local/custom", "admin/local/custom")
    if found := [place for place in places if (kit / place).exists()]:
        raise ConfigError(
            f"Code lies in the kit: {', '.join(found)}.",
            code="code-in-kit",
            fix="Find out who put it there, and move it out of the kit.",
        )
    path = kit / "local" / "resources.json"
    try:
        allowed = json.loads(path.read_text(encoding="utf-8"))["class_allow_list"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"local/resources.json cannot be read ({error}).",
            code="resources-unreadable",
            fix="Bring it back from the kit.",
        ) from error
    if allowed != SERVER_CLASSES:
        raise ConfigError(
            f"Jobs may name more than they need: class_allow_list in local/resources.json is {allowed}.",
            code="jobs-too-free",
            fix=f"Write there: {json.dumps(SERVER_CLASSES)}",
        )


def add_message_filter(path: Path) -> bool:
    """Add it to the server's `resources.json` where it is missing; returns whether it was."""
    try:
        resources = json.loads(path.read_text(encoding="utf-8"))
        components = resources["components"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            "The server's own settings cannot be read.",
            code="resources-unreadable",
            where=str(path),
            why=str(error),
            fix="Bring the file back.",
        ) from error
    if any(part.get("path") in _SERVER_FILTER_PATHS for part in components):
        return False
    components.append(dict(_SERVER_FILTER))
    write_atomically(path, json.dumps(resources, indent=2) + "\n", durable=True)
    return True


def check_connection(path: Path) -> None:
    """Raise if a site's `fed_client.json` says more than where to connect; one that is missing says nothing."""
    if path.exists() and not is_plain_connection(_json(path)):
        raise ConfigError(
            "fed_client.json says more than where to connect.",
            code="not-a-plain-connection",
            where=str(path),
            fix="Do not use this kit; ask the coordinator for another, and why.",
        )


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def is_plain_connection(said: object) -> bool:
    """Whether a site's `fed_client.json` holds the server's address and the site's name, and nothing else.

    NVFlare reads it together with `resources.json`: it could name components too.
    """
    try:
        server, client = said["servers"][0], said["client"]  # type: ignore[index]
        own = {"name": server["name"], "target": server["service"]["target"], "identity": server["identity"]}
        own["fqsn"] = client["fqsn"]
    except (LookupError, TypeError):
        return False
    return all(isinstance(value, str) for value in own.values()) and said == _connection(own)


def _connection(own: Mapping[str, str]) -> dict[str, Any]:
    service = {"target": own["target"], "scheme": "grpc"}
    return {
        "format_version": 2,
        "require_signed_jobs": True,
        "servers": [{"name": own["name"], "service": service, "identity": own["identity"]}],
        "client": {
            "ssl_private_key": "client.key",
            "ssl_cert": "client.crt",
            "ssl_root_cert": "rootCA.pem",
            "fqsn": own["fqsn"],
            "is_leaf": True,
            "connection_security": "mtls",
        },
    }


def admin_resources(default: dict[str, Any]) -> dict[str, Any]:
    """NVFlare's `resources.json` for the coordinator as a person; patient with a busy server."""
    resources = copy.deepcopy(default)
    resources["admin"].update(login_timeout=30.0, authenticate_msg_timeout=10.0)
    return resources


def _restricted(default: dict[str, Any], classes: list[str]) -> dict[str, Any]:
    """A copy in which jobs may name these classes only."""
    resources = copy.deepcopy(default)
    resources["class_allow_list"] = list(classes)
    resources["app_validator"] = dict(_JOB_VALIDATOR)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["components"] = [part for part in resources["components"] if part["id"] not in _LEAVE_OUT]
    return resources


def connections() -> dict[str, Any]:
    """NVFlare's `comm_config.json`: the processes of one participant, too, talk to each other with mutual TLS.

    They meet on loopback, where NVFlare's default is plain TCP: every user of the machine could listen, or join in.
    """
    return {"internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}}}


def server_authorization() -> dict[str, Any]:
    """The coordinator may start, watch and stop jobs; no role may send code or run commands on the machine."""
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
