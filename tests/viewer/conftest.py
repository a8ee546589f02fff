"""Things to look at: a finished run, and volumes whose content is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from viewed_files import SHAPE, save

import panorgan
from panorgan.config import Experiment
from panorgan.workflows.run import Run


@pytest.fixture
def hu() -> np.ndarray:
    """A small CT: air, and a body with noise."""
    voxels = np.full(SHAPE, -1000, np.int16)
    voxels[3:17, 3:13, :] = np.random.default_rng(7).integers(-50, 120, (14, 10, 12))
    return voxels


@pytest.fixture
def labels() -> np.ndarray:
    """1 the liver, 2 a tumour inside it, 3 the spleen."""
    voxels = np.zeros(SHAPE, np.uint8)
    voxels[4:9, 4:10, 2:9] = 1
    voxels[5:7, 5:7, 4:6] = 2
    voxels[12:15, 5:9, 3:8] = 3
    return voxels


@pytest.fixture
def nnunet_folder(tmp_path: Path, hu: np.ndarray, labels: np.ndarray) -> Path:
    """One case with labels, one without, in nnU-Net's layout."""
    folder = tmp_path / "nnunet"
    for case in ("a1", "b2"):
        save(folder / "imagesTr" / f"{case}_0000.nii.gz", hu)
    save(folder / "labelsTr" / "a1.nii.gz", labels)
    ids: dict[str, Any] = {"background": 0, "liver": [1, 2], "liver_tumour": 2, "spleen": 3}
    (folder / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": "CT"}, "labels": ids, "numTraining": 1, "file_ending": ".nii.gz"})
    )
    return folder


@pytest.fixture(scope="session")
def finished_run(tiny: Callable[..., Experiment], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny federation that was trained, scored and reported."""
    folder = tmp_path_factory.mktemp("viewed") / "run"
    run = panorgan.train(tiny(training={"rounds": 1, "local_steps": 1}), folder)
    panorgan.write_report(run)
    return run
