"""How fast this machine trains: a few steps of the real method on real patches, before training begins.

They run in a worker of their own with a temporary folder, on copies of everything, and with random draws of their own:
the run that follows has the same bits with and without. Where a step is slow, smaller patches stand in for the large
ones, because the time of a step follows the number of voxels.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from panorgan.federation.admission import first_weights
from panorgan.federation.message import Message
from panorgan.federation.settings import TrainingSettings
from panorgan.federation.site import SiteData, SiteSetup, SiteWorker
from panorgan.federation.tasks import Task
from panorgan.methods.protocol import Federation, RoundInfo, Stage
from panorgan.networks import UNetSettings
from panorgan.preparation.sampling import sliced_axis

_LONGEST_STEP = 1.5
"""Seconds that a step of the rehearsal may take; what would take longer is computed from a smaller patch."""
_STEPS = 3
"""The first one also sets up; the quicker of the others counts, because other programs may disturb one."""


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimiser step, and of the network on one window at inference.

    `share` is the part of a patch that was measured: 1 where whole patches were.
    """

    step: float
    window: float
    share: float = 1.0


def rehearse(setup: SiteSetup, federation: Federation, site: str, data: SiteData) -> Speed:
    """Measure one site's first round; takes a few seconds however large the patches are."""
    patch = setup.training.sampling.patch_size
    sizes = list(smaller_patches(patch, setup.network))
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
        measured = sizes[-1]
        speed = _measure(setup, federation, site, data, measured, Path(folder) / "0")
        for number, larger in enumerate(sizes[:-1], start=1):
            if speed.step * math.prod(larger) / math.prod(measured) <= _LONGEST_STEP:
                measured = larger
                speed = _measure(setup, federation, site, data, measured, Path(folder) / str(number))
                break
    share = math.prod(measured) / math.prod(patch)
    return Speed(speed.step / share, speed.window / share, share)


def smaller_patches(patch: tuple[int, int, int], network: UNetSettings) -> Iterator[tuple[int, int, int]]:
    """The patch, then ever smaller ones that the network can still take."""
    sliced = sliced_axis(patch)
    axes = [axis for axis in range(3) if axis != sliced]
    divisors = dict(zip(axes, network.divisor, strict=True))
    last: tuple[int, ...] = ()
    for part in (1, 2, 4, 8):
        size = tuple(
            1 if axis == sliced else max(2 * divisors[axis], patch[axis] // part // divisors[axis] * divisors[axis])
            for axis in range(3)
        )
        if size != last:
            last = size
            yield size[0], size[1], size[2]


def first_trained(stages: Sequence[Stage]) -> Stage:
    """The first stage with steps."""
    return next(stage for stage in stages if stage.local_steps != 0)


def _measure(
    setup: SiteSetup,
    federation: Federation,
    site: str,
    data: SiteData,
    patch: tuple[int, int, int],
    folder: Path,
) -> Speed:
    """Seconds per step and per window with patches of some size."""
    short = _short(setup.training, patch)
    own = SiteSetup(setup.vocabulary, setup.method, setup.network, short, setup.seed, setup.device)
    ends: list[float] = []

    def on_step(site: str, step: int, steps: int) -> None:
        _synchronize(setup.device)
        ends.append(time.perf_counter())

    worker = SiteWorker(site, data, own, folder, on_step)
    stage = first_trained(setup.method.stages(setup.training.rounds))
    method = setup.method
    weights = first_weights(method, setup.network, federation, setup.seed)
    server = method.Server(method.config, federation, weights)
    server.round_info = RoundInfo(stage.name, 1, stage.rounds)
    task = Task("train", "rehearsal", server.round_info, federation.sites)
    payload = server.broadcast(site)
    worker.handle(Message(payload.tensors, payload.scalars, task.to_meta()).to_bytes())
    step = min(after - before for before, after in pairwise(ends))
    return Speed(step, _seconds_of_a_window(own, federation, patch))


def _short(training: TrainingSettings, patch: tuple[int, int, int]) -> TrainingSettings:
    sampling = training.sampling.model_copy(update={"patch_size": patch})
    return training.model_copy(
        update={"local_steps": _STEPS, "local_epochs": None, "validate_every": 0, "sampling": sampling}
    )


@torch.no_grad()
def _seconds_of_a_window(setup: SiteSetup, federation: Federation, patch: tuple[int, int, int]) -> float:
    network = setup.method.build_network(setup.network, federation).to(setup.device).eval()
    sizes = [size for size in patch if size != 1]
    window = torch.zeros(1, setup.network.input_channels, *sizes, device=setup.device)
    seconds = []
    for _ in range(3):  # the first one sets up
        began = time.perf_counter()
        network(window)
        _synchronize(setup.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
