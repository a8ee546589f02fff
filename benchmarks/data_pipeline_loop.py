"""The site's training loop on patches from the store and on constant tensors, for `data_pipeline.py`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_pipeline_common import (
    AUGMENT,
    ORGANS,
    Shape,
    alternate,
    fill_store,
    median_ms,
    paired_ratio,
    plan_for,
    synchronise,
    usable_cores,
    write_phantoms,
)
from panorgan.anatomy import Vocabulary
from panorgan.data.labels import structures_of
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.tasks import Task
from panorgan.methods.base import SiteRule
from panorgan.methods.fedavg import FedAvg, FedAvgConfig
from panorgan.methods.protocol import Federation, Payload, RoundInfo
from panorgan.networks import UNetSettings
from panorgan.preparation.augment import Draws, augment
from panorgan.preparation.batch import PackedBatch
from panorgan.preparation.sampling import PatchSampler, SamplingSettings
from panorgan.preparation.store import StoredCase


@dataclass
class RoundClock:
    """Hears of every step; notes when the first one of a round was really done."""

    device: torch.device
    first: float = 0.0

    def __call__(self, site: str, step: int, steps: int) -> None:
        if step == 1:
            synchronise(self.device)
            self.first = time.perf_counter()

    def rates(self, round_of_steps: Callable[[], object], steps: int) -> tuple[float, float]:
        """Steps per second after the first step, and of the whole round."""
        synchronise(self.device)
        began = time.perf_counter()
        round_of_steps()
        synchronise(self.device)
        ended = time.perf_counter()
        return (steps - 1) / (ended - self.first), steps / (ended - began)


class LoopBench:
    """A site with stored cases, its network on the device, and one batch that never changes."""

    def __init__(self, arguments: argparse.Namespace, cases: Sequence[StoredCase], patch: Shape, folder: Path) -> None:
        self.device = torch.device(arguments.device)
        self.steps = arguments.steps
        self.training = TrainingSettings(
            rounds=1000,
            local_steps=arguments.steps,
            validate_every=0,
            precision=arguments.precision,
            sampling=SamplingSettings(patch_size=patch, batch_size=arguments.loop_batch),
            augment=AUGMENT,
        )
        vocabulary = Vocabulary(ORGANS)
        network = UNetSettings(features=tuple(arguments.features))
        setup = SiteSetup(vocabulary, FedAvg(FedAvgConfig()), network, self.training, device=self.device)
        self.clock = RoundClock(self.device)
        self.worker = SiteWorker("bench", SiteData(cases), setup, folder, on_step=self.clock)
        self.rule: SiteRule = self.worker._make_rule(Federation(vocabulary, {"bench": self.worker.facts()}))
        self.sampler = PatchSampler(cases, structures_of([case.structures for case in cases]), self.training.sampling)
        self.constant = self._constant_batch()
        self._round = 0

    def _constant_batch(self) -> PackedBatch:
        """Noise with random labels, of the shapes and types that patches have on the device."""
        example = next(iter(self.sampler.batches(1, seed=0))).to(self.device)
        bits = (1 << torch.randint_like(example.bits, len(ORGANS), dtype=torch.int64)).to(example.bits.dtype)
        return replace(example, image=torch.rand_like(example.image) * 2 - 1, bits=bits)

    def real(self) -> None:
        """One round of the site's own loop."""
        self._round += 1
        task = Task("train", "bench", RoundInfo("train", self._round, self.training.rounds))
        self.rule.round_info = task.round_info
        self.rule.received = Payload({key: value.clone() for key, value in self.rule.model.state_dict().items()})
        self.worker._run_steps(self.rule, task)

    def on_constant(self, augmenting: bool) -> None:
        """The same steps on a batch that already lies there."""
        draws = Draws(0, self.device)
        batch, total = self.constant.unpack(), torch.zeros((), device=self.device)
        self.rule.model.train()
        for step in range(self.steps):
            if augmenting:
                batch = augment(self.constant, AUGMENT, draws).unpack()
            rate = self.training.optimizer.rate(step / self.steps)
            for group in self.rule.tools.optimizer.param_groups:
                group["lr"] = rate
            total = total + self.rule.step(batch)["loss"]
            self.clock("bench", step + 1, self.steps)
        float(total)

    def measure(self, repeats: int) -> dict[str, Any]:
        """Rates, ratios, and what each piece of the data path takes alone."""
        rounds: dict[str, Callable[[], None]] = {
            "real": self.real,
            "constant": lambda: self.on_constant(augmenting=False),
            "constant_augmented": lambda: self.on_constant(augmenting=True),
        }
        whole: dict[str, list[float]] = {name: [] for name in rounds}

        def block(name: str) -> float:
            steady, with_start = self.clock.rates(rounds[name], self.steps)
            whole[name].append(with_start)
            return steady

        rates = alternate({name: (lambda name=name: block(name)) for name in rounds}, repeats)
        whole = {name: values[1:] for name, values in whole.items()}  # the first was the warm-up
        return {
            "steps_per_second": {name: statistics.median(values) for name, values in rates.items()},
            "blocks": rates,
            "ratio": paired_ratio(rates["real"], rates["constant"]),
            "ratio_constant_augmented": paired_ratio(rates["constant_augmented"], rates["constant"]),
            "ratio_whole_round": paired_ratio(whole["real"], whole["constant"]),
            "parts_ms_per_batch": self._parts(max(3, min(10, self.steps))),
        }

    def _parts(self, repeats: int) -> dict[str, float]:
        draws = Draws(0, self.device)
        drawn = self.sampler.batches(repeats + 1, seed=1)
        packed = next(iter(self.sampler.batches(1, seed=2)))
        there = packed.to(self.device)
        return {
            "sample": median_ms(lambda: next(drawn), torch.device("cpu"), repeats),
            "copy": median_ms(lambda: packed.to(self.device), self.device, repeats),
            "augment": median_ms(lambda: augment(there, AUGMENT, draws), self.device, repeats),
            "unpack": median_ms(there.unpack, self.device, repeats),
            "step_on_constant": median_ms(lambda: self.rule.step(self.constant.unpack()), self.device, repeats),
        }


def loop_part(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Throughput of the training loop for every patch size."""
    device = torch.device(arguments.device)
    torch.backends.cudnn.deterministic = arguments.deterministic
    torch.backends.cudnn.benchmark = not arguments.deterministic
    cases = write_phantoms(folder / "nifti", arguments.loop_scan_shape, arguments.cases, len(usable_cores()))
    stored, _ = fill_store(cases, plan_for(arguments.loop_stored_shape), folder / "store")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": arguments.precision,
        "deterministic": arguments.deterministic,
        "features": list(arguments.features),
        "batch": arguments.loop_batch,
        "steps_per_block": arguments.steps,
        "stored_shape": list(stored[0].image.shape),
        "patches": {},
    }
    for patch in arguments.loop_patch:
        bench = LoopBench(arguments, stored, patch, folder / "site")
        result["patches"]["x".join(map(str, patch))] = bench.measure(arguments.repeats)
        del bench
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result
