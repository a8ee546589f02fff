"""Checks that a participant makes of a job before it uses anything in it.

NVFlare's list of allowed classes matches by prefix, leaves out jobs that bring code, and lets a job say much more than
which class to start: arguments, filters, other files. A job of panorgan has none of these. So a participant compares
the job with the one form that panorgan writes (`jobs.py`), and refuses every other, whatever it would do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.private.fed.utils.app_deployer import AppDeployer

from panorgan.federation.transports.nvflare.jobs import (
    CONFIG,
    CONTROLLER,
    EXECUTOR,
    SERVER_CONFIG,
    SITE_CONFIG,
    as_text,
    is_job_id,
    server_config,
    site_config,
)

_SIGNATURES = (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)
_FILES = {
    *_SIGNATURES,
    CONFIG,
    *(f"{CONFIG}/{name}" for name in (*_SIGNATURES, SERVER_CONFIG, SITE_CONFIG)),
}
_LARGEST = 10_000
"""Characters; our settings have a few hundred."""


def objection(app: Path) -> str:
    """Why a job's folder is not one that panorgan writes; empty if it is."""
    found = {path.relative_to(app).as_posix(): path for path in app.rglob("*")}
    if unknown := sorted(found.keys() - _FILES):
        return f"the job brings what no job of panorgan has: {', '.join(unknown[:3])}"
    if any(path.is_symlink() for path in found.values()):
        return "the job brings links"
    return _differs(app / CONFIG / SERVER_CONFIG, _as_server) or _differs(app / CONFIG / SITE_CONFIG, _as_site)


def _as_server(said: dict[str, Any]) -> dict[str, Any]:
    return server_config(CONTROLLER, _seconds(said["server"]["task_request_interval"]))


def _as_site(said: dict[str, Any]) -> dict[str, Any]:
    within = _seconds(said["submit_task_result_timeout"])
    return site_config(EXECUTOR, _seconds(said["default_task_fetch_interval"]), within)


def _seconds(value: object) -> float:
    """The only values that a job may choose."""
    if type(value) is not float or not 0 < value < float("inf"):
        raise ValueError(value)
    return value


def _differs(path: Path, form: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """Compares the text, and not only the parsed content: another parser must not read something else."""
    refusal = f"{path.name} is not what a job of panorgan says"
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST)
        return "" if text == as_text(form(json.loads(text))) else refusal
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return refusal


class JobValidator(AppValidator):
    """Asked by NVFlare, at the server and at every site, when a job has arrived and before it is started."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """The objection; nothing is added to what NVFlare itself finds."""
        return objection(Path(app_folder)), {}


class SiteDeployer(AppDeployer):
    """Puts an arriving job into a folder of its own: NVFlare's, but only under a name that a job may have.

    NVFlare empties the folder of that name first; a hostile server could call its job `local`.
    """

    def deploy(
        self,
        workspace: Workspace,
        job_id: str,
        job_meta: dict[str, Any],
        app_name: str,
        app_data: bytes,
        fl_ctx: FLContext,
    ) -> str:
        """The reason why not; empty if all is well."""
        if not is_job_id(job_id):
            return "this is not the name of a job"
        return str(super().deploy(workspace, job_id, job_meta, app_name, app_data, fl_ctx) or "")
