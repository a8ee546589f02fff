"""Settings that suit a machine and the data: network, patch, batch, rounds.

Patch and strides follow nnU-Net's rules (`networks.topology`), with time as a further criterion: a rehearsal on
synthetic patches times candidates from large to small, and the largest that fits into memory and leaves enough rounds
is proposed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment, parse_experiment
from panorgan.federation.site import SiteData, SiteSetup
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks.topology import SMALLEST_EDGE, Topology, suits_slices, topology
from panorgan.preparation.cache_files import array_bytes, arrays_bytes
from panorgan.preparation.sampling import sliced_axis
from panorgan.preparation.store import StoredCase, bits_type
from panorgan.workflows.duration import Estimate, Work, count_windows, estimate
from panorgan.workflows.memory import USABLE, available_memory, training_memory
from panorgan.workflows.rehearsal import Speed, rehearse

DEFAULT_MINUTES = 8 * 60.0
"""A night."""
PROPOSED = (
    "network.dimensions",
    "network.features",
    "network.strides",
    "training.rounds",
    "training.local_steps",
    "training.sampling.patch_size",
    "training.sampling.batch_size",
)
_PATCH_VOXELS = tuple(edge**3 for edge in (128, 112, 96, 80, 64, 48, 32))
_SLICE_PIXELS = tuple(edge**2 for edge in (512, 384, 320, 256, 192, 128, 96, 64))
_WIDTHS = {"cuda": (32,), "cpu": (32, 16, 8)}
"""Features of the first level; a GPU gains little from narrower networks."""
_WIDEST = 10
"""Features of the deepest levels, in those of the first one: 320 for 32."""
_COVERS = 0.9
"""A patch with this share of a scan along every axis counts as covering it."""
_LOCAL_STEPS = 20
_FEW_ROUNDS, _MOST_ROUNDS = 60, 200
"""A smaller network is proposed before fewer rounds than the first; more than the second are rarely worth it."""


@dataclass(frozen=True)
class Data:
    """What is known of the data before it is prepared: median shape on the plan's grid, voxel size, cases by site."""

    shape: tuple[float, float, float]
    spacing: tuple[float, float, float]
    sites: Mapping[str, SiteInfo]
    validation_cases: int = 0
    test_cases: int = 0


@dataclass(frozen=True)
class Proposal:
    """Settings by dotted name; the user's own stay. `memory` in bytes, `available` None if unknown."""

    settings: Mapping[str, Any]
    estimate: Estimate
    memory: float
    available: float | None
    device: str
    minutes: float
    notes: Sequence[str] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether it stays within the time limit."""
        return self.estimate.seconds <= self.minutes * 60


def propose(
    experiment: Experiment,
    given: Callable[[str], bool],
    data: Data,
    device: torch.device,
    minutes: float = DEFAULT_MINUTES,
    available: float | None = None,
) -> Proposal:
    """Propose settings that suit the machine. `given(name)`: whether a setting is the user's own, which then stays."""
    available = available_memory(device) if available is None else available
    most = math.inf if available is None else USABLE * available
    candidates = list(_candidates(experiment, given, data, device))
    fitting = [one for one in candidates if _memory(one, data) <= most] or candidates[-1:]
    speeds: dict[int, tuple[Speed, float]] = {}
    for found in fitting:
        work, speed = _work(found, data), _speed(found, data, device, speeds)
        rounds = found.training.rounds if given("training.rounds") else _rounds(found, work, speed, minutes)
        found = _with(found, {"training.rounds": rounds})
        needed = estimate(found, work, speed)
        if needed.seconds <= minutes * 60 and (given("training.rounds") or rounds >= _FEW_ROUNDS):
            break
    left_out = {"training.local_steps"} if experiment.training.local_epochs else set()
    return Proposal(
        settings={name: _at(found, name) for name in PROPOSED if not given(name) and name not in left_out},
        estimate=needed,
        memory=(memory := _memory(found, data)),
        available=available,
        device=device.type,
        minutes=minutes,
        notes=tuple(_notes(found, data, needed, memory > most, minutes, fixed_rounds=given("training.rounds"))),
    )


# -- candidates --------------------------------------------------------------------------------------------------------


