"""Networks that see slices, and networks for thick slices, through a whole run.

That every method trains on slices: test_channels_run.
"""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from panorgan.workflows.device import choose_device
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.prepare import prepare

SLICES = {"dimensions": 2}
AXIAL = {"rounds": 2, "validate_every": 1, "sampling": {"patch_size": [16, 16, 1], "batch_size": 4}}


def check_predictions(run: Path, experiment) -> None:
    """Every test case has a prediction on exactly its own grid, and the delivered model makes it again."""
    model = load_model(run, choose_device("auto", ""))  # where it was trained: another device rounds in another way
    for site in prepare(experiment).sites:
        for case in site.test:
            written = nib.load(run / "predictions" / site.name / f"{case.id}.nii.gz")
            volume = case.read_image()
            assert written.shape == volume.voxels.shape
            np.testing.assert_allclose(written.affine, volume.affine, atol=1e-4)
            np.testing.assert_array_equal(np.asarray(written.dataobj), model.label_map(volume))


@pytest.mark.parametrize("patch_size", [[1, 16, 8], [16, 1, 8]])
def test_slices_across_another_axis(tiny, tmp_path, patch_size):
    experiment = tiny(
        network=SLICES, training=AXIAL | {"sampling": {"patch_size": patch_size}}, plan={"spacing_mm": [14, 12, 10]}
    )
    train(experiment, tmp_path / "run")
    card = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert card["inference"]["patch_size"] == patch_size
    check_predictions(tmp_path / "run", experiment)


def test_a_network_of_slices_learns(tiny, tmp_path):
    training = {"rounds": 30, "local_steps": 4, "validate_every": 10, "optimizer": {"learning_rate": 0.02}}
    training["sampling"] = {"patch_size": [24, 24, 1], "batch_size": 8}
    result = train(tiny(network={**SLICES, "features": [8, 16, 16]}, training=training), tmp_path / "run")
    liver = [row["dice"] for row in result.scores if row["organ"] == "liver"]
    assert np.mean(liver) > 0.6


def test_thick_slices_in_three_dimensions(tiny, tmp_path):
    experiment = tiny(
        network={"strides": [[1, 1, 1], [2, 2, 1], [2, 2, 2]]},
        plan={"spacing_mm": [10, 10, 35]},
        training={"rounds": 2, "validate_every": 1, "sampling": {"patch_size": [16, 16, 4]}},
    )
    train(experiment, tmp_path / "run")
    card = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert card["network"]["strides"] == [[1, 1, 1], [2, 2, 1], [2, 2, 2]]
    check_predictions(tmp_path / "run", experiment)
