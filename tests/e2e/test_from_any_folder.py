"""From eleven shapes of ordinary folders to a finished federation: `panorgan init`, the doctor, training."""

from __future__ import annotations

from pathlib import Path

import pytest
from invoking import invoke
from ordinary_folders import SHAPES, Patient, make_patients, suffix

import panorgan
from panorgan.anatomy.catalogue import remove_added
from panorgan.data_doctor import Severity

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[3] / "shared" / "data"
ORGANS = ("liver", "spleen", "kidney_left", "kidney_right")
TINY = {
    "plan.spacing_mm": [16, 16, 16],
    "network.features": [4, 8],
    "training.rounds": 1,
    "training.local_steps": 1,
    "training.validate_every": 0,
    "training.select": "last",
    "training.overlap": 0.0,
    "training.sampling.patch_size": [16, 16, 16],
}


@pytest.fixture(autouse=True)
def no_own_organs():
    """Organs that one test names must not be known to the next."""
    yield
    remove_added()


@pytest.fixture(scope="module")
def patients(tmp_path_factory) -> list[Patient]:
    return make_patients(tmp_path_factory.mktemp("patients") / "phantom", 5)


def finished(path: Path, run: Path, **more) -> panorgan.Run:
    """The doctor finds no error, and training ends."""
    checkup = panorgan.doctor(path, workers=1)
    assert [f for f in checkup.findings if f.severity == Severity.error] == []
    trained = panorgan.train(panorgan.load_experiment(path, {**TINY, **more}), run)
    assert trained.complete
    return trained


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_becomes_a_federation_without_an_edit(shape, patients, tmp_path, capfd, monkeypatch):
    SHAPES[shape](tmp_path / "north", patients[:3], ORGANS)
    suffix(tmp_path / "south", patients[3:], ("liver",))
    folders = [str(tmp_path / "north"), str(tmp_path / "south")]
    code, out, err = invoke(capfd, monkeypatch, "init", *folders, "--out", str(tmp_path / "exp"), "--yes")
    assert code == 0, err
    assert "panorgan train" in out
    path = tmp_path / "exp" / "experiment.yaml"
    experiment = panorgan.load_experiment(path)
    assert set(experiment.vocabulary) == set(ORGANS)
    run = finished(path, tmp_path / "run")
    assert all(run.labelled_itself("north", organ) for organ in ORGANS)
    assert [run.labelled_itself("south", organ) for organ in ORGANS] == [True, False, False, False]


def test_one_line_of_the_file_names_what_cannot_be_guessed(patients, tmp_path, capfd, monkeypatch):
    suffix(tmp_path / "north", patients[:3], ("liver", "pancreas"))
    code, out, err = invoke(
        capfd, monkeypatch, "init", str(tmp_path / "north"), "--out", str(tmp_path / "exp"), "--yes"
    )
    assert code == 0, err
    assert "label_9" in out
    path = tmp_path / "exp" / "experiment.yaml"
    text = path.read_text()
    assert "ignore: [label_9]" in text
    finished(path, tmp_path / "run")  # without the pancreas
    edited = text.replace("    labels:\n", "    labels:\n      label_9: pancreas\n").replace(
        "ignore: [label_9]", "ignore: []"
    )
    path.write_text(edited.replace("vocabulary: [liver]", "vocabulary: [liver, pancreas]"))
    assert finished(path, tmp_path / "again").labelled_itself("north", "pancreas")


def test_an_option_names_what_cannot_be_guessed(patients, tmp_path, capfd, monkeypatch):
    suffix(tmp_path / "north", patients[:3], ("liver", "pancreas"))
    suffix(tmp_path / "south", patients[3:], ("pancreas", "spleen"))
    folders = [str(tmp_path / "north"), str(tmp_path / "south")]
    labels = ["--labels", "9=pancreas", "--labels", "south:7=+unheard_of"]
    out = tmp_path / "exp"
    code, _, err = invoke(capfd, monkeypatch, "init", *folders, *labels, "--out", str(out), "--yes")
    assert code == 0, err
    run = finished(out / "experiment.yaml", tmp_path / "run")
    assert set(run.vocabulary) == {"liver", "pancreas", "unheard_of"}
    assert run.labelled_itself("south", "unheard_of")
    assert run.labelled_itself("north", "pancreas")


@pytest.mark.skipif(not DATA.is_dir(), reason="the real scans are not here (../shared/data)")
def test_real_scans_under_other_names(tmp_path, capfd, monkeypatch):
    abdomens = sorted((DATA / "chaos_mr" / "imagesTr").glob("*.nii.gz"))[:3]
    for n, scan in enumerate(abdomens):
        for source, place in (
            (scan, f"scans/{n}.nii.gz"),
            (scan.parents[1] / "labelsTr" / scan.name, f"masks/{n}.nii.gz"),
        ):
            (tmp_path / "abdomen" / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "abdomen" / place).symlink_to(source)
    for n, truth in enumerate(sorted((DATA / "acdc").glob("*/*_gt.nii.gz"))[:5:2]):
        (tmp_path / "heart" / f"P{n}").mkdir(parents=True)
        (tmp_path / "heart" / f"P{n}" / "mri.nii.gz").symlink_to(str(truth).replace("_gt", ""))
        (tmp_path / "heart" / f"P{n}" / "mri-mask.nii.gz").symlink_to(truth)
    folders = [str(tmp_path / "abdomen"), str(tmp_path / "heart")]
    code, _, err = invoke(capfd, monkeypatch, "init", *folders, "--out", str(tmp_path / "exp"), "--yes")
    assert code == 0, err
    experiment = panorgan.load_experiment(tmp_path / "exp" / "experiment.yaml")
    names = experiment.sites["abdomen"].labels
    assert names == {"label_1": "liver", "label_2": "kidney_right", "label_3": "kidney_left", "label_4": "spleen"}
    assert experiment.sites["heart"].labels == {
        "label_1": "heart_right_ventricle",
        "label_2": "heart_myocardium",
        "label_3": "heart_left_ventricle",
    }
    finished(tmp_path / "exp" / "experiment.yaml", tmp_path / "run")
