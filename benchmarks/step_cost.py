"""What a training step of each method costs, relative to the FedAvg step of the same network.

    python benchmarks/step_cost.py [--json] [--device cuda] [--patch 64 128 128] [--features 32 64 128 256]

Seven organs, seven sites, one organ each; the steps are those of one site, as its worker really does them: patches cut
from stored cases, augmentation, the method's step. A worker waits for its device at the end of a round and not after
every step. So a stretch is timed: from the end of a round's first step (which also waits for the first batch) to the
end of its last one, divided by the steps between them. All methods run in this process in turns, and the median turn of
a method is divided by the median FedAvg turn of the same network. What happens once (teachers predict the scans) is not
part of a step; its time is separate. The last part compares inference for all seven organs with that for one.

`flkd_*` and `scaffold` use the multi-head network and so does their FedAvg; `segviz` has its own, and holds the other
organs' task blocks, which its FedAvg does not; all others use the network with softmax channels. UFPS changes with the
rounds:

    ufps          its pseudo-label phase: labels of the teachers, uncertainty and its bank, weights of samples
    ufps_susam    its late phase without GMT and UA: two gradients per step, so that 2 is the least
    ufps_all      the late phase with both: the global model labels too, one more pass without gradient (2.33)

Of the late phase one round in five makes new masks, in every step. A turn is one round of either kind, counted 1 : 4.
`bytes_*` are a round's request and answer, the larger of both kinds; `mask_seconds` are masks over 30 million weights.

`fediod` is a method of slices: it and its `multidecoder` train on slices of 256 × 256, eight at a time, with the
paper's network, whatever --patch and --features say; fused maps regularise. What it does after training (segment all
scans, maps and attribution of the best fifth of them) is `after_round`: seconds beyond what multidecoder takes there,
and their share of a round that sees every slice once. `fediod_megabytes` are what a site gets and sends.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panorgan.anatomy import Vocabulary
from panorgan.federation.admission import first_weights
from panorgan.federation.message import Message
from panorgan.federation.settings import OptimizerSettings, TrainingSettings
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.tasks import Task
from panorgan.federation.tensor_store import RunTensorStores
from panorgan.methods.base import Method, ServerRule
from panorgan.methods.fediod import DEPTH, INTERSECTION, TOKENS, UNION
from panorgan.methods.fediod.attention_maps import packed
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo
from panorgan.methods.registry import find_method
from panorgan.methods.ufps.masks import extra, largest, pack
from panorgan.methods.ufps.sparse_masks import parameter_count
from panorgan.networks import UNetSettings, organ_network
from panorgan.networks.organ_parts import group_of_key
from panorgan.preparation.sampling import SamplingSettings
from panorgan.preparation.store import StoredCase

ORGANS = ("liver", "spleen", "pancreas", "stomach", "aorta", "kidney_left", "kidney_right")
SITE = "liver"  # every site is called by the organ that it annotates
RUN = "bench"
EVERYONE = {"organ_parts": "everyone", "weighting": "uniform", "unlabelled": "marginal"}

ROUNDS = 10_000  # of a run; turns take a few of them
LATE = {"progress": 0.6001, "cycle": 5}  # masks are made where r mod 5 = 1
# Of the site whose method sees slices: five scans, so that the best fifth is one.
SLICED_SCANS, SLICES = 5, 16


@dataclass(frozen=True)
class Entry:
    """A method, its settings, and what it is compared with.

    `progress` is the share of the rounds that are over. Of `cycle` rounds the first is of another kind than the others:
    a turn then consists of one round of either kind, and they count by how many there are. `sliced`: on slices.
    """

    reference: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    organs: str = "channels"
    progress: float = 0.0
    cycle: int = 1
    sliced: bool = False

    def turn(self, number: int) -> list[tuple[int, float]]:
        """Rounds of a turn, and how much each counts."""
        first = max(1, round(self.progress * ROUNDS)) + number * self.cycle
        share = 1 / self.cycle
        return [(first, share)] if self.cycle == 1 else [(first, share), (first + 1, 1 - share)]


CONTENDERS = {
    "multihead": Entry("multihead", "multihead", EVERYONE),
    "flkd_local": Entry("multihead", "flkd", {"global_weight": 0.0}),
    "flkd_global": Entry("multihead", "flkd", {"local_weight": 0.0}),
    "flkd_both": Entry("multihead", "flkd"),
    "fedprox": Entry("multihead", "fedprox", EVERYONE, organs="heads"),
    "scaffold": Entry("multihead", "scaffold", EVERYONE, organs="heads"),
    "segviz": Entry("segviz_fedavg", "segviz"),
    "segviz_fedavg": Entry("segviz_fedavg", "fedavg", EVERYONE, organs="task_blocks"),
    "fedavg": Entry("fedavg", "fedavg"),
    "fedavg_pl": Entry("fedavg", "fedavg_pl"),
    "asam": Entry("fedavg", "fedasam"),
    "chorus": Entry("fedavg", "chorus", {"known_from": 0}),
    "ufps": Entry("fedavg", "ufps", progress=0.1),
    "ufps_susam": Entry("fedavg", "ufps", {"main_teacher": False, "uncertainty_aware": "none"}, **LATE),
    "ufps_all": Entry("fedavg", "ufps", {"main_teacher_dice": 0}, **LATE),
    "multidecoder": Entry("multidecoder", "multidecoder", sliced=True),
    "fediod": Entry("multidecoder", "fediod", progress=0.5, sliced=True),
}


class PretrainedTeachers:
    """The answers of a pre-training round: every site's teacher, untrained but of the right shape."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.sites = ORGANS
        self._of = {s: {f"teacher/{k}": v for k, v in weights.items() if group_of_key(k) in (None, s)} for s in ORGANS}

    def keys(self, site: str) -> Sequence[str]:
        """What a site sent."""
        return tuple(self._of[site])

    def tensor(self, site: str, key: str) -> torch.Tensor:
        """One tensor of it."""
        return self._of[site][key]


