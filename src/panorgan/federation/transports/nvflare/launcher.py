"""How NVFlare starts a job's process: with installed code only.

NVFlare's own launcher hands its whole import path down and adds a folder of the job to it. Here the process starts with
Python's `-P` and the environment of its parent: neither the working folder (the kit) nor the job's is on the path.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle, ProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.utils.job_launcher_utils import get_credential_env
from nvflare.utils.process_utils import spawn_process

from panorgan.federation.transports.nvflare.jobs import is_job_id


class InstalledCodeLauncher(ProcessJobLauncher):
    """Starts a job's process from installed code; subclasses may look at the kit first."""

    def check_kit(self, kit: Path) -> None:
        """Raise if no job may start from this kit as it is now."""

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Called by NVFlare for every job that it has accepted."""
        if not is_job_id(job_meta.get(JobConstants.JOB_ID)):
            raise ValueError("this is not the name of a job")
        self.check_kit(Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()).resolve())
        python, *arguments = shlex.split(self.get_command(job_meta, fl_ctx), True)
        secrets = get_credential_env(fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS) or {})
        return ProcessHandle(process_adapter=spawn_process([python, "-P", *arguments], {**os.environ, **secrets}))


class SiteProcessLauncher(InstalledCodeLauncher, ClientProcessJobLauncher):
    """At a site."""


class ServerLauncher(InstalledCodeLauncher, ServerProcessJobLauncher):
    """At the server."""
