"""Phantom cases and stopwatches that the parts of `data_pipeline.py` share."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from panorgan.anatomy import Vocabulary
from panorgan.data.case import Case
from panorgan.data.layouts import read_cases
from panorgan.phantom import PhantomConfig, PhantomSite, write_federation
from panorgan.preparation.augment import AugmentSettings
from panorgan.preparation.plan import Plan
from panorgan.preparation.store import Store, StoredCase

ORGANS = ("aorta", "kidney_left", "kidney_right", "liver", "pancreas", "spleen", "stomach")
VIEW_MM = (364.0, 320.0, 240.0)
AUGMENT = AugmentSettings()
Shape = tuple[int, int, int]


def usable_cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def write_phantoms(folder: Path, shape: Sequence[int], count: int, workers: int) -> list[Case]:
    """`count` phantom scans of this many voxels as NIfTI files, every organ annotated."""
    site = PhantomSite(name="bench", annotated=ORGANS, cases=count, spacing_mm=_spacing(shape))
    config = PhantomConfig(sites=(site,), organs=ORGANS, field_of_view_mm=VIEW_MM)
    data = write_federation(config, folder, workers=min(workers, count))["bench"]
    return read_cases(data, "bench", Vocabulary(ORGANS))


def fill_store(cases: Sequence[Case], plan: Plan, folder: Path) -> tuple[list[StoredCase], float]:
    """Prepared cases and the seconds that one took."""
    store = Store(folder)
    began = time.perf_counter()
    stored = [store.add(case, plan) for case in cases]
    return stored, (time.perf_counter() - began) / len(cases)


def plan_for(shape: Sequence[int]) -> Plan:
    """The plan that brings a phantom to about this many voxels."""
    return Plan(spacing_mm=_spacing(shape))


def _spacing(shape: Sequence[int]) -> tuple[float, float, float]:
    x, y, z = (round(mm / n, 4) for mm, n in zip(VIEW_MM, shape, strict=True))
    return x, y, z


def bytes_below(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def alternate(blocks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run every block once unmeasured, then `repeats` times in turn, each time beginning with another one."""
    names = list(blocks)
    for name in names:
        blocks[name]()
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(blocks[name]())
    return found


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the ratios of blocks that ran next to each other."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def median_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of some work, the device's part included; the first time does not count."""
    seconds = []
    for _ in range(repeats + 1):
        synchronise(device)
        began = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds[1:])


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