def make_case(folder: Path, shape: tuple[int, ...], name: str) -> StoredCase:
    """A stored case of noise."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(len(name))
    np.save(folder / "image.npy", random.normal(size=shape).astype(np.float16))
    np.save(folder / "labels.npy", (random.random(shape) < 0.2).astype(np.uint8))
    np.savez(folder / "foreground.npz", **{SITE: random.integers(0, min(shape), (100, 3)).astype(np.int32)})
    (folder / "case.json").write_text('{"spacing_mm": [1, 1, 1]}')
    return StoredCase(name, name, SITE, (SITE,), folder)


class Contender:
    """One method at one site, ready to do a few steps when asked."""

    def __init__(self, label: str, arguments: argparse.Namespace, folder: Path) -> None:
        self.entry = entry = CONTENDERS[label]
        kind = find_method(entry.method)
        self.method: Method = kind(kind.Config(**entry.settings))
        patch, features, batch, scans = (arguments.patch, arguments.features, 2, 2)
        shape = tuple(n + 16 for n in patch)
        if entry.sliced:
            patch, features, batch = ([*arguments.slice, 1], arguments.slice_features, arguments.slice_batch)
            shape, scans = (*(n + 16 for n in arguments.slice), SLICES), SLICED_SCANS
        network = UNetSettings(
            dimensions=2 if entry.sliced else 3,
            features=tuple(features),
            organs=entry.organs,  # type: ignore[arg-type]
        )
        facts = {organ: SiteInfo(organ, 2, {organ: 2}) for organ in ORGANS}
        self.federation = Federation(Vocabulary(ORGANS), facts)
        sampling = SamplingSettings(patch_size=tuple(patch), batch_size=batch)
        training = TrainingSettings(
            rounds=ROUNDS,
            local_steps=arguments.steps + 1,
            optimizer=OptimizerSettings(name="sgd", learning_rate=1e-6),
            sampling=sampling,
            precision="bfloat16" if arguments.bfloat16 else "float32",
            overlap=0.0,
        )
        names = [f"scan{number}" for number in range(scans)]
        cases = [make_case(folder / label / "store" / name, shape, name) for name in names]
        self.steps_per_pass = scans * SLICES / batch if entry.sliced else float("nan")
        self.device = torch.device(arguments.device)
        setup = SiteSetup(self.federation.vocabulary, self.method, network, training, device=self.device)
        self.worker = SiteWorker(SITE, SiteData(cases), setup, folder / label / "site", self._on_step)
        weights = first_weights(self.method, network, self.federation, 0)
        self.server = self.method.Server(self.method.config, self.federation, weights)
        if hasattr(self.server, "teachers"):
            sent = PretrainedTeachers(weights)
            self.server.teachers.collect(sent)
            own = {key.removeprefix("teacher/"): sent.tensor(SITE, key) for key in sent.keys(SITE)}
            RunTensorStores(folder / label / "site").of(RUN).put(f"teacher/{SITE}", own)
        if hasattr(self.server, "masks"):
            give_masks(self.server)
        if hasattr(self.server, "fused"):
            give_maps(self.server, math.prod(n // 2 ** (len(features) - 1) for n in arguments.slice))
        self.turns, self.began, self.stretch, self.ended = 0, 0.0, 0.0, 0.0
        self.seconds = list[float]()
        """Of a step, by turn."""
        self.bytes = list[int]()
        """Of a request and its answer, by kind of round, in the last turn."""
        self.sent = list[tuple[int, int]]()
        """The same, of each."""
        self.after = list[float]()
        """Seconds from the last step of a round to its answer."""

    def _on_step(self, site: str, step: int, steps: int) -> None:
        if step not in (1, steps):  # also 0, which says that teachers are predicting
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if step == 1:
            self.began = now
        else:
            self.stretch, self.ended = (now - self.began) / (steps - 1), now

    def turn(self) -> float:
        """One round of each kind; returns what all of it took."""
        began = time.perf_counter()
        self.bytes.clear()
        seconds = 0.0
        for number, share in self.entry.turn(self.turns):
            self._round(number)
            seconds += share * self.stretch
        self.seconds.append(seconds)
        self.turns += 1
        return time.perf_counter() - began

    def _round(self, number: int) -> None:
        round_info = RoundInfo("train", number, ROUNDS)
        self.server.round_info = round_info
        payload = self.server.broadcast(SITE)
        task = Task("train", RUN, round_info, self.federation.sites)
        request = Message(payload.tensors, payload.scalars, task.to_meta()).to_bytes()
        answer = self.worker.handle(request)
        self.after.append(time.perf_counter() - self.ended)
        self.bytes.append(len(request) + len(answer))
        self.sent = [(len(request), len(answer))]
        if hasattr(self.server, "teachers"):
            self.server.teachers.mark_delivered([SITE])


def give_masks(server: ServerRule) -> None:
    """Masks of two sites that agree on some weights only: so there is a mask to broadcast."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.rand(2, parameter_count(server.weights), generator=random) < 0.4
    server.masks.collect({site: pack(mask) for site, mask in zip(ORGANS[1:], drawn, strict=False)})  # type: ignore[attr-defined]


