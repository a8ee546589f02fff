"""What a federated round costs besides training: messages, checks, aggregation, checkpoint.

    python benchmarks/round_overhead.py [--json] [--sites 4] [--rounds 3] [--steps 2] [--patch 64 64 64]

A 20 M-parameter U-Net, all sites in this process. Training steps are timed in the same run and extrapolated to 80 per
site; `share` is the overhead of a round against the 80 steps of *one* site (as if all sites trained at once, the
strict reading), `share_sequential` against the 80 steps of every site (as the simulation really runs). The second part
measures the server's memory for 2 to 16 sites that answer without training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panorgan.anatomy import Vocabulary
from panorgan.federation.coordinator import Coordinator, CoordinatorSetup
from panorgan.federation.events import Event, EventLog
from panorgan.federation.message import Message
from panorgan.federation.settings import OptimizerSettings, TrainingSettings
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.tasks import Task, answer_meta
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import SiteRule
from panorgan.methods.fedavg import FedAvg, FedAvgConfig
from panorgan.networks import UNetSettings
from panorgan.preparation.sampling import SamplingSettings
from panorgan.preparation.store import StoredCase

VOCABULARY = Vocabulary(["liver"])
NETWORK = UNetSettings(features=(32, 64, 128, 256, 440))
STEPS_PER_ROUND = 80


def make_case(folder: Path, patch: tuple[int, int, int]) -> StoredCase:
    """A stored case of noise, a little larger than a patch."""
    folder.mkdir(parents=True)
    shape = tuple(n + 8 for n in patch)
    random = np.random.default_rng(0)
    np.save(folder / "image.npy", random.normal(size=shape).astype(np.float16))
    np.save(folder / "labels.npy", (random.random(shape) < 0.2).astype(np.uint8))
    np.savez(folder / "foreground.npz", liver=np.array([[4, 4, 4]], dtype=np.int32))
    (folder / "case.json").write_text('{"spacing_mm": [1, 1, 1]}')
    return StoredCase("case", "case", "site", ("liver",), folder)


def timed_rounds(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Real rounds with real (few) steps; everything that is not a local step counts as overhead."""
    device = torch.device(arguments.device)
    patch = tuple(arguments.patch)
    case = make_case(folder / "case", patch)
    training = TrainingSettings(
        rounds=arguments.rounds + 1,
        local_steps=arguments.steps,
        validate_every=0,
        precision="bfloat16" if device.type == "cuda" else "float32",
        sampling=SamplingSettings(patch_size=patch, batch_size=2),
        optimizer=OptimizerSettings(),
    )
    in_steps = {"seconds": 0.0, "steps": 0}

    class Site(SiteRule):
        """FedAvg's; taking over the received weights is not training, so its time is taken off again."""

        def before_round(self) -> None:
            began = time.perf_counter()
            super().before_round()
            if device.type == "cuda":
                torch.cuda.synchronize()
            in_steps["seconds"] -= time.perf_counter() - began

    class Measured(FedAvg):
        """FedAvg under a stopwatch."""

    Measured.Site = Site
    method = Measured(FedAvgConfig())

    class Timed(SiteWorker):
        def _run_steps(self, rule: Any, task: Task) -> dict[str, float]:
            began = time.perf_counter()
            numbers = super()._run_steps(rule, task)
            if device.type == "cuda":
                torch.cuda.synchronize()
            in_steps["seconds"] += time.perf_counter() - began
            in_steps["steps"] += arguments.steps
            return numbers

    setup = SiteSetup(VOCABULARY, method, NETWORK, training, device=device)
    names = [f"site{i:02d}" for i in range(arguments.sites)]
    workers = {name: Timed(name, SiteData([case]), setup, folder / name) for name in names}
    rounds: list[Event] = []
    events = EventLog(folder / "events.jsonl", (lambda event: rounds.append(event) if event.kind == "round" else None,))
    coordinator = Coordinator.begin(
        CoordinatorSetup("bench", VOCABULARY, method, NETWORK, training), LocalTransport(workers), folder, events
    )
    parameters = sum(value.numel() for value in coordinator.state.weights.values())
    coordinator.run(1)  # warm up: build networks, fill caches
    in_steps.update(seconds=0.0, steps=0)
    began = time.perf_counter()
    coordinator.run()
    wall = time.perf_counter() - began
    step = in_steps["seconds"] / in_steps["steps"]
    overhead = (wall - in_steps["seconds"]) / arguments.rounds
    seconds = [event.facts["seconds"] for event in rounds[1:]]
    mean = {part: sum(s[part] for s in seconds) / len(seconds) for part in ("aggregate", "checkpoint")}
    return {
        "parameters": parameters,
        "sites": arguments.sites,
        "step_seconds": step,
        "overhead_seconds_per_round": overhead,
        "aggregate_seconds": mean["aggregate"],
        "checkpoint_seconds": mean["checkpoint"],
        "messages_and_checks_seconds": overhead - mean["aggregate"] - mean["checkpoint"],
        "share": overhead / (STEPS_PER_ROUND * step),
        "share_sequential": overhead / (STEPS_PER_ROUND * step * arguments.sites),
    }


class Echo:
    """A site that answers with what it received."""

    def __init__(self, name: str) -> None:
        self.name = name

    def handle(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        task = Task.from_meta(message.meta)
        numbers = {"train_cases": 3.0, "annotated/liver": 3.0} if task.kind == "join" else {"cases": 3.0}
        return Message(message.tensors, numbers, answer_meta(task, self.name)).to_bytes()


def peak_memory(sites: int) -> float:
    """Largest anonymous memory (MB) of a server process with this many sites, over two rounds."""
    peak = 0.0
    stop = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.is_set():
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    peak = max(peak, float(line.split()[1]) / 1024)
            time.sleep(0.005)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        training = TrainingSettings(rounds=2, validate_every=0)
        setup = CoordinatorSetup("bench", VOCABULARY, FedAvg(FedAvgConfig()), NETWORK, training)
        transport = LocalTransport({f"site{i:02d}": Echo(f"site{i:02d}") for i in range(sites)})
        coordinator = Coordinator.begin(setup, transport, folder, EventLog(folder / "events.jsonl"))
        watcher = threading.Thread(target=sample)
        watcher.start()
        coordinator.run()
        stop.set()
        watcher.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="last line is one JSON object")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per site and round")
    parser.add_argument("--patch", type=int, nargs=3, default=(64, 64, 64))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    if arguments.memory_of:
        print(peak_memory(arguments.memory_of))
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = timed_rounds(arguments, Path(scratch))
    result["device"] = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    result["patch"] = list(arguments.patch)
    result["server_memory_mb"] = {}
    for sites in (2, 4, 8, 16):
        command = [sys.executable, __file__, "--memory-of", str(sites)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        result["server_memory_mb"][sites] = round(float(answer.stdout), 1)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<30} {value:.4f}" if isinstance(value, float) else f"{name:<30} {value}")


if __name__ == "__main__":
    main()
