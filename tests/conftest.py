"""Shared fixtures: one tiny phantom federation for the whole session, and experiments on it that run in seconds."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from panorgan.config import Experiment, parse_experiment
from panorgan.federation import site

torch.set_num_threads(1)

# How long an example takes depends on who else uses the machine: no reason to fail.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# The examples name public data sets by this folder; tests that need one are skipped where it is not there.
os.environ.setdefault("PANORGAN_DATA", str(Path(__file__).resolve().parents[2] / "shared" / "data"))

TINY: dict[str, Any] = {
    "name": "tiny",
    "vocabulary": ["liver", "spleen", "kidney_left", "kidney_right"],
    "phantom": {
        "field_of_view_mm": [364, 320, 220],
        "sites": [
            {"name": "north", "annotated": ["liver"], "cases": 5, "spacing_mm": [12, 12, 12]},
            {"name": "south", "annotated": ["spleen", "kidney"], "cases": 4, "spacing_mm": [11, 11, 13]},
            {"name": "island", "cases": 1, "external": True, "spacing_mm": [12, 12, 12], "orientation": "RAS"},
        ],
    },
    "plan": {"spacing_mm": [12, 12, 12], "window_hu": [-160, 240]},
    # From equal chances: in the few steps of a test nothing would climb out of a prior.
    "network": {"features": [4, 8, 8], "organ_prior": None},
    "training": {
        "rounds": 3,
        "local_steps": 2,
        "validate_every": 2,
        "overlap": 0.0,
        "sampling": {"patch_size": [16, 16, 16], "batch_size": 2},
        "optimizer": {"learning_rate": 0.01},
    },
}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the test session's own; phantoms and prepared cases are made once."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["PANORGAN_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_power_cuts() -> Iterator[None]:
    """Do not wait for the disk: a flush matters only to a power cut, and tests would wait for thousands of them.

    Of a flush there remains that its file must be open. Tests of flushing look at the calls; processes that tests start
    flush as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: os.fstat(handle) and None)
        yield


@pytest.fixture(autouse=True)
def ordinary_floats() -> Iterator[None]:
    """Training lets the processor flush tiny numbers to zero; tests that come after must not notice."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def write_scan(tmp_path: Path) -> Callable[..., Path]:
    """write_scan(name, voxels, affine) → path of a NIfTI file."""

    def write(name: str, voxels: NDArray[Any], affine: NDArray[Any] | None = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)
        return path

    return write


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with nested `changes`."""
    result = dict(base)
    for key, value in changes.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict) and key != "method"
        result[key] = merged(result[key], value) if inner else value
    return result


@pytest.fixture(scope="session")
def tiny_content() -> Callable[..., dict[str, Any]]:
    """Make the tiny experiment as plain data, with nested changes: `tiny_content(training={"rounds": 1})`."""
    return lambda **changes: copy.deepcopy(merged(TINY, changes))


@pytest.fixture(scope="session")
def tiny(tiny_content: Callable[..., dict[str, Any]]) -> Callable[..., Experiment]:
    """Make the tiny experiment, with changes: `tiny(method={"name": "solo"}, training={"rounds": 1})`."""
    return lambda **changes: parse_experiment(tiny_content(**changes))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the images that sites have predicted since."""
    shapes: list[tuple[int, ...]] = []
    original = site.predict_probabilities

    def counted(network, image, settings):
        shapes.append(tuple(image.shape))
        return original(network, image, settings)

    monkeypatch.setattr(site, "predict_probabilities", counted)
    return shapes