def give_maps(server: ServerRule, tokens: int) -> None:
    """Fused maps of the right size: rows of attention."""
    random = torch.Generator().manual_seed(0)
    maps = packed(torch.rand(SLICES, tokens, tokens, generator=random).softmax(2))
    server.agreed = {DEPTH: float(SLICES), TOKENS: float(tokens)}  # type: ignore[attr-defined]
    server.fused = {INTERSECTION: maps, UNION: maps}  # type: ignore[attr-defined]


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
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=arguments.bfloat16):
        return in_turns(asked, arguments)


def masks(arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds for M_L and for M_E, by UFPS's shares."""
    generator = torch.Generator(arguments.device).manual_seed(0)
    gradient = torch.randn(arguments.mask_weights, generator=generator, device=arguments.device)
    local = largest(gradient, 0.4)
    contested = torch.rand(gradient.shape, generator=generator, device=arguments.device) < 0.48
    asked: dict[str, Callable[[], object]] = {
        "largest": lambda: largest(gradient, 0.4),
        "extra": lambda: extra(local, contested, 0.1, generator),
    }
    return in_turns(asked, arguments)


def in_turns(asked: Mapping[str, Callable[[], object]], arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each; twice for nothing first."""
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(2 + arguments.repeats * 3):
        for name, call in asked.items():
            began = time.perf_counter()
            call()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def bytes_of_rounds(contenders: Mapping[str, Contender]) -> dict[str, Any]:
    """What UFPS's late rounds send to and fro, beside FedAvg's; empty if they were not asked for."""
    if "ufps_susam" not in contenders:
        return {}
    (plain,) = contenders["fedavg"].bytes
    refresh, ordinary = contenders["ufps_susam"].bytes
    return {
        "bytes_ufps_susam": round(max(refresh, ordinary) / plain, 4),
        "bytes_per_round": {"fedavg": plain, "ufps_susam": ordinary, "ufps_susam_new_masks": refresh},
    }


def after_rounds(contenders: Mapping[str, Contender], steps: Mapping[str, float]) -> dict[str, Any]:
    """What FedIOD does after its steps, beyond what any method does there, and what it sends; empty without it."""
    if "fediod" not in contenders:
        return {}
    ours, plain = contenders["fediod"], contenders["multidecoder"]
    seconds = statistics.median(ours.after) - statistics.median(plain.after)
    one_pass = ours.steps_per_pass * steps["fediod"]
    (got, sent), (plain_got, plain_sent) = ours.sent[0], plain.sent[0]
    return {
        "after_round": {
            "seconds": round(seconds, 4),
            "share_of_round": round(seconds / (seconds + one_pass), 3),
            "slices": SLICED_SCANS * SLICES,
        },
        "fediod_megabytes": {
            "received": round(got / 1e6, 2),
            "sent": round(sent / 1e6, 2),
            "received_multidecoder": round(plain_got / 1e6, 2),
            "sent_multidecoder": round(plain_sent / 1e6, 2),
        },
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios by label, and what they were made from."""
    with tempfile.TemporaryDirectory() as folder:
        labels = [label for label in CONTENDERS if not arguments.only or label in arguments.only]
        labels = list(dict.fromkeys([*(CONTENDERS[label].reference for label in labels), *labels]))
        contenders = {label: Contender(label, arguments, Path(folder)) for label in labels}
        once = {label: contender.turn() for label, contender in contenders.items()}  # warm-up, and what is done once
        for contender in contenders.values():
            contender.seconds.clear()
            contender.after.clear()
        for repeat in range(arguments.repeats):
            # Every other time in reverse order: a machine that grows slower or faster then favours no method.
            for label in labels if repeat % 2 == 0 else reversed(labels):
                contenders[label].turn()
        steps = {label: statistics.median(contender.seconds) for label, contender in contenders.items()}
    seen = inference(arguments)
    return {
        **{label: round(steps[label] / steps[CONTENDERS[label].reference], 3) for label in labels},
        **bytes_of_rounds(contenders),
        **after_rounds(contenders, steps),
        "inference_all_organs": round(seen["all"] / seen["one"], 3),
        "step_seconds": {label: round(value, 4) for label, value in steps.items()},
        "first_turn_seconds": {label: round(value, 2) for label, value in once.items()},
        "inference_seconds": {name: round(value, 4) for name, value in seen.items()},
        "mask_seconds": {name: round(value, 4) for name, value in masks(arguments).items()},
        "mask_weights": arguments.mask_weights,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "patch": list(arguments.patch),
        "features": list(arguments.features),
        "slice": list(arguments.slice),
        "slice_features": list(arguments.slice_features),
        "slice_batch": arguments.slice_batch,
        "bfloat16": arguments.bfloat16,
        "steps_in_a_row": arguments.steps,
        "steps_per_method": arguments.steps * arguments.repeats,
    }


def main() -> None:
    """Measure, then print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--patch", type=int, nargs=3)
    parser.add_argument("--features", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--slice", type=int, nargs=2, default=[256, 256], help="size of the slices")
    parser.add_argument("--slice-features", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--slice-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, help="steps that are timed in a row: 20 on CUDA, 6 elsewhere")
    parser.add_argument("--repeats", type=int, default=6, help="turns")
    parser.add_argument("--mask-weights", type=int, default=30_000_000, help="how many weights the timed masks cover")
    parser.add_argument("--float32", dest="bfloat16", action="store_false", help="on CUDA; the CPU always uses it")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="just these (and what they are compared with)")
    arguments = parser.parse_args()
    arguments.bfloat16 = arguments.bfloat16 and arguments.device == "cuda"
    arguments.steps = arguments.steps or (20 if arguments.device == "cuda" else 6)
    arguments.patch = arguments.patch or ([64, 128, 128] if arguments.device == "cuda" else [32, 64, 64])
    torch.set_flush_denormal(True)
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    for label, entry in CONTENDERS.items():
        if label in result:
            seconds = result["step_seconds"][label]
            print(f"{label:16} {result[label]:6.2f} × {entry.reference:14} {seconds * 1000:9.1f} ms per step")
    print(f"all seven organs {result['inference_all_organs']:6.3f} × one organ at inference")
    if "bytes_ufps_susam" in result:
        print(f"ufps_susam       {result['bytes_ufps_susam']:6.3f} × the bytes of a round of fedavg, at most")
    if "after_round" in result:
        after, traffic = result["after_round"], result["fediod_megabytes"]
        share, seconds = after["share_of_round"], after["seconds"]
        print(f"fediod, after    {share:6.3f} of a round: {seconds:.2f} s for {after['slices']} slices")
        print(f"fediod, traffic  {traffic['received']:6.1f} MB received, {traffic['sent']:.1f} MB sent per round")
    for name, seconds in result["mask_seconds"].items():
        print(f"mask, {name:10} {seconds * 1000:6.1f} ms for {arguments.mask_weights:,} weights")


if __name__ == "__main__":
    main()
