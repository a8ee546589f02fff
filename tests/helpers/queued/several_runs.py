"""Several runs in one job, so that its processes start once: see `Loopback.run_all`; `sitecustomize` loads this.

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

QUEUE, CURRENT, KEPT = "queue", "current-run", "kept-models"
"""In the federation's folder: what each run agreed on, which run it is now, and each site's model of those before."""


def take_over() -> None:
    """In a process of a job, before it begins."""
    folder = Path(os.environ["PANORGAN_LOOPBACK"])
    run_one, open_one = CoordinatorJob.run_segment, SiteJob.open_site

    def run_segment(self, transport, kit, job):
        for agreed in sorted((folder / QUEUE).iterdir()):
            lay_out(agreed, folder)
            run_one(self, transport, kit, job)
            for site in (folder / "sites").iterdir():
                if (model := SiteKit(site).model).is_dir():
                    shutil.copytree(model, folder / KEPT / agreed.name / site.name, dirs_exist_ok=True)

    CoordinatorJob.run_segment = run_segment
    SiteJob.open_site = lambda self, kit, name: OneMachinePerRun(folder, lambda: open_one(self, kit, name))


def lay_out(agreed: Path, folder: Path) -> None:
    """Give every kit the files of this run: those of its people, and with them the approval."""
    for local in agreed.rglob("local"):
        place = folder / local.relative_to(agreed)
        mode = stat.S_IMODE(place.stat().st_mode)
        place.chmod(mode | stat.S_IWUSR)
        for file in local.iterdir():
            copy = place.parent / f"{file.name}.next"
            shutil.copy2(file, copy)
            copy.replace(place / file.name)
        place.chmod(mode)
    (folder / CURRENT).write_text(agreed.name)


class OneMachinePerRun:
    """Answers with the machine of the run that is under way."""

    def __init__(self, folder: Path, open_machine) -> None:
        self._current, self._open_machine = folder / CURRENT, open_machine
        self._run, self._machine = "", None

    def handle(self, request: bytes) -> bytes:
        """As the machine does."""
        run = self._current.read_text()
        if run != self._run:
            if self._machine is not None:
                self._machine._lock.close()  # as when its process ends
            self._run, self._machine = run, self._open_machine()
        return self._machine.handle(request)
