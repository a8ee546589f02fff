"""What a round between hospitals costs besides training, beside NVFlare's own FedAvg and beside one process.

    python benchmarks/network_round.py [--json] [--rounds 8] [--repeats 2] [--folder PATH]

A 20 M-parameter U-Net (80 MB), three sites that do no training, server and sites as processes of provisioned kits on
127.0.0.1 with mutual TLS. In the same run, on the same processes, one job after the other, in turns:

- `panorgan`: the real coordinator job (rounds, checks, spool, mean, durable checkpoint) and the real site machine
  (parsing, egress guard, audit log); only the training steps are left out: the worker answers with what it received.
- `nvflare_fedavg`: NVFlare's FedAvg controller with its PyTorch persistor and the leanest executor there can be, with
  NumPy arrays (its recipe's default), at our polling intervals.
- `nvflare_fedavg_tensors`: the same with torch tensors.
- `nvflare_fedavg_defaults`: NumPy arrays, at NVFlare's own polling intervals.
- `in_process`: the `panorgan` job once more, with the sites in one process.

A round lasts from its start to the start of the next one, so it includes saving the model. `ratios` compare medians;
the aim is at most 1.0 against the faster one of NVFlare's two formats at our intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests" / "helpers")]

from loopback import Loopback, descendants  # noqa: E402

import network_bench  # noqa: E402
from panorgan.config import Experiment, SiteSettings, parse_experiment  # noqa: E402
from panorgan.deployment.approval import record, reopen  # noqa: E402
from panorgan.deployment.folders import Kit, SiteKit  # noqa: E402
from panorgan.deployment.kit_files import load_coordinator_file  # noqa: E402
from panorgan.deployment.segment import run_segment  # noqa: E402
from panorgan.federation.engine import NotConnectedError  # noqa: E402
from panorgan.federation.events import read_events  # noqa: E402
from panorgan.federation.transports.local import LocalTransport  # noqa: E402
from panorgan.federation.transports.nvflare.jobs import CONTROLLER, write_job  # noqa: E402
from panorgan.federation.transports.nvflare.session import NVFlareSession  # noqa: E402

SITES = ("east", "north", "south")
WARM_UP = 2
LONGEST_JOB = 900.0


def experiment(rounds: int) -> Experiment:
    """The agreement; the sites' folders are never looked into."""
    return parse_experiment(
        {
            "name": "network-round",
            "vocabulary": list(network_bench.VOCABULARY),
            "sites": {name: {"folder": "nowhere"} for name in SITES},
            "plan": {"spacing_mm": [2, 2, 2], "intensity": "window", "window_hu": [-160, 240]},
            "network": {"features": list(network_bench.FEATURES)},
            "training": {"rounds": rounds, "validate_every": 0, "min_sites": len(SITES)},
        }
    )


