"""Faults of scans with several channels."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from fault_bench import Bench, Where, fault, load, save


def _second(bench: Bench, case: str) -> Path:
    return bench.image_of(case).with_name(f"{case}_0001.nii.gz")


def _with_second_channel(bench: Bench) -> None:
    """Every case gets a PET beside its CT; the site uses both."""
    bench.describe(channel_names={"0": "CT", "1": "PET"})
    for case in bench.cases:
        voxels, affine = load(bench.image_of(case))
        save(_second(bench, case), np.maximum(voxels.astype(np.float32), 0) / 10, affine)
    bench.source = replace(bench.source, channels=("CT", "PET"))


@fault("channels-unused")
def second_channel_that_is_not_asked_for(bench: Bench) -> Where:
    _with_second_channel(bench)
    bench.source = replace(bench.source, channels=())
    return ""


@fault("channel-missing")
def case_without_its_second_channel(bench: Bench) -> Where:
    _with_second_channel(bench)
    _second(bench, bench.case).unlink()
    return bench.case


@fault("channel-missing")
def case_without_its_first_channel(bench: Bench) -> Where:
    _with_second_channel(bench)
    shutil.copy(_second(bench, bench.case), bench.folder / "imagesTr" / "lonely_0001.nii.gz")
    return ""


@fault("unknown-channel")
def channel_that_the_folder_does_not_have(bench: Bench) -> Where:
    _with_second_channel(bench)
    bench.source = replace(bench.source, channels=("CT", "SPECT"))
    return ""


@fault("channel-twice")
def channel_exported_twice(bench: Bench) -> Where:
    _with_second_channel(bench)
    shutil.copy(bench.image, _second(bench, bench.case))
    return bench.case


@fault("channel-elsewhere")
def channel_of_another_place(bench: Bench) -> Where:
    _with_second_channel(bench)
    voxels, affine = load(_second(bench, bench.case))
    affine[:3, 3] += 1000
    save(_second(bench, bench.case), voxels, affine)
    return bench.case


@fault("channel-resampled")
def channel_with_other_voxels(bench: Bench) -> Where:
    _with_second_channel(bench)
    voxels, affine = load(_second(bench, bench.case))
    save(_second(bench, bench.case), voxels[::2], affine @ np.diag([2.0, 1, 1, 1]))
    return bench.case


@fault("constant-image")
def second_channel_shows_nothing(bench: Bench) -> Where:
    _with_second_channel(bench)
    bench.edit(_second(bench, bench.case), np.zeros_like)
    return bench.case


@fault("not-finite")
def second_channel_with_nan(bench: Bench) -> Where:
    _with_second_channel(bench)

    def spoil(voxels: np.ndarray) -> np.ndarray:
        voxels[0, 0, 0] = np.nan
        return voxels

    bench.edit(_second(bench, bench.case), spoil, np.float32)
    return bench.case
