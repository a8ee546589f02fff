"""Real scans: the doctor says nothing that is not true. What it does say was looked at."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from panorgan.data_doctor import Source, examine

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the real scans are not here (../shared/data)")


def test_hippocampus_is_silent():
    checkup = examine([Source("hippocampus", DATA / "Task04_Hippocampus")], workers=1)
    assert checkup.findings == ()
    assert len(checkup.cases) == 120
    assert {facts.modality for facts in checkup.cases} == {"MR"}


@pytest.mark.slow
def test_acdc_holds_one_patient_twice():
    """Both frames of patient 76 are those of patient 74, byte by byte; only the labels are another reader's."""
    checkup = examine([Source("acdc", DATA / "acdc")], workers=1)
    assert {(f.code, f.case) for f in checkup.findings} == {
        ("duplicate-scan", "patient076_frame01"),
        ("duplicate-scan", "patient076_frame12"),
    }
    assert len(checkup.cases) == 160


ORGANS = "spleen=1;kidney_right=2;kidney_left=3;gallbladder=4;liver=5;stomach=6;pancreas=7"


@pytest.mark.parametrize(
    ("image", "label", "expected"),
    [
        # The model broke this pancreas into four pieces, the second with 8.6 ml at 28 mm from the first.
        ("example_ct.nii.gz", "example_seg_fast_force_split.nii.gz", {("far-piece", "pancreas")}),
        ("example_mr_sm.nii.gz", "example_seg_mr.nii.gz", set()),
        # A DICOM series, and a label whose y axis runs the other way. Kidneys and gallbladder lie below its 20 slices.
        ("example_ct_dicom", "example_seg_dicom.nii.gz", set()),
    ],
)
def test_one_scan_with_a_models_labels(image, label, expected, tmp_path):
    folder = DATA / "totalsegmentator_examples"
    ids = np.unique(np.asanyarray(nib.load(folder / label).dataobj)).tolist()
    named = ";".join(entry for entry in ORGANS.split(";") if int(entry.split("=")[1]) in ids)
    others = ",".join(str(i) for i in ids if i > 7)
    row = f'one,{folder / image},{folder / label},"{named};other={others}"'
    (tmp_path / "cases.csv").write_text(f"case,image,label,annotated\n{row}\n")
    checkup = examine([Source("here", tmp_path, ignore=("other",), external=True)], workers=1)
    assert {(f.code, f.structure) for f in checkup.findings} == expected
    assert checkup.cases[0].modality == ("MR" if "mr" in image else "CT")
