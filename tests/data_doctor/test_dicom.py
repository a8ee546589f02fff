"""DICOM trees with DICOM-SEG labels, made from a phantom: clean ones give no findings, bad ones do, nothing stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("highdicom")
pytest.importorskip("SimpleITK")

from dicom_files import LIVER, SPLEEN, WrittenSeries, describe, write_segmentation, write_series
from faults import Bench, load
from pydicom.uid import generate_uid

from panorgan.data_doctor import Checkup, Source, examine

ORIGIN = (-180.0, -156.0, -116.0)
SPACING = (8.0, 8.0, 8.0)


@pytest.fixture
def phantom(make_bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """HU, liver and spleen [columns, rows, slices]; the phantom's axes run to the left, the back and the head."""
    bench: Bench = make_bench(cases=2)
    labels, _ = load(bench.label)
    return load(bench.image)[0], labels == bench.ids["liver"], labels == bench.ids["spleen"]


def write(folder: Path, hu: np.ndarray, **options: Any) -> WrittenSeries:
    return write_series(folder, hu, spacing=SPACING, **{"origin": ORIGIN, "PatientID": "anna", **options})


def check(folder: Path) -> Checkup:
    return examine([Source("here", folder, external=True)], workers=1)


def test_a_series_with_its_segmentation_is_silent(phantom, tmp_path):
    hu, liver, spleen = phantom
    series = write(tmp_path / "tree" / "ct", hu)
    segments = [describe(1, "Liver", LIVER), describe(2, "Spleen", SPLEEN)]
    path = write_segmentation(tmp_path / "tree" / "seg.dcm", series, [liver, spleen], segments)
    checkup = check(tmp_path / "tree")
    assert checkup.findings == ()
    (facts,) = checkup.cases
    assert {s.name: s.voxels for s in facts.structures} == {"liver": liver.sum(), "spleen": spleen.sum()}
    assert facts.label_files == (path,)
    assert (facts.modality, facts.patient) == ("CT", "anna")


def test_a_tilted_gantry_is_told_in_the_readers_words(phantom, tmp_path):
    write(tmp_path / "tree" / "ct", phantom[0], tilt=0.5)
    (found,) = check(tmp_path / "tree").findings
    assert found.code == "file-unreadable"
    assert "tilted gantry" in found.what
    assert "0.50 mm" in found.why


def test_two_segmentations_of_one_organ(phantom, tmp_path):
    hu, liver, _ = phantom
    series = write(tmp_path / "tree" / "ct", hu)
    for name in ("one", "two"):
        write_segmentation(tmp_path / "tree" / f"{name}.dcm", series, [liver], [describe(1, "Liver", LIVER)])
    (found,) = check(tmp_path / "tree").findings
    assert found.code == "labels-unusable"
    assert "one.dcm, two.dcm" in found.why


def test_a_segmentation_on_another_grid(phantom, tmp_path):
    """It refers to the series, but its frames lie a third of a voxel away."""
    hu, liver, _ = phantom
    names = ("SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID")
    shared = {name: generate_uid() for name in names}
    write(tmp_path / "tree" / "ct", hu, **shared)
    shifted = write(tmp_path / "elsewhere", hu, **shared, origin=(ORIGIN[0] + 2.7, *ORIGIN[1:]))
    write_segmentation(tmp_path / "tree" / "seg.dcm", shifted, [liver], [describe(1, "Liver", LIVER)])
    (found,) = check(tmp_path / "tree").findings
    assert found.code == "grid-mismatch"
