"""RTSTRUCT, read back by pydicom and filled by the even-odd rule: the same voxels as the label map."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pydicom
import pytest
from made_predictions import GEOMETRIES, ORGANS, dice, made_prediction, read_contours
from pydicom.uid import UID
from refusing import refused
from scipy import ndimage

from panorgan.workflows.prediction import Prediction


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_voxel_centre_is_inside_the_contours_of_its_organ(tmp_path, geometry):
    made = made_prediction(tmp_path / "ct", **GEOMETRIES[geometry])
    made.prediction.save(tmp_path / "scan.nii.gz", "nifti,rtstruct")
    nifti = nib.load(tmp_path / "scan.nii.gz")
    labels = np.asarray(nifti.dataobj)
    found = read_contours(tmp_path / "scan.rtstruct.dcm", nifti.affine, labels.shape)
    np.testing.assert_array_equal(found, labels)
    assert all(dice(found == number, labels == number) == 1.0 for number in made.prediction.names.values())


def shell(shape=(40, 36, 5)) -> np.ndarray:
    """A liver with a hole in it, and a tumour in the hole."""
    x, y, z = np.indices(shape)
    apart = np.sqrt((x - 20) ** 2 + (y - 17) ** 2 + (3 * (z - 2)) ** 2)
    labels = np.where(apart < 15, 1, 0)
    labels[apart < 9] = 0
    labels[apart < 5] = 2
    return labels.astype(np.uint8)


def test_holes_are_keyholes_one_contour_per_piece(tmp_path):
    made = made_prediction(tmp_path / "ct", shell())
    path = f"{made.saved(tmp_path, 'rtstruct')}.rtstruct.dcm"
    np.testing.assert_array_equal(read_contours(path, made.prediction.affine, shell().shape), shell())
    for roi, value in zip(pydicom.dcmread(path).ROIContourSequence, (1, 2), strict=False):
        pieces = [ndimage.label(shell()[:, :, k] == value)[1] for k in range(5)]
        assert len(roi.ContourSequence) == sum(pieces)
        assert {contour.ContourGeometricType for contour in roi.ContourSequence} == {"CLOSED_PLANAR"}


def test_contours_lie_in_the_slices_that_they_name_within_a_tenth_of_a_micrometre(tmp_path):
    made = made_prediction(tmp_path / "ct", **GEOMETRIES["oblique"])
    dataset = pydicom.dcmread(f"{made.saved(tmp_path, 'rtstruct')}.rtstruct.dcm")
    slices = {one.SOPInstanceUID: one for one in made.series.slices}
    normal = np.cross(GEOMETRIES["oblique"]["orientation"][:3], GEOMETRIES["oblique"]["orientation"][3:])
    for roi in dataset.ROIContourSequence:
        for contour in roi.ContourSequence:
            (image,) = contour.ContourImageSequence
            place = np.array(slices[image.ReferencedSOPInstanceUID].ImagePositionPatient, float)
            points = np.array(contour.ContourData, float).reshape(-1, 3)
            assert np.abs((points - place) @ normal).max() < 1e-4


def test_the_set_refers_to_the_series_its_images_and_its_frame_of_reference(tmp_path):
    made = made_prediction(tmp_path / "ct")
    first, dataset = made.series.slices[0], pydicom.dcmread(f"{made.saved(tmp_path, 'rtstruct')}.rtstruct.dcm")
    (frame,) = dataset.ReferencedFrameOfReferenceSequence
    (study,) = frame.RTReferencedStudySequence
    (series,) = study.RTReferencedSeriesSequence
    assert frame.FrameOfReferenceUID == first.FrameOfReferenceUID
    assert study.ReferencedSOPInstanceUID == first.StudyInstanceUID
    assert series.SeriesInstanceUID == made.series.uid
    assert [one.ReferencedSOPInstanceUID for one in series.ContourImageSequence] == [
        one.SOPInstanceUID for one in made.series.slices
    ]
    assert {roi.ReferencedFrameOfReferenceUID for roi in dataset.StructureSetROISequence} == {first.FrameOfReferenceUID}


def test_regions_have_names_codes_colours_and_no_approval(tmp_path):
    made = made_prediction(tmp_path / "ct", PatientName="Weiß^Ö", SpecificCharacterSet="ISO_IR 100")
    dataset = pydicom.dcmread(f"{made.saved(tmp_path, 'rtstruct')}.rtstruct.dcm")
    names = [roi.ROIName for roi in dataset.StructureSetROISequence]
    assert names == ["Liver", "Liver tumour", "Spleen", "Left kidney", "Right kidney"]
    assert {roi.ROIGenerationAlgorithm for roi in dataset.StructureSetROISequence} == {"AUTOMATIC"}
    assert list(dataset.ROIContourSequence[0].ROIDisplayColor) == [0xD5, 0x5E, 0x00]
    seen = dataset.RTROIObservationsSequence
    assert [one.ReferencedROINumber for one in seen] == [1, 2, 3, 4, 5]
    assert [one.RTROIInterpretedType for one in seen] == ["ORGAN", "", "ORGAN", "ORGAN", "ORGAN"]
    (kidney,) = seen[3].RTROIIdentificationCodeSequence
    assert (kidney.CodeValue, kidney.CodingSchemeDesignator) == ("64033007", "SCT")
    assert kidney.SegmentedPropertyTypeModifierCodeSequence[0].CodeValue == "7771000"
    assert seen[1].AnatomicRegionSequence[0].CodeValue == "10200004"
    assert dataset.ApprovalStatus == "UNAPPROVED"
    assert dataset.PatientName == "Weiß^Ö"
    assert dataset.SeriesNumber == 2003
    assert UID(dataset.SOPInstanceUID).is_valid
    assert dataset.file_meta.MediaStorageSOPInstanceUID == dataset.SOPInstanceUID


def test_an_organ_that_was_not_found_is_a_region_without_contours(tmp_path):
    labels = shell()
    labels[labels == 2] = 0
    made = made_prediction(tmp_path / "ct", labels)
    dataset = pydicom.dcmread(f"{made.saved(tmp_path, 'rtstruct')}.rtstruct.dcm")
    assert len(dataset.StructureSetROISequence) == len(ORGANS)
    assert ["ContourSequence" in roi for roi in dataset.ROIContourSequence] == [True, False, False, False, False]


def test_a_contour_may_be_longer_than_64_kilobytes(tmp_path):
    """Explicit lengths of 16 bits would end there."""
    labels = np.zeros((200, 200, 2), np.uint8)
    labels[::2, :, 0] = 1
    labels[:, 100, 0] = 1
    made = made_prediction(tmp_path / "ct", labels)
    path = f"{made.saved(tmp_path, 'rtstruct')}.rtstruct.dcm"
    contours = pydicom.dcmread(path).ROIContourSequence[0].ContourSequence
    assert len(contours) == 1
    assert contours[0].NumberOfContourPoints > 400
    comb = np.zeros((4, 3000), bool)
    comb[0], comb[:, ::2] = True, True
    labels = np.ascontiguousarray(comb.T[:, :, None]).astype(np.uint8)
    made = made_prediction(tmp_path / "comb", labels)
    path = f"{made.saved(tmp_path / 'o', 'rtstruct')}.rtstruct.dcm"
    (contour,) = pydicom.dcmread(path).ROIContourSequence[0].ContourSequence
    assert len("\\".join(map(str, contour.ContourData))) > 1 << 16
    np.testing.assert_array_equal(read_contours(path, made.prediction.affine, labels.shape), labels)


def test_a_scan_that_is_no_dicom_series_is_refused(tmp_path):
    made = made_prediction(tmp_path / "ct")
    alone = Prediction(made.prediction.labels, made.prediction.affine, made.prediction.vocabulary, {})
    with refused("no-source-series"):
        alone.save(tmp_path / "scan", "rtstruct")
