"""`panorgan predict --format`, `--from` and `--to`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
import yaml
from dicom_files import WrittenSeries, write_series
from invoking import invoke
from loopback import free_port
from made_models import make_model
from made_predictions import GEOMETRIES, dice, read_contours, read_seg
from orthanc import PASSWORD, USER, needs_orthanc, running
from stub_archive import answering
from typer.testing import CliRunner

from panorgan import load_model
from panorgan.cli import main as cli
from panorgan.cli.predict_dicomweb import DicomWebRequest
from panorgan.workflows.dicomweb import DicomWebServer
from panorgan.workflows.outputs import FORMATS

EVERYTHING = ",".join(FORMATS)


@pytest.fixture(scope="module")
def finished(tiny_content, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_content()))
    arguments = ["train", str(folder / "tiny.yaml"), "--run", str(folder / "run"), "--set", "training.rounds=2"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    return folder / "run"


def write_ct(folder: Path, **header) -> WrittenSeries:
    voxels = np.random.default_rng(0).integers(-100, 200, (14, 16, 8)).astype(np.int16)
    return write_series(folder, voxels, **{"spacing": (11.0, 12.0, 12.5), **header})


def predict(capfd, monkeypatch, finished, *arguments) -> tuple[int, str, str]:
    return invoke(capfd, monkeypatch, "predict", str(finished), *map(str, arguments))


@pytest.mark.parametrize("geometry", ["axial", "oblique", "thick", "from head to feet", "long pixels"])
def test_a_series_gives_all_formats_with_the_same_voxels(finished, geometry, tmp_path, capfd, monkeypatch):
    write_ct(tmp_path / "ct", **GEOMETRIES[geometry])
    out = tmp_path / "out"
    code, printed, err = predict(
        capfd, monkeypatch, finished, tmp_path / "ct", "--out", out, "--format", EVERYTHING, "--json"
    )
    assert code == 0, err
    shown = json.loads(printed)
    assert {name: Path(path).name for name, path in shown["files"].items()} == {
        name: f"ct{one.ending}" for name, one in FORMATS.items()
    }
    assert shown["labels"] == shown["files"]["nifti"]
    nifti = nib.load(out / "ct.nii.gz")
    labels = np.asarray(nifti.dataobj)
    assert len(np.unique(labels)) > 2
    for name, read in (("seg", read_seg), ("labelmap", read_seg), ("rtstruct", read_contours)):
        found = read(out / f"ct.{name}.dcm", nifti.affine, labels.shape)
        assert all(dice(found == value, labels == value) == 1.0 for value in range(1, 5)), name
    weights = json.loads((out / "ct.json").read_text())["weights"]
    segment = pydicom.dcmread(out / "ct.seg.dcm").SegmentSequence[0]
    assert weights in segment.SegmentationAlgorithmIdentificationSequence[0].AlgorithmParameters


def test_without_the_option_it_is_nifti(finished, tmp_path, capfd, monkeypatch):
    write_ct(tmp_path / "ct")
    code, printed, _ = predict(capfd, monkeypatch, finished, tmp_path / "ct", "--out", tmp_path / "o")
    assert code == 0
    assert printed == f"ct → {tmp_path / 'o' / 'ct.nii.gz'}\n"
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["ct.json", "ct.nii.gz", "volumes.csv"]


def test_a_file_that_is_no_series_is_refused_and_the_series_beside_it_is_written(
    finished, tmp_path, capfd, monkeypatch
):
    write_ct(tmp_path / "ct")
    scan = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti1Image(np.zeros((8, 8, 8), np.int16), np.diag([12, 12, 12, 1])), scan)
    code, _, err = predict(
        capfd, monkeypatch, finished, scan, tmp_path / "ct", "--out", tmp_path / "o", "--format", "dicom-seg"
    )
    assert code == 2
    assert "[no-source-series]" in err
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["ct.json", "ct.seg.dcm", "volumes.csv"]


def test_results_are_replaced_with_a_doubt_and_other_files_never(finished, tmp_path, capfd, monkeypatch):
    write_ct(tmp_path / "ct")
    arguments = (tmp_path / "ct", "--out", tmp_path / "o", "--format", "seg.nrrd,dicom-seg")
    assert predict(capfd, monkeypatch, finished, *arguments)[0] == 0
    code, printed, _ = predict(capfd, monkeypatch, finished, *arguments, "--json")
    assert code == 0
    assert [doubt["code"] for doubt in json.loads(printed)["doubts"]].count("output-replaced") == 2
    (tmp_path / "o" / "ct.json").unlink()
    code, _, err = predict(capfd, monkeypatch, finished, *arguments)
    assert code == 2
    assert "[overwrites-file]" in err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("x", "--format", "nifty"), "unknown-format"),
        (("x", "--to", "https://pacs.example/dicom-web"), "nothing-to-store"),
        (("x", "--to", "https://a:b@pacs.example/", "--format", "rtstruct"), "credentials-in-address"),
        (("x", "--from", "https://pacs.example/dicom-web", "--study", "1.2"), "scans-and-server"),
        (("--from", "https://pacs.example/dicom-web"), "study-or-server-missing"),
        (("x", "--study", "1.2"), "study-or-server-missing"),
        ((), "no-scans"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_read(arguments, code, tmp_path, capfd, monkeypatch):
    (empty := tmp_path / "run").mkdir()
    status, _, err = invoke(capfd, monkeypatch, "predict", str(empty), *arguments, "--out", str(tmp_path / "o"))
    assert status == 2
    assert f"[{code}]" in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "arguments",
    [("pacs", "--series", "3"), ("--from", "http://127.0.0.1:9/", "--study", "1.2", "--series", "3")],
)
def test_series_are_not_chosen_for_a_model_of_several_channels(arguments, tmp_path, capfd, monkeypatch):
    model = make_model(tmp_path / "model", network={"input_channels": 2}, channels=("t1", "t2"))
    code, _, err = invoke(capfd, monkeypatch, "predict", str(model), *arguments, "--out", str(tmp_path / "o"))
    assert code == 2
    assert "[series-of-channels]" in err
    assert "t1=FOLDER t2=FOLDER" in err
    assert not (tmp_path / "o").exists()


def test_series_are_channels_where_their_folders_are_named(tmp_path, capfd, monkeypatch):
    model = make_model(
        tmp_path / "model", network={"input_channels": 2}, channels=("t1", "t2"), plan={"spacing_mm": (12, 12, 12)}
    )
    for number, name in enumerate(("t1", "t2")):
        write_ct(tmp_path / "anna" / name, SeriesNumber=number)
    code, _, err = invoke(capfd, monkeypatch, "predict", str(model), str(tmp_path / "anna"), "--out", str(tmp_path))
    assert code == 2
    assert "[no-scans]" in err
    assert "t1=FOLDER t2=FOLDER" in err
    named = [f"{name}={tmp_path / 'anna' / name}" for name in ("t1", "t2")]
    code, printed, _ = invoke(capfd, monkeypatch, "predict", str(model), *named, "--out", str(tmp_path), "--json")
    assert code == 0
    assert json.loads(printed)["labels"] == str(tmp_path / "anna.nii.gz")


def test_results_that_could_not_be_stored_are_kept(finished, tmp_path, capfd, monkeypatch):
    write_ct(tmp_path / "ct")
    url = f"http://127.0.0.1:{free_port()}/dicom-web"
    arguments = (tmp_path / "ct", "--out", tmp_path / "o", "--format", "dicom-seg", "--to", url)
    code, _, err = predict(capfd, monkeypatch, finished, *arguments)
    assert code == 2
    assert "[dicomweb-unreachable]" in err
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["ct.json", "ct.seg.dcm", "volumes.csv"]
    with answering(status=403) as stub:
        code, _, err = predict(capfd, monkeypatch, finished, *arguments[:-1], stub.url)
    assert "[dicomweb-refused]" in err


def test_a_model_remembers_the_series_that_it_predicted_on(finished, tmp_path):
    write_ct(tmp_path / "ct")
    prediction = load_model(finished, "cpu").predict(tmp_path / "ct")
    prediction.save(tmp_path / "scan", "dicom-seg")
    found = read_seg(tmp_path / "scan.seg.dcm", prediction.affine, prediction.labels.shape)
    np.testing.assert_array_equal(found, prediction.labels)


def test_fetched_scans_are_removed_when_the_command_is_told_to_end(monkeypatch):
    monkeypatch.setattr(DicomWebServer, "_chosen", lambda *_: [])
    request, folders = DicomWebRequest(origin="http://127.0.0.1:9/", study="1.2.3"), []
    before = signal.getsignal(signal.SIGTERM)

    def told_to_end() -> None:
        with request.opened([], [], ["nifti"]) as (scans, _):
            folders.extend(scans)
            (folders[0] / "patient").write_text("x")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        told_to_end()
    assert left.value.code == 143
    assert not folders[0].exists()
    assert signal.getsignal(signal.SIGTERM) == before


@needs_orthanc
@pytest.mark.slow
def test_from_an_archive_and_back_to_it(finished, tmp_path, capfd, monkeypatch):
    """A series of a real archive by WADO-RS, predicted, its results stored by STOW-RS beside it, and read back."""
    series = write_ct(tmp_path / "ct", **GEOMETRIES["oblique"], PatientID="anna")
    other = write_ct(
        tmp_path / "x", StudyInstanceUID=series.slices[0].StudyInstanceUID, SeriesNumber=9, PatientID="anna"
    )
    study = series.slices[0].StudyInstanceUID
    monkeypatch.setenv("PANORGAN_DICOMWEB_USER", USER)
    monkeypatch.setenv("PANORGAN_DICOMWEB_PASSWORD", PASSWORD)
    with running(tmp_path / "orthanc") as archive:
        archive.upload(*series.files, *other.files)
        arguments = (
            "--from", archive.url, "--study", study, "--series", series.uid, "--to", archive.url,
            "--format", "nifti,dicom-seg,rtstruct", "--out", tmp_path / "o", "--json",
        )  # fmt: skip
        code, printed, err = predict(capfd, monkeypatch, finished, *arguments)
        assert code == 0, err
        shown = json.loads(printed)
        assert shown["scan"] == f"{archive.url}/studies/{study}/series/{series.uid}"
        assert shown["stored"] == archive.url
        assert {Path(path).name for path in shown["files"].values()} == {
            "anna_3.nii.gz", "anna_3.seg.dcm", "anna_3.rtstruct.dcm",
        }  # fmt: skip
        nifti = nib.load(tmp_path / "o" / "anna_3.nii.gz")
        labels = np.asarray(nifti.dataobj)
        for name, read in (("seg", read_seg), ("rtstruct", read_contours)):
            sent = pydicom.dcmread(tmp_path / "o" / f"anna_3.{name}.dcm")
            back = archive.fetch(sent.SOPInstanceUID, tmp_path / "back.dcm")
            np.testing.assert_array_equal(read(back, nifti.affine, labels.shape), labels)
        local = tmp_path / "local"
        assert predict(capfd, monkeypatch, finished, tmp_path / "ct", "--out", local)[0] == 0
        np.testing.assert_array_equal(np.asarray(nib.load(local / "ct.nii.gz").dataobj), labels)
        code, _, err = predict(capfd, monkeypatch, finished, *arguments[:5], "77", *arguments[6:])
        assert code == 2
        assert "dicomweb-no-such-series" in err
        monkeypatch.setenv("PANORGAN_DICOMWEB_PASSWORD", "wrong")
        code, _, err = predict(capfd, monkeypatch, finished, *arguments)
        assert code == 2
        assert "dicomweb-refused" in err
