"""What a training step of each method costs, relative to the FedAvg step of the same network.

    python benchmarks/step_cost.py [--json] [--device cuda] [--patch 64 128 128] [--features 32 64 128 256]

Seven organs, seven sites, one organ each; the steps are those of one site, as its worker really does them: patches cut
from stored cases, augmentation, the method's step. All methods run in this process in turns, and the median step of a
method is divided by the median FedAvg step of the same network. What happens once (teachers predict the scans) is not
part of a step; its time is told apart. The last part compares inference for all seven organs with that for one.

`flkd_*` and `scaffold` use the multi-head network and so does their FedAvg; `segviz` has its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panorgan.anatomy import Vocabulary
from panorgan.cases.sampling import SamplingSettings
from panorgan.cases.store import StoredCase
from panorgan.federation.admission import first_weights
from panorgan.federation.message import Message
from panorgan.federation.settings import OptimizerSettings, TrainingSettings
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.tasks import Task
from panorgan.federation.vault import RunVaults
from panorgan.methods.base import Method
from panorgan.methods.exchange import Federation, Moment, SiteFacts
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings, organ_network
from panorgan.networks.organ_parts import group_of_key

ORGANS = ("liver", "spleen", "pancreas", "stomach", "aorta", "kidney_left", "kidney_right")
SITE = "liver"  # every site is called by the organ that it annotates
RUN = "bench"
EVERYONE = {"organ_parts": "everyone", "weighting": "uniform"}

CONTENDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # label: (what it is compared with, method, its settings)
    "multihead": ("multihead", "multihead", EVERYONE),
    "flkd_local": ("multihead", "flkd", {"global_weight": 0.0}),
    "flkd_global": ("multihead", "flkd", {"local_weight": 0.0}),
    "flkd_both": ("multihead", "flkd", {}),
    "fedprox": ("multihead", "fedprox", EVERYONE),
    "scaffold": ("multihead", "scaffold", EVERYONE),
    "segviz": ("segviz_fedavg", "segviz", {}),
    "segviz_fedavg": ("segviz_fedavg", "fedavg", EVERYONE),
}
NETWORKS = {"segviz_fedavg": "task_blocks", "fedprox": "heads", "scaffold": "heads"}


class PretrainedTeachers:
    """The answers of a pre-training round: every site's teacher, untrained but of the right shape."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.sites = ORGANS
        self._of = {s: {f"teacher/{k}": v for k, v in weights.items() if group_of_key(k) in (None, s)} for s in ORGANS}

    def keys(self, site: str) -> Sequence[str]:
        """What a site sent."""
        return tuple(self._of[site])

    def array(self, site: str, key: str) -> torch.Tensor:
        """One tensor of it."""
        return self._of[site][key]


def make_case(folder: Path, patch: tuple[int, int, int], name: str) -> StoredCase:
    """A stored case of noise, larger than a patch."""
    folder.mkdir(parents=True)
    shape = tuple(n + 16 for n in patch)
    random = np.random.default_rng(len(name))
    np.save(folder / "image.npy", random.normal(size=shape).astype(np.float16))
    np.save(folder / "labels.npy", (random.random(shape) < 0.2).astype(np.uint8))
    np.savez(folder / "foreground.npz", **{SITE: random.integers(0, min(shape), (100, 3)).astype(np.int32)})
    (folder / "case.json").write_text('{"spacing_mm": [1, 1, 1]}')
    return StoredCase(name, name, SITE, (SITE,), folder)


