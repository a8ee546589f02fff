"""Several runs in one job, so that its processes start once: see `Loopback.queue`; `sitecustomize` loads this.

All else is as in the field. Before each run every kit gets the files that its people had agreed on and approved, and
every site opens its machine anew, as each job does.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from panorgan.deployment.coordinator_job import CoordinatorJob
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.site_job import SiteJob

AGREED, KEPT, CURRENT = "agreed", "kept", "current"
"""In the queue's folder: what each run agreed on, what each site kept of it, and which run it is now."""


def take_over() -> None:
    """In a process of a job, before it begins."""
    folder = Path(os.environ["PANORGAN_LOOPBACK"])
    run_one, open_one = CoordinatorJob.run_segment, SiteJob.open_site

    def run_segment(self, transport, kit, job):
        for agreed in sorted((folder / "queue" / AGREED).iterdir()):
            lay_out(folder, agreed.name)
            run_one(self, transport, kit, job)
            for site in (folder / "sites").iterdir():
                if SiteKit(site).model.is_dir():
                    shutil.copytree(SiteKit(site).model, folder / "queue" / KEPT / agreed.name / site.name)

    CoordinatorJob.run_segment = run_segment
    SiteJob.open_site = lambda self, kit, name: OneMachinePerRun(folder, lambda: open_one(self, kit, name))


def lay_out(folder: Path, run: str) -> None:
    """Give every kit the files of this run: those of its people, and with them the approval."""
    for kept in (folder / "queue" / AGREED / run).rglob("local"):
        kit = folder / kept.parent.relative_to(folder / "queue" / AGREED / run)
        local = kit / "local"
        mode = stat.S_IMODE(local.stat().st_mode)
        local.chmod(mode | stat.S_IWUSR)
        for file in kept.iterdir():
            copy = kit / f"{file.name}.next"
            shutil.copy2(file, copy)
            copy.replace(local / file.name)
        local.chmod(mode)
    (folder / "queue" / CURRENT).write_text(run)


class OneMachinePerRun:
    """Answers with the machine of the run that is under way."""

    def __init__(self, folder: Path, open_machine) -> None:
        self._current, self._open_machine = folder / "queue" / CURRENT, open_machine
        self._run, self._machine = "", None

    def handle(self, request: bytes) -> bytes:
        """As the machine does."""
        run = self._current.read_text()
        if run != self._run:
            if self._machine is not None:
                self._machine._lock.close()  # as when its process ends
            self._run, self._machine = run, self._open_machine()
        return self._machine.handle(request)
