"""Segmentations of 3D Slicer, read back by SimpleITK and by pynrrd."""

from __future__ import annotations

import nrrd
import numpy as np
import pytest
import SimpleITK
from made_predictions import GEOMETRIES, LPS, ORGANS, made_prediction, random_labels

from panorgan.anatomy import Vocabulary
from panorgan.data.volume import read_volume
from panorgan.workflows.prediction import Prediction


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_voxel_lies_where_the_label_map_has_it(tmp_path, geometry):
    made = made_prediction(tmp_path / "ct", **GEOMETRIES[geometry])
    made.prediction.save(tmp_path / "scan.nii.gz", "nifti,seg.nrrd")
    nifti, own = read_volume(tmp_path / "scan.nii.gz"), read_volume(tmp_path / "scan.seg.nrrd")
    np.testing.assert_array_equal(own.voxels, made.prediction.labels)
    np.testing.assert_allclose(own.affine, nifti.affine, atol=1e-4)
    voxels, header = nrrd.read(str(tmp_path / "scan.seg.nrrd"))
    np.testing.assert_array_equal(voxels, made.prediction.labels)
    assert header["space"] == "left-posterior-superior"
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = np.array(header["space directions"]).T, header["space origin"]
    np.testing.assert_allclose(LPS @ affine, made.prediction.affine, atol=1e-9)


def test_a_scan_that_is_no_dicom_series_has_one_too(tmp_path):
    affine = np.array([[0, -2.0, 0, 10], [1.5, 0, 0, -7], [0, 0, 3, 2], [0, 0, 0, 1]])
    labels = random_labels()
    Prediction(labels, affine, Vocabulary(ORGANS), {}).save(tmp_path / "scan", "seg.nrrd")
    image = SimpleITK.ReadImage(str(tmp_path / "scan.seg.nrrd"))
    point = image.TransformIndexToPhysicalPoint((3, 2, 1))
    np.testing.assert_allclose(np.array([*point, 1]), LPS @ affine @ [3, 2, 1, 1])
    assert image[3, 2, 1] == labels[3, 2, 1]


def test_segments_are_described_as_slicer_reads_them(tmp_path):
    labels = np.zeros((13, 11, 6), np.uint8)
    labels[2:5, 3, 1:6], labels[7, 7, 0] = 1, 4
    made = made_prediction(tmp_path / "ct", labels)
    _, header = nrrd.read(f"{made.saved(tmp_path, 'seg.nrrd')}.seg.nrrd")
    assert header["Segmentation_SourceRepresentation"] == "Binary labelmap"
    assert header["Segmentation_ReferenceImageExtentOffset"] == "0 0 0"
    assert [header[f"Segment{n}_ID"] for n in range(5)] == list(ORGANS)
    assert [header[f"Segment{n}_LabelValue"] for n in range(5)] == list("12345")
    assert {header[f"Segment{n}_Layer"] for n in range(5)} == {"0"}
    assert "Segment5_ID" not in header
    assert header["Segment0_Name"] == "Liver"
    assert header["Segment0_Extent"] == "2 4 3 3 1 5"
    assert header["Segment3_Extent"] == "7 7 7 7 0 0"
    assert header["Segment1_Extent"] == "0 -1 0 -1 0 -1"
    red, green, blue = map(float, header["Segment0_Color"].split())
    assert (red, green, blue) == pytest.approx((0xD5 / 255, 0x5E / 255, 0), abs=1e-5)
    assert header["Segment3_Tags"] == (
        "Segmentation.Status:inprogress|TerminologyEntry:Segmentation category and type - DICOM master list"
        "~SCT^91723000^Anatomical Structure~SCT^64033007^Kidney~SCT^7771000^Left"
        "~Anatomic codes - DICOM master list~^^~^^|"
    )
    assert header["Segment1_Tags"].endswith("~SCT^10200004^Liver~^^|")
