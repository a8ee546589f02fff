"""DICOM-SEG, read back by pydicom alone and by panorgan's own reader: every voxel at its place, and what it is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
from dicom_files import cases_of, change, frame_positions, masks_of, write_series
from made_predictions import GEOMETRIES, ORGANS, SIZE, dice, made_prediction, random_labels, read_seg
from pydicom.uid import UID, CTImageStorage, generate_uid
from refusing import refused

import panorgan
from panorgan.anatomy import OwnOrgan, Vocabulary, declare_organs
from panorgan.anatomy.catalogue import remove_added
from panorgan.data.volume import read_scan, source_files
from panorgan.workflows.prediction import Prediction

REAL = Path(__file__).parents[4] / "shared" / "data" / "totalsegmentator_examples" / "example_ct_dicom"
KINDS = {"dicom-seg": "seg", "dicom-seg-labelmap": "labelmap"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_voxel_is_where_the_label_map_has_it(tmp_path, geometry, kind):
    made = made_prediction(tmp_path / "ct", **GEOMETRIES[geometry])
    made.prediction.save(tmp_path / "out" / "scan.nii.gz", ["nifti", kind])
    nifti = nib.load(tmp_path / "out" / "scan.nii.gz")
    labels = np.asarray(nifti.dataobj)
    found = read_seg(tmp_path / "out" / f"scan.{KINDS[kind]}.dcm", nifti.affine, labels.shape)
    np.testing.assert_array_equal(found, labels)
    assert all(dice(found == number, labels == number) == 1.0 for number in made.prediction.names.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_panorgan_reads_its_own_segmentations(tmp_path, geometry, kind):
    made = made_prediction(tmp_path / "p" / "ct", **GEOMETRIES[geometry])
    made.saved(tmp_path / "p" / "result", kind)
    (case,) = cases_of(tmp_path).values()
    assert case.annotated == tuple(sorted(ORGANS))
    for organ, mask in masks_of(case).items():
        np.testing.assert_array_equal(mask, made.prediction.mask(organ), err_msg=organ)


def test_frames_follow_slices_whose_positions_are_rounded(tmp_path):
    """The label map lies on the straight line through all slices; a frame lies where its slice says."""
    write_series(tmp_path / "p" / "ct", np.random.default_rng(0).integers(-1000, 1000, SIZE))
    for number, path in enumerate(sorted((tmp_path / "p" / "ct").iterdir())):
        x, y, z = pydicom.dcmread(path).ImagePositionPatient
        change(path, ImagePositionPatient=[x, y, round(float(z) + 0.02 * (-1) ** number, 3)])
    volume = read_scan(tmp_path / "p" / "ct")
    labels, source = random_labels(), source_files(tmp_path / "p" / "ct")
    prediction = Prediction(labels, volume.affine, Vocabulary(ORGANS), {}, (), source)
    prediction.save(tmp_path / "p" / "scan", "dicom-seg")
    slices = {tuple(pydicom.dcmread(path).ImagePositionPatient) for path in source}
    assert {tuple(place) for place in frame_positions(tmp_path / "p" / "scan.seg.dcm")} == slices
    (case,) = cases_of(tmp_path).values()
    for organ, mask in masks_of(case).items():
        np.testing.assert_array_equal(mask, prediction.mask(organ), err_msg=organ)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real scans are not here (../shared/data)")
def test_a_real_series_in_jpeg_2000(tmp_path):
    """Its anonymiser has removed the UIDs, so it is refused as it is; with UIDs of its own it is exact."""
    volume = read_scan(REAL)
    labels = np.zeros(volume.voxels.shape, np.uint8)
    labels[200:240, 300:330, 4:9] = random_labels((40, 30, 5))
    prediction = Prediction(labels, volume.affine, Vocabulary(ORGANS), {"model": "demo"}, (), source_files(REAL))
    with refused("source-series-unusable") as caught:
        prediction.save(tmp_path / "scan", "dicom-seg")
    assert "SOPInstanceUID" in caught.value.why
    (tmp_path / "ct").mkdir()
    study, series = generate_uid(), generate_uid()
    for path in source_files(REAL):
        one = pydicom.dcmread(path)
        assert one.file_meta.TransferSyntaxUID.is_compressed
        one.SOPClassUID, one.SOPInstanceUID = CTImageStorage, generate_uid()
        one.StudyInstanceUID, one.SeriesInstanceUID = study, series
        one.save_as(tmp_path / "ct" / path.name)
    prediction = replace(prediction, source=source_files(tmp_path / "ct"))
    prediction.save(tmp_path / "scan", "dicom-seg,rtstruct")
    np.testing.assert_array_equal(read_seg(tmp_path / "scan.seg.dcm", volume.affine, labels.shape), labels)
    referenced = pydicom.dcmread(tmp_path / "scan.rtstruct.dcm").ReferencedFrameOfReferenceSequence[0]
    (found,) = referenced.RTReferencedStudySequence[0].RTReferencedSeriesSequence
    assert found.SeriesInstanceUID == series


def test_frames_lie_in_the_planes_of_the_slices_and_name_them(tmp_path):
    made = made_prediction(tmp_path / "ct", **GEOMETRIES["oblique"])
    dataset = pydicom.dcmread(f"{made.saved(tmp_path, 'dicom-seg')}.seg.dcm")
    slices = {one.SOPInstanceUID: one for one in made.series.slices}
    shared = dataset.SharedFunctionalGroupsSequence[0]
    first = made.series.slices[0]
    assert shared.PlaneOrientationSequence[0].ImageOrientationPatient == first.ImageOrientationPatient
    assert shared.PixelMeasuresSequence[0].PixelSpacing == first.PixelSpacing
    assert dataset.FrameOfReferenceUID == first.FrameOfReferenceUID
    for group in dataset.PerFrameFunctionalGroupsSequence:
        source = group.DerivationImageSequence[0].SourceImageSequence[0]
        place = group.PlanePositionSequence[0].ImagePositionPatient
        assert place == slices[source.ReferencedSOPInstanceUID].ImagePositionPatient
    (series,) = dataset.ReferencedSeriesSequence
    assert series.SeriesInstanceUID == made.series.uid
    assert {one.ReferencedSOPInstanceUID for one in series.ReferencedInstanceSequence} == set(slices)


def code(sequence) -> tuple[str, str]:
    (item,) = sequence
    return item.CodingSchemeDesignator, item.get("CodeValue") or item.LongCodeValue


def test_segments_carry_codes_sides_places_colours_and_the_algorithm(tmp_path):
    made = made_prediction(tmp_path / "ct")
    dataset = pydicom.dcmread(f"{made.saved(tmp_path, 'dicom-seg')}.seg.dcm")
    liver, tumour, _, left, right = dataset.SegmentSequence
    assert [s.SegmentLabel for s in dataset.SegmentSequence][:3] == ["Liver", "Liver tumour", "Spleen"]
    assert code(liver.SegmentedPropertyCategoryCodeSequence) == ("SCT", "91723000")
    assert code(liver.SegmentedPropertyTypeCodeSequence) == ("SCT", "10200004")
    assert code(tumour.SegmentedPropertyCategoryCodeSequence) == ("SCT", "49755003")
    assert code(tumour.SegmentedPropertyTypeCodeSequence) == ("SCT", "108369006")
    assert code(tumour.AnatomicRegionSequence) == ("SCT", "10200004")
    for kidney, side in ((left, "7771000"), (right, "24028007")):
        (kind,) = kidney.SegmentedPropertyTypeCodeSequence
        assert code([kind]) == ("SCT", "64033007")
        assert code(kind.SegmentedPropertyTypeModifierCodeSequence) == ("SCT", side)
    # #d55e00 in CIELab, as colour tables have it (L 54.7, a 44.0, b 63.6), within a hundredth of the scales.
    lightness, a, b = liver.RecommendedDisplayCIELabValue
    assert lightness * 100 / 65535 == pytest.approx(54.7, abs=1)
    assert a * 255 / 65535 - 128 == pytest.approx(44.0, abs=2.5)
    assert b * 255 / 65535 - 128 == pytest.approx(63.6, abs=2.5)
    assert liver.SegmentAlgorithmType == "AUTOMATIC"
    (algorithm,) = liver.SegmentationAlgorithmIdentificationSequence
    assert (algorithm.AlgorithmName, algorithm.AlgorithmVersion) == ("panorgan", panorgan.__version__)
    for fact in ("demo", "r1", "0123456789abcdef" * 4):
        assert fact in str(algorithm.AlgorithmParameters)
    assert dataset.SoftwareVersions == panorgan.__version__
    assert dataset.SegmentationType == "BINARY"
    assert "CodingSchemeIdentificationSequence" not in dataset


def test_patient_and_study_are_those_of_the_images_in_any_alphabet(tmp_path):
    said = {
        "PatientName": "Müller^Jürgen", "PatientID": "Ü1", "PatientBirthDate": "19700101", "PatientSex": "M",
        "StudyID": "ö7", "AccessionNumber": "Ä3", "StudyDescription": "Bäuche", "SpecificCharacterSet": "ISO_IR 100",
    }  # fmt: skip
    made = made_prediction(tmp_path / "ct", **said)
    source, dataset = made.series.slices[0], pydicom.dcmread(f"{made.saved(tmp_path, 'dicom-seg')}.seg.dcm")
    for name in (*said, "StudyInstanceUID", "StudyDate", "StudyTime"):
        wanted = "ISO_IR 192" if name == "SpecificCharacterSet" else source[name].value
        assert str(dataset[name].value) == str(wanted), name
    assert dataset.SeriesInstanceUID != source.SeriesInstanceUID
    assert UID(dataset.SOPInstanceUID).is_valid
    assert dataset.SeriesNumber == 1003, "beside the images' 3"


def test_every_result_is_an_object_of_its_own(tmp_path):
    made = made_prediction(tmp_path / "ct")
    first, second = (pydicom.dcmread(f"{made.saved(tmp_path / n, 'dicom-seg')}.seg.dcm") for n in "ab")
    assert first.SOPInstanceUID != second.SOPInstanceUID
    assert first.SeriesInstanceUID != second.SeriesInstanceUID


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_label_map_is_a_segmentation_with_an_empty_slice(tmp_path, kind):
    made = made_prediction(tmp_path / "p" / "ct")
    made = made.showing(np.zeros_like(made.prediction.labels))
    path = tmp_path / "p" / f"scan.{KINDS[kind]}.dcm"
    made.saved(tmp_path / "p", kind)
    dataset = pydicom.dcmread(path)
    assert not dataset.pixel_array.any()
    assert dataset.NumberOfFrames == (len(ORGANS) if kind == "dicom-seg" else 1)
    referenced = [one.ReferencedSOPInstanceUID for s in dataset.ReferencedSeriesSequence for one in s[0x0008114A]]
    assert sorted(referenced) == sorted(one.SOPInstanceUID for one in made.series.slices)
    (case,) = cases_of(tmp_path).values()
    assert case.annotated == tuple(sorted(ORGANS))
    assert not any(mask.any() for mask in masks_of(case).values())


def test_a_series_of_one_slice(tmp_path):
    made = made_prediction(tmp_path / "ct", random_labels((13, 11, 1)))
    path = f"{made.saved(tmp_path, 'dicom-seg')}.seg.dcm"
    labels = made.prediction.labels
    np.testing.assert_array_equal(read_seg(path, made.prediction.affine, labels.shape), labels)


@pytest.fixture
def own_organs():
    organs = {
        "seed_cyst_left": OwnOrgan(title="Näht^e | links", kind="cyst", parent="kidney_left", side="left"),
        "a_structure_with_a_rather_long_name": OwnOrgan(),
    }
    declare_organs(organs)
    yield list(organs)
    remove_added()


def test_organs_of_an_experiment_get_codes_of_our_own_scheme(tmp_path, own_organs):
    made = made_prediction(tmp_path / "ct", organs=["kidney_left", *own_organs])
    path = f"{made.saved(tmp_path, 'dicom-seg')}.seg.dcm"
    dataset = pydicom.dcmread(path)
    _, cyst, long = dataset.SegmentSequence
    (kind,) = cyst.SegmentedPropertyTypeCodeSequence
    assert code([kind]) == ("99PANORGAN", "seed_cyst_left")
    assert kind.CodeMeaning == "Näht^e | links"
    assert code(kind.SegmentedPropertyTypeModifierCodeSequence) == ("SCT", "7771000")
    assert code(cyst.SegmentedPropertyCategoryCodeSequence) == ("SCT", "49755003")
    (region,) = cyst.AnatomicRegionSequence
    assert code([region]) == ("SCT", "64033007")
    assert code(region.AnatomicRegionModifierSequence) == ("SCT", "7771000")
    assert code(long.SegmentedPropertyTypeCodeSequence) == ("99PANORGAN", "a_structure_with_a_rather_long_name")
    (scheme,) = dataset.CodingSchemeIdentificationSequence
    assert scheme.CodingSchemeDesignator == "99PANORGAN"
    labels = made.prediction.labels
    np.testing.assert_array_equal(read_seg(path, made.prediction.affine, labels.shape), labels)


# -- what cannot be written --------------------------------------------------------------------------------------------


def test_a_scan_that_is_no_dicom_series_is_refused(tmp_path):
    made = made_prediction(tmp_path / "ct")
    alone = Prediction(made.prediction.labels, made.prediction.affine, made.prediction.vocabulary, {})
    with refused("no-source-series"):
        alone.save(tmp_path / "out" / "scan.nii.gz", "nifti,dicom-seg")
    assert not list((tmp_path / "out").iterdir()), "all formats or none"


@pytest.mark.parametrize("missing", ["FrameOfReferenceUID", "StudyInstanceUID"])
def test_a_series_without_its_uids_is_refused(tmp_path, missing):
    made = made_prediction(tmp_path / "ct", **{missing: ""})
    with refused("source-series-unusable") as caught:
        made.saved(tmp_path, "dicom-seg")
    assert missing in caught.value.why


def test_a_file_of_several_frames_is_refused(tmp_path):
    made = made_prediction(tmp_path / "ct")
    change(made.series.files[2], NumberOfFrames=2)
    with refused("source-series-unusable"):
        made.saved(tmp_path, "dicom-seg")


def test_slices_of_two_series_are_refused(tmp_path):
    made = made_prediction(tmp_path / "ct")
    change(made.series.files[2], SeriesInstanceUID="1.2.3.4.5")
    with refused("source-series-unusable"):
        made.saved(tmp_path, "dicom-seg")


@pytest.mark.parametrize("turn", ["moved", "flipped", "transposed", "shorter"])
def test_labels_on_another_grid_are_refused(tmp_path, turn):
    made = made_prediction(tmp_path / "ct", random_labels((11, 11, 6)))
    labels, affine = made.prediction.labels, made.prediction.affine.copy()
    if turn == "moved":
        affine[:3, 3] += affine[:3, 0]
    elif turn == "flipped":
        affine = affine @ np.array([[-1, 0, 0, 10], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    elif turn == "transposed":
        affine = affine[:, [1, 0, 2, 3]]
    else:
        labels = labels[:, :, :-1]
    prediction = made.prediction
    other = Prediction(labels, affine, prediction.vocabulary, {}, (), prediction.source)
    with refused("not-on-source-grid"):
        other.save(tmp_path / "scan", "dicom-seg")


def test_what_the_library_refuses_says_why(tmp_path):
    made = made_prediction(tmp_path / "ct")
    for path in made.series.files:
        change(path, PatientSex="neither")
    with refused("dicom-output-failed") as caught:
        made.saved(tmp_path / "out", "dicom-seg")
    assert "neither" in caught.value.why
    assert not list((tmp_path / "out").iterdir())


def test_without_highdicom_the_error_names_the_extra(tmp_path, monkeypatch):
    made = made_prediction(tmp_path / "ct")
    monkeypatch.setitem(sys.modules, "highdicom", None)
    with refused("highdicom-missing") as caught:
        made.saved(tmp_path, "dicom-seg")
    assert "dicom-out" in caught.value.fix