class Contender:
    """One method at one site, ready to do a few steps when asked."""

    def __init__(self, label: str, arguments: argparse.Namespace, folder: Path) -> None:
        _, name, settings = CONTENDERS[label]
        kind = find_method(name)
        self.method: Method = kind(kind.Config(**settings))
        network = UNetSettings(features=tuple(arguments.features), organs=NETWORKS.get(label, "channels"))  # type: ignore[arg-type]
        facts = {organ: SiteFacts(organ, 2, {organ: 2}) for organ in ORGANS}
        self.federation = Federation(Vocabulary(ORGANS), facts)
        sampling = SamplingSettings(patch_size=tuple(arguments.patch), batch_size=2)
        training = TrainingSettings(
            rounds=10_000,
            local_steps=arguments.steps + 1,
            optimizer=OptimizerSettings(name="sgd", learning_rate=1e-6),
            sampling=sampling,
            precision="bfloat16" if arguments.bfloat16 else "float32",
            overlap=0.0,
        )
        cases = [make_case(folder / label / "store" / n, tuple(arguments.patch), n) for n in ("first", "second")]
        self.device = torch.device(arguments.device)
        setup = SiteSetup(self.federation.vocabulary, self.method, network, training, device=self.device)
        self.worker = SiteWorker(SITE, SiteData(cases), setup, folder / label / "site", self._on_step)
        weights = first_weights(self.method, network, self.federation, 0)
        self.server = self.method.Server(self.method.config, self.federation, weights)
        if hasattr(self.server, "teachers"):
            sent = PretrainedTeachers(weights)
            self.server.teachers.collect(sent)
            own = {key.removeprefix("teacher/"): sent.array(SITE, key) for key in sent.keys(SITE)}
            RunVaults(folder / label / "site").of(RUN).put(f"teacher/{SITE}", own)
        self.rounds, self.began, self.seconds = 0, 0.0, list[float]()

    def _on_step(self, site: str, step: int, steps: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        # A round's first step also waits for its first batch: not counted. Predicting teachers report here too.
        if step > 1 and steps == self.worker.setup.training.local_steps:
            self.seconds.append(now - self.began)
        self.began = time.perf_counter()

    def round(self) -> float:
        """A few steps; returns what the whole round took."""
        self.rounds += 1
        moment = Moment("train", self.rounds, 10_000)
        self.server.moment = moment
        content = self.server.broadcast(SITE)
        task = Task("train", RUN, moment, self.federation.sites)
        request = Message(content.arrays, content.numbers, task.to_meta()).to_bytes()
        began = time.perf_counter()
        self.worker.handle(request)
        if hasattr(self.server, "teachers"):
            self.server.teachers.were_given_to([SITE])
        return time.perf_counter() - began


def inference(arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds for one organ and for all seven, in turns."""
    device = torch.device(arguments.device)
    network = organ_network(Vocabulary(ORGANS), UNetSettings(features=tuple(arguments.features), organs="heads"))
    network = network.to(device).eval()
    if device.type == "cpu":
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    image = torch.randn(2, 1, *arguments.patch, device=device)
    asked: dict[str, Callable[[], object]] = {
        "one": lambda: network.channels_for(image, (SITE,)),
        "all": lambda: network(image),
    }
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=arguments.bfloat16):
        for _ in range(2 + arguments.repeats * 3):
            for name, call in asked.items():
                began = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios by label, and what they were made from."""
    with tempfile.TemporaryDirectory() as folder:
        labels = [label for label in CONTENDERS if not arguments.only or label in arguments.only]
        labels = list(dict.fromkeys([*(CONTENDERS[label][0] for label in labels), *labels]))
        contenders = {label: Contender(label, arguments, Path(folder)) for label in labels}
        once = {label: contender.round() for label, contender in contenders.items()}  # warm-up, and what is done once
        for contender in contenders.values():
            contender.seconds.clear()
        for repeat in range(arguments.repeats):
            # Every other time in reverse order: a machine that grows slower or faster then favours nobody.
            for label in labels if repeat % 2 == 0 else reversed(labels):
                contenders[label].round()
        steps = {label: statistics.median(contender.seconds) for label, contender in contenders.items()}
    seen = inference(arguments)
    return {
        **{label: round(steps[label] / steps[CONTENDERS[label][0]], 3) for label in labels},
        "inference_all_organs": round(seen["all"] / seen["one"], 3),
        "step_seconds": {label: round(value, 4) for label, value in steps.items()},
        "first_round_seconds": {label: round(value, 2) for label, value in once.items()},
        "inference_seconds": {name: round(value, 4) for name, value in seen.items()},
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "patch": list(arguments.patch),
        "features": list(arguments.features),
        "bfloat16": arguments.bfloat16,
        "steps_per_method": arguments.steps * arguments.repeats,
    }


def main() -> None:
    """Measure, then print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--patch", type=int, nargs=3)
    parser.add_argument("--features", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=4, help="steps of a method in a row")
    parser.add_argument("--repeats", type=int, default=6, help="turns")
    parser.add_argument("--float32", dest="bfloat16", action="store_false", help="on CUDA; the CPU always uses it")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="just these (and what they are compared with)")
    arguments = parser.parse_args()
    arguments.bfloat16 = arguments.bfloat16 and arguments.device == "cuda"
    arguments.patch = arguments.patch or ([64, 128, 128] if arguments.device == "cuda" else [32, 64, 64])
    torch.set_flush_denormal(True)
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    for label in CONTENDERS:
        if label in result:
            seconds = result["step_seconds"][label]
            print(f"{label:16} {result[label]:6.2f} × {CONTENDERS[label][0]:14} {seconds * 1000:9.1f} ms per step")
    print(f"all seven organs {result['inference_all_organs']:6.3f} × one organ at inference")


if __name__ == "__main__":
    main()
