"""Formats by name: which files they give, that all or none are written, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from made_predictions import ORGANS, made_prediction, random_labels
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.workflows.outputs import FORMATS, check_source, output_files, parse_formats, side_file
from panorgan.workflows.prediction import Prediction


def prediction() -> Prediction:
    return Prediction(random_labels(), np.eye(4), Vocabulary(ORGANS), {"scan": "s", "model": "m"})


def test_formats_are_named_with_commas_or_in_a_list_each_once():
    assert parse_formats("nifti, DICOM-SEG,nifti") == ("nifti", "dicom-seg")
    assert parse_formats(["seg.nrrd"]) == ("seg.nrrd",)


@pytest.mark.parametrize("text", ["nifty", "", "nifti,dicomseg", ","])
def test_other_names_are_refused_with_those_there_are(text):
    with refused("unknown-format") as caught:
        parse_formats(text)
    assert all(name in caught.value.fix for name in FORMATS)


def test_files_lie_beside_each_other_under_one_name():
    found = output_files(Path("o/p1.ct.nii.gz"), tuple(FORMATS))
    assert {name: path.name for name, path in found.items()} == {
        "nifti": "p1.ct.nii.gz",
        "dicom-seg": "p1.ct.seg.dcm",
        "dicom-seg-labelmap": "p1.ct.labelmap.dcm",
        "rtstruct": "p1.ct.rtstruct.dcm",
        "seg.nrrd": "p1.ct.seg.nrrd",
    }
    assert output_files(Path("a.nii"), ["nifti", "seg.nrrd"])["nifti"] == Path("a.nii")
    assert output_files(Path("p1.ct"), ["rtstruct"]) == {"rtstruct": Path("p1.ct.rtstruct.dcm")}
    assert output_files(Path("p1.seg.dcm"), ["dicom-seg"]) == {"dicom-seg": Path("p1.seg.dcm")}
    assert side_file(Path("p1.ct.nii.gz")) == Path("p1.ct.json")
    with refused("not-a-nifti-name"):
        output_files(Path("p1.ct"), ["nifti", "rtstruct"])


def test_one_call_writes_several_and_one_json(tmp_path):
    made = made_prediction(tmp_path / "ct")
    side = made.prediction.save(tmp_path / "o" / "scan.nii.gz", list(FORMATS))
    ends = ["json", "labelmap.dcm", "nii.gz", "rtstruct.dcm", "seg.dcm", "seg.nrrd"]
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [f"scan.{end}" for end in ends]
    about = json.loads(side.read_text())
    assert about["weights"] == "0123456789abcdef" * 4
    assert about["labels"] == made.prediction.names


def test_where_one_format_fails_none_is_written_and_what_was_there_stays(tmp_path):
    prediction().save(tmp_path / "scan.nii.gz")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2
    with refused("no-source-series"):
        prediction().save(tmp_path / "scan.nii.gz", "nifti,seg.nrrd,rtstruct")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_library_that_is_missing_is_noticed_before_the_work(tmp_path, monkeypatch):
    made = made_prediction(tmp_path / "ct")
    monkeypatch.setitem(sys.modules, "highdicom", None)
    check_source(["rtstruct", "nifti"], made.series.files)
    with refused("highdicom-missing"):
        check_source(["dicom-seg-labelmap"], made.series.files)


def test_a_source_is_checked_only_for_dicom():
    check_source(["nifti", "seg.nrrd"], ())
    with refused("no-source-series"):
        check_source(["nifti", "dicom-seg"], ())
