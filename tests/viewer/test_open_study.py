"""What a path is: runs, comparisons, predictions, the doctor's page, folders, scans."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from dicom_files import write_series
from invoking import invoke
from refusing import refused
from viewed_files import AFFINE, VOXEL_ML, save

import panorgan
from panorgan.data_doctor.page_data import META
from panorgan.report.doctor_page import write_doctor_page
from panorgan.viewer.of_files import folder_cases
from panorgan.viewer.open_study import open_study
from panorgan.viewer.study import Scan, Study
from panorgan.viewer.volumes import Volumes

pytestmark = pytest.mark.filterwarnings("ignore")


SLICES = np.arange(6 * 5 * 4, dtype=np.int16).reshape(6, 5, 4) - 500


def volumes_of(study: Study, case: int = 0, pane: int = 0) -> dict[str, float]:
    opened = Volumes()
    try:
        return opened.labels((case, pane), study.cases[case].panes[pane]).volumes_ml()
    finally:
        opened.close()


def write_prediction(folder: Path, labels: np.ndarray, **about: object) -> Path:
    """What `panorgan predict` leaves for a scan."""
    save(folder / "scan.nii.gz", labels)
    names = {"liver": 1, "liver_tumour": 2, "spleen": 3}
    side = folder / "scan.json"
    content = {"scan": "scan.nii.gz", "model": "m", "run": "r", "doubts": [], "labels": names}
    side.write_text(json.dumps({**content, **about}))
    return side


# -- folders and scans ---------------------------------------------------------------------------------------------


def test_a_data_folder_shows_its_labels_in_its_own_words(nnunet_folder, labels):
    study = open_study(nnunet_folder)
    assert (study.kind, [case.name for case in study.cases]) == ("folder", ["a1", "b2"])
    assert study.cases[1].panes[0].labels is None
    found = volumes_of(study)
    expected = {"liver": labels == 1, "liver_tumour": labels == 2, "spleen": labels == 3}
    expected["liver"] = expected["liver"] | expected["liver_tumour"]
    assert found == pytest.approx({name: mask.sum() * VOXEL_ML for name, mask in expected.items()})
    assert set(study.organ_names()) == {"liver", "liver_tumour", "spleen"}


def test_a_folder_without_a_layout_and_a_single_scan_are_shown(tmp_path, hu):
    for name in ("one", "two"):
        save(tmp_path / "loose" / f"{name}.nii.gz", hu)
    assert [case.name for case in open_study(tmp_path / "loose").cases] == ["one", "two"]
    study = open_study(tmp_path / "loose" / "one.nii.gz")
    assert [pane.scan.path.name for pane in study.cases[0].panes] == ["one.nii.gz"]


def test_dicom_series_are_converted_once_and_removed(tmp_path):
    series = write_series(tmp_path / "pacs" / "anna" / "ct", SLICES)
    study = open_study(tmp_path / "pacs")
    opened = Volumes()
    scan = study.cases[0].panes[0].scan
    assert scan.slices
    file = opened.scan(scan)
    assert opened.scan(scan) is file
    image = nib.Nifti1Image.from_bytes(b"".join(opened.scan_pieces(scan, None)))
    expected = panorgan.data.volume.read_volume(scan.path, scan.slices)
    assert np.array_equal(image.get_fdata(), expected.voxels)
    assert np.allclose(image.affine, expected.affine)
    assert file.path.is_file()
    opened.close()
    assert not file.path.exists()
    assert series


def test_of_a_file_with_several_channels_the_first_is_shown(tmp_path):
    channels = np.stack([SLICES, SLICES[::-1]], axis=-1)
    nib.save(nib.Nifti1Image(channels, AFFINE), tmp_path / "case.nii.gz")
    opened = Volumes()
    try:
        shown = opened.scan(Scan(tmp_path / "case.nii.gz"))
        np.testing.assert_array_equal(np.asanyarray(nib.load(shown.path).dataobj), SLICES)
    finally:
        opened.close()


def test_converted_scans_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("panorgan.viewer.volumes._CONVERTED_KEPT", 2)
    monkeypatch.setattr("panorgan.viewer.volumes.in_another_process", lambda action, *args: action(*args))
    scans = []
    for name in "abc":
        write_series(tmp_path / name, SLICES)
        scans.append(open_study(tmp_path / name).cases[0].panes[0].scan)
    opened = Volumes()
    first = opened.scan(scans[0]).path
    others = [opened.scan(scan).path for scan in scans[1:]]
    assert not first.exists()
    assert all(path.exists() for path in others)
    assert opened.scan(scans[0]).path.exists()
    opened.close()


def test_what_is_nothing_is_refused(tmp_path):
    with refused("nothing-to-show"):
        open_study(tmp_path / "nowhere")
    (tmp_path / "letter.txt").write_text("Dear doctor")
    with refused("nothing-to-show"):
        open_study(tmp_path / "letter.txt")
    (tmp_path / "empty").mkdir()
    with refused("no-scans"):
        open_study(tmp_path / "empty")


# -- predictions ---------------------------------------------------------------------------------------------------


def test_a_prediction_finds_its_scan(tmp_path, hu, labels):
    scan = save(tmp_path / "pacs" / "scan.nii.gz", hu)
    doubt = {"code": "hu-offset", "what": "Odd values.", "why": "low", "fix": "look"}
    side = write_prediction(tmp_path / "out", labels, scan_path=str(scan), doubts=[doubt])
    for path in (side, side.parent, side.with_name("scan.nii.gz")):
        study = open_study(path)
        assert study.kind == "prediction", path
        assert study.cases[0].panes[0].scan.path == scan
        assert study.cases[0].remarks[0].code == "hu-offset"
        assert volumes_of(study)["liver"] == pytest.approx(((labels == 1) | (labels == 2)).sum() * VOXEL_ML)


def test_the_scan_of_a_prediction_may_have_moved(tmp_path, hu, labels):
    side = write_prediction(tmp_path / "out", labels, scan_path="/nowhere/scan.nii.gz")
    with refused("scan-of-prediction-missing"):
        open_study(side)
    scan = save(tmp_path / "moved" / "scan.nii.gz", hu)
    for given in (scan, scan.parent):
        assert open_study(side, given).cases[0].panes[0].scan.path == scan
    save(tmp_path / "scan.nii.gz", hu)
    assert open_study(side).cases[0].panes[0].scan.path == tmp_path / "scan.nii.gz", "beside the folder of predictions"


def test_the_first_of_several_channels_may_have_moved(tmp_path, hu, labels):
    """The prediction is named after its case, which no file is."""
    moved = save(tmp_path / "elsewhere" / "anna_t1.nii.gz", hu)
    side = write_prediction(tmp_path / "labels", labels, scan="anna", scan_path="/gone/anna_t1.nii.gz")
    study = open_study(side, scan=moved.parent)
    assert study.cases[0].panes[0].scan.path == moved


def test_a_prediction_on_a_dicom_series_finds_the_series_by_its_uid(tmp_path, labels):
    wanted = write_series(tmp_path / "pacs" / "one", SLICES)
    write_series(tmp_path / "pacs" / "two", SLICES)
    side = write_prediction(
        tmp_path / "out", labels, scan="pacs", scan_path=str(tmp_path / "pacs"), scan_series=wanted.uid
    )
    assert {path.parent.name for path in open_study(side).cases[0].panes[0].scan.slices} == {"one"}


def test_a_prediction_without_its_label_map_is_refused(tmp_path, labels):
    side = write_prediction(tmp_path, labels)
    side.with_name("scan.nii.gz").unlink()
    with refused("label-missing"):
        open_study(side)


@pytest.mark.slow
def test_what_predict_writes_is_shown_over_its_scan(finished_run, tmp_path, hu, capfd, monkeypatch):
    scan, out = save(tmp_path / "pacs" / "scan.nii.gz", hu), tmp_path / "out"
    code, _, err = invoke(capfd, monkeypatch, "predict", str(finished_run.path), str(scan), "--out", str(out))
    assert code == 0, err
    study = open_study(out)
    assert (study.kind, study.cases[0].panes[0].scan.path) == ("prediction", scan)
    assert study.organs == tuple(finished_run.vocabulary)


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_shows_prediction_and_reference_of_its_scored_cases(finished_run):
    for path in (finished_run.path, finished_run.report_file):
        study = open_study(path)
        assert study.kind == "run"
        assert study.page.samefile(finished_run.report_file)
        assert {(case.group, case.name) for case in study.cases} == {
            (r["site"], r["case"]) for r in finished_run.scores
        }
    case = study.cases[0]
    assert [(pane.title, pane.reference) for pane in case.panes] == [("Prediction", False), ("Reference", True)]
    own = finished_run.scores.where(site=case.group, case=case.name)
    assert case.panes[0].dice == {row["organ"]: row["dice"] for row in own if np.isfinite(row["dice"])}
    predicted = nib.load(finished_run.predictions_folder / case.group / f"{case.name}.nii.gz")
    voxels, ml = np.asarray(predicted.dataobj), abs(np.linalg.det(predicted.affine[:3, :3])) / 1000
    found = volumes_of(study, 0, 0)
    for number, organ in enumerate(finished_run.vocabulary, start=1):
        assert found[organ] == pytest.approx((voxels == number).sum() * ml), organ


@pytest.mark.slow
def test_a_run_whose_data_is_gone_or_unscored_says_so(finished_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished_run.path, copy)
    (copy / "metrics.csv").unlink()
    with refused("no-scores"):
        open_study(copy)


@pytest.mark.slow
def test_a_comparison_shows_every_method_beside_the_reference(finished_run, tmp_path):
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("solo", 10), ("solo", 2)):
        shutil.copytree(finished_run.path, tmp_path / "cmp" / method / f"seed-{seed}")
    (tmp_path / "cmp" / "comparison.html").write_text("<title>comparison</title>")
    for path in (tmp_path / "cmp", tmp_path / "cmp" / "comparison.html"):
        study = open_study(path)
        assert study.kind == "comparison"
        assert [pane.title for pane in study.cases[0].panes] == ["fedavg", "solo", "Reference"]
    assert "seed-0" in str(study.cases[0].panes[0].labels.path)
    assert "seed-2" in str(study.cases[0].panes[1].labels.path), "seeds are numbers"
    shutil.rmtree(tmp_path / "cmp" / "fedavg")
    shutil.rmtree(tmp_path / "cmp" / "solo")
    with refused("no-finished-run"):
        open_study(tmp_path / "cmp")


# -- the doctor ----------------------------------------------------------------------------------------------------


@pytest.fixture
def doctors_page(nnunet_folder, labels):
    """b2 is a1 once more, and has a label now; the page tells so."""
    save(nnunet_folder / "labelsTr" / "b2.nii.gz", labels)
    other = np.random.default_rng(1).integers(-900, 100, labels.shape).astype(np.int16)
    save(nnunet_folder / "imagesTr" / "c3_0000.nii.gz", other)
    return write_doctor_page(panorgan.doctor(nnunet_folder, workers=1), nnunet_folder / "doctor.html")


def test_a_duplicate_is_beside_its_twin(doctors_page):
    study = open_study(doctors_page)
    assert study.kind == "doctor"
    found = {case.name: case for case in study.cases}
    assert set(found) == {"a1", "b2", "c3"}
    assert [pane.title for pane in found["b2"].panes] == ["b2", "a1"]
    assert [pane.title for pane in found["a1"].panes] == ["a1", "b2"]
    assert "duplicate-scan" in {remark.code for remark in found["b2"].remarks}
    assert len(found["c3"].panes) == 1
    assert study.cases[-1].remarks == () or study.cases[0].remarks[0].severity == "error"


def test_a_finding_says_where_to_look(doctors_page):
    remarks = [remark for case in open_study(doctors_page).cases for remark in case.remarks if remark.organ]
    assert remarks
    for remark in remarks:
        inside = np.linalg.inv(AFFINE) @ [*remark.at_mm, 1]
        assert (inside[:3] >= 0).all()
        assert (inside[:3] < (20, 16, 12)).all()


def test_a_folder_with_the_doctors_page_shows_its_findings_unless_a_layout_is_named(doctors_page):
    assert open_study(doctors_page.parent).kind == "doctor"
    assert open_study(doctors_page.parent, layout="nnunet").kind == "folder"


def test_a_page_of_an_older_version_is_told_apart(doctors_page, tmp_path):
    old = tmp_path / "doctor.html"
    old.write_text(doctors_page.read_text().replace(META, "other"))
    with refused("nothing-to-show"):
        open_study(old)


def test_names_in_the_page_cannot_leave_their_place(nnunet_folder, hu):
    name = "x'\"><script>alert(1)"
    save(nnunet_folder / "imagesTr" / f"{name.replace('/', '')}_0000.nii.gz", hu)
    page = write_doctor_page(panorgan.doctor(nnunet_folder, workers=1), nnunet_folder / "doctor.html")
    assert "<script>alert" not in page.read_text()
    assert name in {case.name for case in open_study(page).cases}


def test_cases_and_organs_are_found_by_name(nnunet_folder):
    study = open_study(nnunet_folder)
    assert study.index_of("b2") == 1
    assert study.organ_of("liver_tumour") == "liver_tumour"
    with refused("no-such-case"):
        study.index_of("b3")
    with refused("no-such-organ"):
        study.organ_of("heart")
    twice = replace(study, cases=tuple(replace(case, group=site) for site in ("x", "y") for case in study.cases))
    assert [twice.index_of(name) for name in ("x/a1", "y/a1", "y/b2")] == [0, 2, 3]
    with refused("case-not-unique") as caught:
        twice.index_of("b2")
    assert caught.value.why == "there are x/b2, y/b2"
    assert set(folder_cases(nnunet_folder)) == {"a1", "b2"}


def test_the_server_does_without_the_libraries_that_train():
    """They take half a gigabyte of memory, and seconds; a run is read in another process."""
    modules = "panorgan.viewer.open_study, panorgan.viewer.session, panorgan.cli.viewer, panorgan.cli.main"
    heavy = "{'torch', 'monai', 'matplotlib'} & set(sys.modules)"
    code = f"import sys, {modules}; print({heavy})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "set()"
