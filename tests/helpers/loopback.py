"""A real federation on 127.0.0.1: provisioned kits, mutual TLS, server and sites as processes of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from panorgan.config import Experiment, SiteSettings
from panorgan.deployment.approval import approve, reopen
from panorgan.deployment.drive import drive
from panorgan.deployment.folders import ServerKit, SiteKit
from panorgan.deployment.kits import make_kits
from panorgan.deployment.settings import FederationSettings
from panorgan.federation.egress import default_policy, policy_text
from panorgan.federation.events import Event
from panorgan.workflows.starting_model import copy_start

PLUGIN = Path(__file__).parent / "plugin"
NOT_INSTALLED = Path(__file__).parent / "not_installed"
QUEUED = Path(__file__).parent / "queued"
HOST = "localhost"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Loopback:
    """Server and sites from kits in a folder. Use as a context manager: nothing outlives it."""

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        sites: Mapping[str, SiteSettings],
        joins_later: Sequence[str] = (),
        queues: bool = False,
        **rounds: Any,
    ) -> None:
        """`queues`: whether a job may do several runs, see `run_all`."""
        self.folder, self.sites, self.queues = folder, dict(sites), queues
        self.settings = FederationSettings(
            name="loopback",
            experiment=Path("experiment.yaml"),
            server={"host": HOST, "port": free_port()},
            sites={name: {"joins_later": name in joins_later} for name in sites},
            rounds={"deadline_minutes": 2, **rounds},
            heartbeat_seconds=15,
        )
        make_kits(self.settings, experiment.agreement(), folder)
        self.server_kit = ServerKit(folder / "server")
        self.site_kits = {name: SiteKit(folder / "sites" / name) for name in sites}
        for name, site in sites.items():
            self.fill_in(name, data=site.as_json(), hardware={"device": "cpu", "threads": 1, "workers": 1})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._later: set[str] = set()

    def without(self, *names: str) -> Loopback:
        """These are not started by `with`."""
        self._later = set(names)
        return self

    def fill_in(self, name: str, **changes: Any) -> None:
        """What a hospital does with an editor, and then approves."""
        kit = self.site_kits[name]
        reopen(kit)
        kit.settings.write_text(yaml.safe_dump({**yaml.safe_load(kit.settings.read_text()), **changes}))
        self.approve(kit)

    def approve(self, kit: SiteKit) -> None:
        """What a hospital does when it has read its kit."""
        approve(kit)

    def agree_on(self, experiment: Experiment, run: str, **rounds: Any) -> Path:
        """Give everybody another experiment and the server another run folder, without restarting anything."""
        self._wait_for_sites()
        agreement = experiment.agreement()
        text = yaml.safe_dump(agreement.without_places().as_json())
        shutil.rmtree(self.server_kit.start, ignore_errors=True)
        copy_start(agreement, self.server_kit.start)
        for kit in (self.server_kit, *self.site_kits.values()):
            if isinstance(kit, SiteKit):
                reopen(kit)
            kit.experiment.write_text(text)
            content = yaml.safe_load(kit.settings.read_text())
            content["experiment_fingerprint"] = agreement.fingerprint()
            if isinstance(kit, ServerKit):
                content["run"] = run
                content["rounds"] = {**content["rounds"], **rounds}
            else:
                method = agreement.method["name"]
                kit.egress_policy.write_text(policy_text(default_policy(method), method))
            kit.settings.write_text(yaml.safe_dump(content))
            if isinstance(kit, SiteKit):
                self.approve(kit)
        return self.server_kit.path / run

    def _wait_for_sites(self) -> None:
        """Until those that were started are connected: one that is starting must not find its kit half rewritten."""
        ends = time.monotonic() + 150
        for name in self.processes.keys() & self.site_kits.keys():
            while "connected to the server" not in (self.folder / f"{name}.out").read_text(errors="replace"):
                assert time.monotonic() < ends, self.words()
                time.sleep(0.1)

    def run_all(self, experiments: Mapping[str, Experiment]) -> dict[str, Path]:
        """Let one job do several runs, one after the other (`queued/several_runs.py`); their folders by name.

        Those that start from a model start from the same one.
        """
        queue, folders = self.folder / "queue", {}
        for run, experiment in sorted(experiments.items(), reverse=True):  # at last that which the job begins with
            folders[run] = self.agree_on(experiment, run)
            for kit in (self.server_kit, *self.site_kits.values()):
                shutil.copytree(kit.local, queue / run / kit.path.relative_to(self.folder) / "local")
        try:
            drive_to_its_end(self.server_kit, seconds=300 + 30 * len(experiments))
        finally:
            shutil.rmtree(queue)
        return folders

    def kept_model(self, run: str, site: str) -> Path:
        """The model that a site had after one of several runs."""
        return self.folder / "kept-models" / run / site

    def start(self, name: str) -> None:
        """Start the server (`server`), a site, or the coordinator's `start` (`driver`)."""
        verb, kit = {"server": ("server", self.server_kit), "driver": ("start", self.server_kit)}.get(
            name, ("site", self.site_kits.get(name))
        )
        command = [sys.executable, "-P", "-m", "panorgan", "federation", verb]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment["PANORGAN_LOOPBACK"] = str(self.folder)
        ours = [PLUGIN, NOT_INSTALLED, *([QUEUED] if self.queues else [])]
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, ours), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
        out = (self.folder / f"{name}.out").open("ab")
        with out:
            self.processes[name] = subprocess.Popen(
                [*command, str(kit.path)], env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def restart_dead(self) -> None:
        """What a service manager does. A driver that has finished its run stays away."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None and not (name == "driver" and process.returncode == 0):
                self.start(name)

    def kill(self, name: str) -> None:
        """kill -9 of what was started, and of all that it started."""
        process = self.processes.pop(name, None)
        if process is not None:
            for child in reversed(descendants(process.pid)):
                kill_process(child)
            kill_process(process.pid)
            process.wait(10)

    def words(self) -> str:
        """The last words of everybody, for a failing test."""
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def __enter__(self) -> Loopback:
        for name in ("server", *self.site_kits):
            if name not in self._later:
                self.start(name)
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.processes):
            self.kill(name)


def drive_to_its_end(
    kit: ServerKit, on_event: Callable[[Event], None] = lambda event: None, seconds: float = 400
) -> None:
    """`drive`, but a run that hangs fails the test instead of holding it up."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            drive(kit, on_event)
        except BaseException as error:
            errors.append(error)

    driver = threading.Thread(target=run, daemon=True)
    driver.start()
    driver.join(seconds)
    if errors:
        raise errors[0]
    assert not driver.is_alive(), "the run did not end in time"


def descendants(process: int) -> list[int]:
    """Process ids below a process, nearest first."""
    try:
        tasks = Path(f"/proc/{process}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [found for child in children for found in (child, *descendants(child))]


def kill_process(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