def _candidates(
    experiment: Experiment, given: Callable[[str], bool], data: Data, device: torch.device
) -> Iterator[Experiment]:
    """From the largest network to the smallest, each with patches from large to small."""
    network = experiment.network
    if given("network.dimensions"):
        flat = network.dimensions == 2
    elif given("training.sampling.patch_size"):
        flat = sliced_axis(experiment.training.sampling.patch_size) is not None
    else:
        flat = suits_slices(data.shape, data.spacing)
    last: Any = None
    for width in _WIDTHS[device.type]:
        for voxels in _SLICE_PIXELS if flat else _PATCH_VOXELS:
            settings = _settings_for(experiment, given, data, width, voxels, flat)
            if settings == last:
                continue
            last = settings
            yield _with(experiment, settings)
        if given("network.features"):
            return


def _settings_for(
    experiment: Experiment, given: Callable[[str], bool], data: Data, width: int, voxels: float, flat: bool
) -> dict[str, Any]:
    """One candidate's settings; given ones are left as they are."""
    network, training = experiment.network, experiment.training
    depth = len(network.features) if given("network.features") else None
    if given("network.strides") and network.strides is not None:
        depth = len(network.strides)
    shape: Sequence[float] = data.shape
    if given("training.sampling.patch_size"):
        shape, voxels = training.sampling.patch_size, math.inf
    found = topology(shape, data.spacing, voxels, 2 if flat else None, depth)
    found = _with_given_strides(found, experiment, given)
    settings: dict[str, Any] = {
        "network.dimensions": 2 if flat else 3,
        "network.features": [min(width * 2**level, _WIDEST * width) for level in range(len(found.strides))],
        "network.strides": None if found.halves_all else [list(level) for level in found.strides],
        "training.sampling.patch_size": list(found.patch_size),
        "training.sampling.batch_size": _batch(found, data.shape, flat),
    }
    if training.local_epochs is None and not given("training.local_steps"):
        settings["training.local_steps"] = _LOCAL_STEPS
    return {name: value for name, value in settings.items() if not given(name)}


def _with_given_strides(found: Topology, experiment: Experiment, given: Callable[[str], bool]) -> Topology:
    """The patch rounded to what the user's own strides require."""
    if not given("network.strides") or experiment.network.strides is None:
        return found
    divisors = iter(experiment.network.divisor)
    sizes = [1 if size == 1 else (size, next(divisors)) for size in found.patch_size]
    patch = [s if isinstance(s, int) else max(2 * s[1], round(s[0] / s[1]) * s[1]) for s in sizes]
    return Topology((patch[0], patch[1], patch[2]), experiment.network.strides)


def _batch(found: Topology, shape: Sequence[float], flat: bool) -> int:
    """Two patches, or eight slices; more where a patch holds a whole scan already, as of small organs."""
    least, most, enough = (8, 16, 8 * 128**2) if flat else (2, 8, 2 * 64**3)
    covered = all(size == 1 or size >= _COVERS * n for size, n in zip(found.patch_size, shape, strict=True))
    return min(most, max(least, round(enough / math.prod(found.patch_size)))) if covered else least


