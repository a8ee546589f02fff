"""DICOM-SEG, written by highdicom: exact masks on the image's grid, and the organs that segments are."""

from __future__ import annotations

import shutil

import numpy as np
import pydicom
import pytest
from dicom_files import (
    HIGH,
    HU,
    KIDNEY,
    LEFT,
    LIVER,
    LOW,
    NEOPLASM,
    RIGHT,
    SAGITTAL,
    SPLEEN,
    cases_of,
    describe,
    error_of,
    frame_positions,
    masks_of,
    write_liver,
    write_segmentation,
    write_series,
)
from pydicom.sr.coding import Code
from pydicom.uid import generate_uid

from panorgan.data.dicom_seg import segment_name


@pytest.mark.parametrize("kind", ["BINARY", "FRACTIONAL", "LABELMAP"])
@pytest.mark.parametrize("flip", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_masks_are_exact_in_whatever_order_and_direction_frames_are_written(tmp_path, kind, flip):
    series = write_series(tmp_path / "p" / "ct", HU)
    segments = [describe(1, "Liver", LIVER), describe(2, "Spleen", SPLEEN)]
    write_segmentation(tmp_path / "p" / "seg.dcm", series, [HIGH, LOW], segments, kind, flip)
    (case,) = cases_of(tmp_path).values()
    assert case.annotated == ("liver", "spleen")
    masks = masks_of(case)
    np.testing.assert_array_equal(masks["liver"], HIGH)
    np.testing.assert_array_equal(masks["spleen"], LOW)


def test_both_orders_of_frames_were_among_these(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    heights = [frame_positions(write_liver(tmp_path / f"{flip}", series, flip=flip)) for flip in ((0,), (1,))]
    falling, rising = ([place[2] for place in frames] for frames in heights)
    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)


def test_fractions_count_from_one_half(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    fractions = np.linspace(0, 1, HU.size, dtype=np.float32).reshape(HU.shape)
    path = write_liver(tmp_path / "p" / "seg", series, fractions, kind="FRACTIONAL")
    (case,) = cases_of(tmp_path).values()
    stored = pydicom.dcmread(path)
    assert stored.MaximumFractionalValue == 255
    mask = masks_of(case)["liver"]
    assert mask[fractions > 0.503].all()
    assert not mask[fractions < 0.498].any()
    assert mask.sum() == (stored.pixel_array >= 128).sum()


def test_slices_without_a_frame_are_empty(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    part = HIGH & (np.arange(6) == 4)
    path = write_liver(tmp_path / "p" / "seg", series, part)
    assert len(frame_positions(path)) == 1
    np.testing.assert_array_equal(masks_of(next(iter(cases_of(tmp_path).values())))["liver"], part)


def test_an_empty_segment_is_an_organ_known_to_be_absent(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    segments = [describe(1, "Liver", LIVER), describe(2, "Spleen", SPLEEN)]
    write_segmentation(tmp_path / "p" / "seg", series, [HIGH, HIGH & False], segments)
    (case,) = cases_of(tmp_path).values()
    assert case.annotated == ("liver", "spleen")
    assert not masks_of(case)["spleen"].any()


def test_sides_come_from_the_code(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    segments = [describe(1, "Segment_1", KIDNEY, side=RIGHT), describe(2, "kidney", KIDNEY, side=LEFT)]
    write_segmentation(tmp_path / "p" / "seg", series, [HIGH, LOW], segments)
    (case,) = cases_of(tmp_path).values()
    np.testing.assert_array_equal(masks_of(case)["kidney_right"], HIGH)
    np.testing.assert_array_equal(masks_of(case)["kidney_left"], LOW)


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        (describe(1, "Liver", LIVER), "Liver"),
        (describe(1, "drawn by hand", LIVER), "liver"),
        (describe(1, "drawn by hand", Code("T-62000", "SRT", "Liver")), "liver"),
        (describe(1, "drawn by hand", Code("T-62000", "SNM3", "Liver")), "liver"),
        (describe(1, "Milz", Code("1", "99LOCAL", "Milz")), "Milz"),
        (describe(1, "Left kidney", KIDNEY), "Left kidney"),
        (describe(1, "kidney", KIDNEY, side=LEFT), "kidney_left"),
        (describe(1, "x", KIDNEY, side=Code("G-A101", "SRT", "Left")), "kidney_left"),
        (describe(1, "Right kidney", KIDNEY, side=LEFT), "Right kidney (coded as kidney_left)"),
        (describe(1, "Spleen", LIVER), "Spleen (coded as liver)"),
        (describe(1, "lesion 3", NEOPLASM, region=LIVER), "liver_tumour"),
        (describe(1, "lesion 3", NEOPLASM), "lesion 3"),
        (describe(1, "left lobe", LIVER, side=LEFT), "left lobe"),
        (describe(1, "cyst", Code("367643001", "SCT", "Cyst"), region=LIVER), "cyst"),
    ],
)
def test_names_of_segments(segment, name):
    assert segment_name(segment) == name


def test_a_label_against_its_code_is_for_a_person_to_decide(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    segments = [describe(1, "Liver", LIVER), describe(2, "Right kidney", KIDNEY, side=LEFT)]
    write_segmentation(tmp_path / "p" / "seg", series, [HIGH, LOW], segments)
    assert "coded as kidney_left" in error_of(tmp_path, "unknown-name").what
    (case,) = cases_of(tmp_path, rename={"Right kidney (coded as kidney_left)": "kidney_right"}).values()
    np.testing.assert_array_equal(masks_of(case)["kidney_right"], LOW)


def test_several_segmentations_of_a_series_are_put_together(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    write_liver(tmp_path / "p" / "seg1", series)
    lesions = [describe(n, f"lesion {n}", NEOPLASM, region=LIVER) for n in (1, 2)]
    top, bottom = LOW & (np.arange(6) > 3), LOW & (np.arange(6) < 2)
    write_segmentation(tmp_path / "elsewhere" / "seg2", series, [top, bottom], lesions)
    (case,) = cases_of(tmp_path).values()
    masks = masks_of(case)
    np.testing.assert_array_equal(masks["liver_tumour"], top | bottom)
    np.testing.assert_array_equal(masks["liver"], HIGH | top | bottom)


def test_an_organ_in_two_segmentations_is_refused_unless_it_is_left_out(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    first, second = write_liver(tmp_path / "p" / "reader1", series), tmp_path / "p" / "reader2"
    segments = [describe(1, "liver", LIVER), describe(2, "Spleen", SPLEEN)]
    write_segmentation(second, series, [LOW, LOW], segments)
    error = error_of(tmp_path, "several-segmentations")
    assert "liver" in error.what
    assert str(first) in error.where
    assert str(second) in error.where
    (case,) = cases_of(tmp_path, ignore=("liver",)).values()
    np.testing.assert_array_equal(masks_of(case)["liver"], HIGH)


def test_a_segmentation_decides_which_series_of_a_patient_are_cases(tmp_path):
    write_series(tmp_path / "anna" / "arterial", HU, PatientID="anna", SeriesNumber=1)
    venous = write_series(tmp_path / "anna" / "venous", HU, PatientID="anna", SeriesNumber=2)
    write_series(tmp_path / "bert" / "venous", HU, PatientID="bert")
    write_liver(tmp_path / "segs" / "a.dcm", venous)
    cases = cases_of(tmp_path)
    assert {name: case.annotated for name, case in cases.items()} == {
        "anna_venous": ("liver",),
        "bert_venous": (),
    }


def test_a_segmentation_without_a_reference_is_matched_by_its_frame_of_reference(tmp_path):
    frame = generate_uid()
    series = write_series(tmp_path / "p" / "ct", HU, FrameOfReferenceUID=frame)
    write_liver(tmp_path / "p" / "seg", series, ReferencedSeriesSequence=None)
    np.testing.assert_array_equal(masks_of(cases_of(tmp_path)["p_ct"])["liver"], HIGH)
    write_series(tmp_path / "p" / "bone", HU, FrameOfReferenceUID=frame)
    assert "2 series" in error_of(tmp_path, "several-series-fit").why


def test_a_segmentation_of_a_series_that_is_not_there(tmp_path):
    write_series(tmp_path / "p" / "ct", HU)
    away = write_series(tmp_path / "away", HU)
    write_liver(tmp_path / "p" / "seg", away)
    shutil.rmtree(tmp_path / "away")
    error_of(tmp_path, "orphan-label")


def test_a_segmentation_of_a_scan_that_is_no_case_is_left_alone(tmp_path):
    frame = generate_uid()
    write_series(tmp_path / "p" / "ct", HU, FrameOfReferenceUID=frame)
    pet = write_series(tmp_path / "p" / "pet", HU, modality="PT", FrameOfReferenceUID=frame)
    write_liver(tmp_path / "p" / "seg", pet)
    (case,) = cases_of(tmp_path).values()
    assert case.annotated == ()


@pytest.mark.parametrize(
    "other",
    [
        {"origin": (-90.3, -40.0, -300.0)},
        {"origin": (-90.0, -40.0, -301.0)},
        {"origin": (-90.0, -40.0, -297.5)},
        {"spacing": (0.71, 0.8, 2.5)},
        {"orientation": SAGITTAL},
    ],
    ids=["shifted sideways", "between slices", "beyond the end", "other pixels", "other plane"],
)
def test_a_segmentation_on_another_grid(tmp_path, other):
    uid, frame = generate_uid(), generate_uid()
    write_series(tmp_path / "p" / "ct", HU, SeriesInstanceUID=uid, FrameOfReferenceUID=frame)
    away = write_series(tmp_path / "away", HU, SeriesInstanceUID=uid, FrameOfReferenceUID=frame, **other)
    shutil.rmtree(tmp_path / "away")
    write_liver(tmp_path / "p" / "seg", away)
    error_of(tmp_path, "grid-mismatch")


def test_a_cut_segmentation(tmp_path):
    series = write_series(tmp_path / "p" / "ct", HU)
    path = write_liver(tmp_path / "p" / "seg", series)
    path.write_bytes(path.read_bytes()[:-10])
    error_of(tmp_path, "file-unreadable")