class ProcessorTime:
    """Samples what a federation's processes have used, so that it is known for any stretch of time.

    Wall time suffers from whatever else a machine does; this does not.
    """

    def __init__(self, federation: Loopback) -> None:
        self._federation = federation
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Seconds used by the server's processes and by those of all sites."""
        first = min(self._samples, key=lambda sample: abs(sample[0] - began))[1]
        last = min(self._samples, key=lambda sample: abs(sample[0] - ended))[1]
        return {who: last[who] - first[who] for who in last}

    def close(self) -> None:
        """No more samples."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.1):
            used = {"server": 0.0, "sites": 0.0}
            for name, process in list(self._federation.processes.items()):
                for one in (process.pid, *descendants(process.pid)):
                    used["server" if name == "server" else "sites"] += seconds_of(one)
            self._samples.append((time.time(), used))


def seconds_of(process: int) -> float:
    """Processor time that a process has used itself."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bench:
    """A running federation, and what was measured on it."""

    def __init__(self, federation: Loopback, rounds: int) -> None:
        self.federation, self.rounds = federation, rounds
        self.kit = federation.server_kit
        self.session = NVFlareSession(self.kit.admin, load_coordinator_file(self.kit).coordinator)
        self.seconds: dict[str, list[float]] = {}
        self.parts: dict[str, list[dict[str, float]]] = {}
        self.bytes: dict[str, int] = {}
        self.processor: dict[str, list[dict[str, float]]] = {}
        self._clock = ProcessorTime(federation)
        self._jobs = 0

    def close(self) -> None:
        """Let go; the session's threads would keep this process alive."""
        self._clock.close()
        self.session.close()

    def wait_for_sites(self) -> None:
        """Until all are connected."""
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            with contextlib.suppress(NotConnectedError):
                if self.session.look().connected.keys() >= set(SITES):
                    return
            time.sleep(1)
        raise SystemExit("the sites did not connect; see engine.out in the kits")

    def panorgan(self, name: str, over_network: bool) -> None:
        """One run of ours, in one job or in this process."""
        self._jobs += 1
        run = self.federation.agree_on(experiment(self.rounds), f"run-{self._jobs}", per_segment=self.rounds)
        if over_network:
            job = self._folder()
            write_job(job, name, CONTROLLER, "network_bench.EchoJob", len(SITES), SITES)
            self._do(job)
        else:
            kits = self.federation.site_kits
            machines = {site: network_bench.EchoMachine(kits[site], site) for site in SITES}
            run_segment(self.kit, load_coordinator_file(self.kit), LocalTransport(machines), "in-process")
        events = [event for event in read_events(run / "events.jsonl") if event.kind in ("joined", "round")]
        facts = [event.facts for event in events[1:]]
        self._note(name, [event.time for event in events])
        self.parts.setdefault(name, []).extend(fact["seconds"] for fact in facts[WARM_UP:])
        self.bytes[name] = facts[-1]["bytes_sent"] + facts[-1]["bytes_received"]

    def nvflare(self, name: str, tensors: bool, intervals: bool) -> None:
        """One job of NVFlare's FedAvg."""
        self._jobs += 1
        job = self._folder()
        write_job(job, name, "nvflare.app_common.workflows.fedavg.FedAvg", "network_bench.EchoExecutor", len(SITES))
        config = job / "app" / "config"
        server = json.loads((config / "config_fed_server.json").read_text())
        site = json.loads((config / "config_fed_client.json").read_text())
        site.pop("submit_task_result_timeout", None)  # ours
        controller: dict[str, Any] = {"num_clients": len(SITES), "num_rounds": self.rounds + 1}
        if intervals:
            controller["task_check_period"] = 0.05
        else:
            del server["server"], site["default_task_fetch_interval"]
        server["workflows"][0]["args"] = controller
        persistor = {"model": {"path": "network_bench.Model"}, "allow_numpy_conversion": not tensors}
        server["components"] = [
            {"id": "persistor", "path": "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor"}
            | {"args": persistor},
            {"id": "stopwatch", "path": "network_bench.Stopwatch", "args": {}},
        ]
        (config / "config_fed_server.json").write_text(json.dumps(server))
        (config / "config_fed_client.json").write_text(json.dumps(site))
        done = self._do(job)
        self._note(name, json.loads(network_bench.stopwatch_file(self.kit.path, done).read_text()))

    def _folder(self) -> Path:
        return self.federation.folder / "jobs" / f"{self._jobs:03d}"

    def _do(self, folder: Path) -> str:
        """Submit a job and wait for its end."""
        job = self.session.submit_folder(folder)
        ends = time.monotonic() + LONGEST_JOB
        state = None
        while state is None or state.phase != "ended":
            if time.monotonic() > ends:
                self.session.abort(job)
                raise SystemExit(f"job {job} did not end")
            time.sleep(2)
            with contextlib.suppress(NotConnectedError):  # a busy server may miss a question
                state = self.session.status(job)
        print(f"  {folder.name}: {state.detail}", file=sys.stderr)
        return job

    def _note(self, name: str, moments: list[float]) -> None:
        rounds = [later - sooner for sooner, later in pairwise(moments)]
        if len(rounds) < self.rounds:
            raise SystemExit(f"{name}: only {len(rounds)} of {self.rounds} rounds were done; see the kits' logs")
        warm = rounds[WARM_UP : self.rounds]
        used = self._clock.between(moments[WARM_UP], moments[self.rounds])
        self.processor.setdefault(name, []).append({who: value / len(warm) for who, value in used.items()})
        self.seconds.setdefault(name, []).extend(warm)
        busy = {who: round(value / len(warm), 2) for who, value in used.items()}
        print(f"{name:<26} {statistics.median(warm):7.3f} s per round, processor {busy}", file=sys.stderr)

    def result(self) -> dict[str, Any]:
        """Everything, as JSON."""
        systems: dict[str, Any] = {}
        for name, seconds in self.seconds.items():
            systems[name] = {
                "median_seconds": round(statistics.median(seconds), 4),
                "min_seconds": round(min(seconds), 4),
                "max_seconds": round(max(seconds), 4),
                "rounds": len(seconds),
                "seconds": [round(value, 4) for value in seconds],
            }
            if name != "in_process":
                used = self.processor[name]
                systems[name]["processor_seconds_per_round"] = {
                    who: round(statistics.median(one[who] for one in used), 4) for who in used[0]
                }
            if name in self.bytes:
                systems[name]["bytes_per_round"] = self.bytes[name]
                parts = self.parts[name]
                systems[name]["median_parts"] = {p: statistics.median(one[p] for one in parts) for p in parts[0]}
        median = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        ours = median["panorgan"]
        ratios = {f"panorgan / {name}": round(ours / median[name], 4) for name in median if name != "panorgan"}
        formats = [name for name in ("nvflare_fedavg", "nvflare_fedavg_tensors") if name in median]
        best = min((median[name] for name in formats), default=None)
        return {"systems": systems, "ratios": ratios, "ratio": round(ours / best, 4) if best else None}