def _with(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """The experiment with other settings, checked as a whole."""
    content = experiment.model_dump(mode="json")
    for name, value in settings.items():
        *groups, last = name.split(".")
        place = content
        for group in groups:
            place = place[group]
        place[last] = value
    return parse_experiment(content)


def _at(experiment: Experiment, name: str) -> Any:
    """A setting by its dotted name, in plain JSON types."""
    place: Any = experiment.as_json()
    for key in name.split("."):
        place = place[key]
    return place


# -- time and memory ---------------------------------------------------------------------------------------------------


def _memory(experiment: Experiment, data: Data) -> float:
    sampling = experiment.training.sampling
    method = experiment.build_method()
    federation = Federation(Vocabulary(experiment.vocabulary), data.sites)
    return training_memory(
        method, experiment.network, federation, sampling.patch_size, sampling.batch_size, len(data.sites)
    )


def _speed(experiment: Experiment, data: Data, device: torch.device, known: dict[int, tuple[Speed, float]]) -> Speed:
    """Measured once per width; the time of other patches and batches follows the number of voxels."""
    sampling = experiment.training.sampling
    patch = float(math.prod(sampling.patch_size))
    width = experiment.network.features[0]
    if width not in known:
        known[width] = _rehearsed(experiment, data, device), patch * sampling.batch_size
    measured, voxels = known[width]
    share = patch * sampling.batch_size / voxels
    return replace(measured, step=measured.step * share, window=measured.window * share)


def _rehearsed(experiment: Experiment, data: Data, device: torch.device) -> Speed:
    federation = Federation(Vocabulary(experiment.vocabulary), data.sites)
    site = max(data.sites, key=lambda name: (data.sites[name].train_cases, name))
    setup = SiteSetup(
        federation.vocabulary, experiment.build_method(), experiment.network, experiment.training, 0, device
    )
    structures = tuple(sorted(data.sites[site].annotated))
    with tempfile.TemporaryDirectory() as folder:
        case = _synthetic_case(Path(folder), experiment, structures, data.spacing)
        return rehearse(setup, federation, site, SiteData([case]))


def _synthetic_case(
    folder: Path, experiment: Experiment, structures: tuple[str, ...], spacing: Sequence[float]
) -> StoredCase:
    """A prepared case with noise and a block of every structure; its content does not affect the time of a step."""
    random = np.random.default_rng(0)
    shape, channels = experiment.training.sampling.patch_size, experiment.network.input_channels
    image = random.uniform(-1, 1, size=shape if channels == 1 else (channels, *shape)).astype(np.float16)
    bits = np.zeros(shape, dtype=bits_type(len(structures)))
    block = tuple(slice(n // 4, n // 4 + max(1, n // 2)) for n in shape)
    bits[block] = 2 ** len(structures) - 1
    middle = np.array([[n // 2 for n in shape]], dtype=np.int32)
    (folder / "image.npy").write_bytes(array_bytes(image))
    (folder / "labels.npy").write_bytes(array_bytes(bits))
    (folder / "foreground.npz").write_bytes(arrays_bytes(dict.fromkeys(structures, middle)))
    (folder / "case.json").write_text(f'{{"spacing_mm": {list(map(float, spacing))}}}')
    return StoredCase("made-up", "made-up", "made-up", structures, folder)


def _work(experiment: Experiment, data: Data) -> Work:
    training = experiment.training
    patch = training.sampling.patch_size
    sliced = sliced_axis(patch)
    depth = 1 if sliced is None else max(1, round(data.shape[sliced]))
    passes = [info.train_cases * depth for info in data.sites.values()]
    shape = [round(size) for size in data.shape]
    windows = count_windows(shape, patch, training.overlap)
    return Work(
        len(data.sites),
        sum(training.steps_per_round(one_pass) for one_pass in passes),
        data.validation_cases * windows,
        data.test_cases * windows,
        data.test_cases,
    )


def _rounds(experiment: Experiment, work: Work, speed: Speed, minutes: float) -> int:
    """As many as the time allows, in tens."""
    few, many = 10, _MOST_ROUNDS
    while few < many:
        rounds = (few + many + 10) // 20 * 10
        if estimate(_with(experiment, {"training.rounds": rounds}), work, speed).seconds <= minutes * 60:
            few = rounds
        else:
            many = rounds - 10
    return few


def _notes(
    found: Experiment, data: Data, needed: Estimate, too_large: bool, minutes: float, fixed_rounds: bool
) -> Iterator[str]:
    if too_large:
        yield "Even the smallest network needs more memory than is free: choose a coarser plan.spacing_mm."
    if needed.seconds > minutes * 60:
        fewer = "fewer training.rounds (the file sets them), " if fixed_rounds else ""
        yield f"Even this takes longer than asked for: choose {fewer}a coarser plan.spacing_mm, or allow more time."
    if found.network.dimensions == 2:
        yield f"A scan has fewer than {2 * SMALLEST_EDGE} thick slices: a 2D network sees them one by one."
    elif found.network.strides is not None and max(data.spacing) >= 2 * min(data.spacing):
        yield "Voxels are longer along one axis: strides halve the others first."
    elif found.network.strides is not None:
        yield "Strides halve the shorter axes of the patch less often."
