"""Which scans a path stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dicom_files import write_series
from refusing import refused

from panorgan.workflows.scans_to_segment import find_scans

VOXELS = np.random.default_rng(0).integers(-100, 200, (6, 7, 4)).astype(np.int16)


@pytest.fixture
def pacs(tmp_path: Path) -> Path:
    """One folder, as a PACS exports a study: two series, a localiser, and a text."""
    folder = tmp_path / "study"
    for number, description, modality in ((2, "Abdomen B30f", "CT"), (5, "T2 SPIR", "MR")):
        names = f"{number}_{{shuffled:04d}}"
        about = {"SeriesNumber": number, "SeriesDescription": description}
        write_series(folder, VOXELS, modality=modality, names=names, **about)
    write_series(folder, VOXELS[..., :2], names="L{shuffled:04d}", ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
    (folder / "README").write_text("study")
    return folder


def test_every_series_of_one_folder_is_a_scan(pacs: Path) -> None:
    found = find_scans([pacs])
    assert [(scan.name, scan.modality, len(scan.slices)) for scan in found.scans] == [
        ("p1_2", "CT", 4),
        ("p1_5", "MR", 4),
    ]
    assert found.left_out == {pacs: {"files that are not DICOM": 1, "localisers": 2}}


@pytest.mark.parametrize("wanted", ["5", "t2 spir", "p1_5", "uid"])
def test_a_series_is_chosen_by_any_of_its_names(pacs: Path, wanted: str) -> None:
    if wanted == "uid":
        wanted = next(scan.series.uid for scan in find_scans([pacs]).scans if scan.series and scan.modality == "MR")
    assert [scan.name for scan in find_scans([pacs], [wanted]).scans] == ["p1_5"]


def test_a_series_that_is_not_there_is_refused_with_those_that_are(pacs: Path, tmp_path: Path) -> None:
    with refused("no-such-series") as caught:
        find_scans([pacs], ["2", "7"])
    assert "Abdomen B30f" in caught.value.why
    (tmp_path / "a.nii.gz").touch()
    with refused("no-such-series"):
        find_scans([tmp_path / "a.nii.gz"], ["2"])


def test_a_folder_with_one_series_gives_it_its_name(tmp_path: Path) -> None:
    written = write_series(tmp_path / "anna", VOXELS)
    (scan,) = find_scans([tmp_path / "anna"]).scans
    assert (scan.name, sorted(scan.slices)) == ("anna", sorted(written.files))
    # A localiser beside it was a second series, and a reason to stop.
    write_series(tmp_path / "anna", VOXELS[..., :2], names="L{k}", ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
    (scan,) = find_scans([tmp_path / "anna"]).scans
    assert (scan.name, len(scan.slices)) == ("anna", 4)


def test_an_unreadable_file_beside_a_series_is_a_doubt(tmp_path: Path) -> None:
    written = write_series(tmp_path / "anna", VOXELS)
    content = written.files[0].read_bytes()
    written.files[0].write_bytes(content[:200])
    (scan,) = find_scans([tmp_path / "anna"]).scans
    assert [doubt.code for doubt in scan.doubts] == ["series-incomplete"]


def test_a_folder_without_scans_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with refused("no-scans") as caught:
        find_scans([tmp_path])
    assert "1 files that are not DICOM" in caught.value.why