SYSTEMS = {
    "panorgan": lambda bench: bench.panorgan("panorgan", over_network=True),
    "nvflare_fedavg": lambda bench: bench.nvflare("nvflare_fedavg", tensors=False, intervals=True),
    "nvflare_fedavg_tensors": lambda bench: bench.nvflare("nvflare_fedavg_tensors", tensors=True, intervals=True),
    "nvflare_fedavg_defaults": lambda bench: bench.nvflare("nvflare_fedavg_defaults", tensors=False, intervals=False),
    "in_process": lambda bench: bench.panorgan("in_process", over_network=False),
}


class OpenLoopback(Loopback):
    """Kits that also let the benchmark's own classes, and NVFlare's, run. Not for hospitals."""

    def approve(self, kit: SiteKit) -> None:
        """Approved, but with the engine's policy of the benchmark."""
        super().approve(kit)
        reopen(kit)
        open_to_other_jobs(kit)
        record(kit)


def open_to_other_jobs(kit: Kit) -> None:
    """Let jobs have another form than ours, and name other classes."""
    path = kit.local / "resources.json"
    resources = json.loads(path.read_text())
    resources["class_allow_list"] += ["network_bench.", "nvflare."]
    del resources["app_validator"]
    path.write_text(json.dumps(resources))


def make_federation(folder: Path, rounds: int) -> Loopback:
    """A server and sites on which all systems run."""
    environment = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(environment).rstrip(os.pathsep)
    sites = {name: SiteSettings(folder=Path("nowhere")) for name in SITES}
    federation = OpenLoopback(folder, experiment(rounds), sites, deadline_minutes=10)
    open_to_other_jobs(federation.server_kit)
    return federation


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All systems in turns."""
    with make_federation(folder, arguments.rounds + WARM_UP) as federation:
        bench = Bench(federation, arguments.rounds + WARM_UP)
        try:
            bench.wait_for_sites()
            for _ in range(arguments.repeats):
                for name in arguments.systems:
                    SYSTEMS[name](bench)
        finally:
            bench.close()
    model = network_bench.Model()
    parameters = sum(value.numel() for value in model.state_dict().values())
    return {
        "parameters": parameters,
        "model_bytes": sum(value.numel() * value.element_size() for value in model.state_dict().values()),
        "sites": len(SITES),
        "warm_up_rounds": WARM_UP,
        **bench.result(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "nvflare", "numpy", "safetensors")},
        },
        "cores": os.cpu_count(),
        "load_before": arguments.load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="last line is one JSON object")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds per job, after two that are not")
    parser.add_argument("--repeats", type=int, default=2, help="how often every system has its turn")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--folder", type=Path, help="keep kits and logs here; a scratch folder if left out")
    arguments = parser.parse_args()
    if "panorgan" not in arguments.systems:
        parser.error("the ratios need 'panorgan' among the systems")
    arguments.load = round(os.getloadavg()[0], 2)
    if arguments.folder:
        arguments.folder.mkdir(parents=True)
        result = measure(arguments, arguments.folder)
    else:
        with tempfile.TemporaryDirectory(prefix="network-round-") as scratch:
            result = measure(arguments, Path(scratch))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in {**result["ratios"], "panorgan / fastest format of NVFlare": result["ratio"]}.items():
        print(f"{name:<44} {value}")


if __name__ == "__main__":
    main()
