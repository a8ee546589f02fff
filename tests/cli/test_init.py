"""`panorgan init`: what it writes, what it asks, and what it refuses, with wrong input of every kind."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
import yaml
from invoking import invoke
from ordinary_folders import (
    Patient,
    dicom_and_contours,
    dicom_and_labels,
    folder_per_patient,
    known_layout,
    make_patients,
    mask_suffixes,
    save,
    suffix,
)
from refusing import refused as refusing

from panorgan.anatomy.catalogue import remove_added
from panorgan.config import load_experiment
from panorgan.workflows.draft import write_draft
from panorgan.workflows.survey import survey


@pytest.fixture(autouse=True)
def no_own_organs():
    """Organs that one test names must not be known to the next."""
    yield
    remove_added()


@pytest.fixture(scope="module")
def patients(tmp_path_factory) -> list[Patient]:
    return make_patients(tmp_path_factory.mktemp("patients") / "phantom", 4)


@pytest.fixture
def init(capfd, monkeypatch, tmp_path):
    """init(folder, …, option, …) → exit code, standard output, errors; writes into tmp_path/exp."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        out = () if "--out" in arguments else ("--out", str(tmp_path / "exp"))
        return invoke(capfd, monkeypatch, "init", *map(str, arguments), *out)

    return run


def change_name(path: Path, old: str, new: str) -> None:
    """Rename a region of an RTSTRUCT file."""
    contours = pydicom.dcmread(path)
    for roi in contours.StructureSetROISequence:
        roi.ROIName = new if roi.ROIName == old else roi.ROIName
    contours.save_as(path)


def answer(monkeypatch, text: str) -> None:
    """What a person types into a terminal."""
    typed = io.StringIO(text)
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", typed)


def refused(init, code: str, *arguments: str | Path) -> dict[str, str]:
    """The error of the command, which writes nothing."""
    left, out, _ = init(*arguments, "--json")
    assert left == 2
    error = json.loads(out.splitlines()[-1])
    assert error["code"] == code, error
    assert error["fix"]
    return error


# ---------------------------------------------------------------- what it writes


def test_table_and_experiment_of_a_folder(init, patients, tmp_path):
    suffix(tmp_path / "north wing", patients[:3], ("liver", "pancreas"))
    code, out, err = init(tmp_path / "north wing", "--labels", "9=pancreas")
    assert code == 0, err
    with (tmp_path / "exp" / "cases.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == ["pat000", "pat001", "pat002"]
    assert rows[1]["image"] == str(tmp_path / "north wing" / "pat001.nii.gz")
    assert {row["annotated"] for row in rows} == {"label_3=3;label_9=9"}
    content = yaml.safe_load((tmp_path / "exp" / "experiment.yaml").read_text())
    assert content["vocabulary"] == ["liver", "pancreas"]
    assert content["sites"] == {
        "north-wing": {"folder": "cases.csv", "labels": {"label_3": "liver", "label_9": "pancreas"}}
    }
    for step in ("doctor", "plan", "train"):
        assert f"panorgan {step} {tmp_path / 'exp' / 'experiment.yaml'}" in out


def test_rounds_and_network_are_left_to_the_plan(init, patients, tmp_path):
    """`plan --write` keeps whatever a file sets."""
    suffix(tmp_path / "site", patients, ("liver",))
    assert init(tmp_path / "site")[0] == 0
    drafted = yaml.safe_load((tmp_path / "exp" / "experiment.yaml").read_text())
    assert not {"training", "network", "plan"} & set(drafted)
    assert load_experiment(tmp_path / "exp" / "experiment.yaml").training.rounds == 100


def test_json_says_all_of_it(init, patients, tmp_path):
    suffix(tmp_path / "north", patients[:3], ("liver", "pancreas"))
    code, out, _ = init(tmp_path / "north", "--json")
    (line,) = out.splitlines()
    said = json.loads(line)
    assert code == 0
    assert said["vocabulary"] == ["liver"]
    assert said["refusal"] == ""
    site = said["sites"]["north"]
    assert (site["cases"], site["patients"], site["modality"], site["layout"]) == (3, 3, "CT", None)
    liver, pancreas = site["labels"]
    assert (liver["name"], liver["ids"], liver["cases"], liver["organ"], liver["source"]) == (
        "label_3", [3], 3, "liver", "guess",
    )  # fmt: skip
    volumes = [patient.masks["liver"].sum() * 8**3 / 1000 for patient in patients[:3]]
    assert liver["volume_ml"] == pytest.approx(np.median(volumes))
    assert (pancreas["organ"], pancreas["source"]) == ("", "")
    assert [step.split()[1] for step in said["next"]] == ["doctor", "plan", "train"]


def test_several_sites_with_names_of_their_own(init, patients, tmp_path):
    known_layout(tmp_path / "a" / "data", patients[:2], ("liver",))
    mask_suffixes(tmp_path / "b" / "data", patients[:2], ("kidney_left", "kidney_right"))
    suffix(tmp_path / "a_b", patients[2:3], ("liver",))
    code, _, err = init(tmp_path / "a" / "data", tmp_path / "b" / "data", tmp_path / "a_b")
    assert code == 0, err
    sites = load_experiment(tmp_path / "exp" / "experiment.yaml").sites
    assert sites["a"].folder == tmp_path / "a" / "data"
    assert sites["b"].folder == tmp_path / "exp" / "b" / "cases.csv"
    assert {name: site.external for name, site in sites.items()} == {"a": False, "b": False, "a_b": True}
    assert not list((tmp_path / "b" / "data").glob("*.csv"))


def test_a_draft_within_the_data_is_relative_and_can_be_moved(init, patients, tmp_path):
    folder_per_patient(tmp_path / "site", patients[:2], ("liver",))
    assert init(tmp_path / "site", "--out", tmp_path / "site")[0] == 0
    (tmp_path / "site").rename(tmp_path / "moved")
    rows = list(csv.DictReader((tmp_path / "moved" / "cases.csv").open()))
    assert rows[0]["image"] == "Patient_000/ct.nii.gz"
    assert load_experiment(tmp_path / "moved" / "experiment.yaml").sites["site"].folder.is_file()


def test_a_union_that_another_site_separates_becomes_its_parts(init, patients, tmp_path):
    known_layout(tmp_path / "north", patients[:2], ("kidney_left", "kidney_right"))
    known_layout(tmp_path / "south", patients[2:], ("liver",))
    path = tmp_path / "south" / "dataset.json"
    path.write_text(path.read_text().replace('"liver"', '"kidney"'))
    code, _, err = init(tmp_path / "north", tmp_path / "south")
    assert code == 0, err
    assert load_experiment(tmp_path / "exp" / "experiment.yaml").vocabulary == ("kidney_left", "kidney_right")


def test_organs_can_be_chosen(init, patients, tmp_path):
    known_layout(tmp_path / "north", patients[:2], ("liver", "spleen", "pancreas"))
    assert init(tmp_path / "north", "--organs", "spleen, Liver")[0] == 0
    assert load_experiment(tmp_path / "exp" / "experiment.yaml").vocabulary == ("liver", "spleen")
    refused(init, "organ-not-labelled", tmp_path / "north", "--organs", "aorta", "--out", tmp_path / "other")


def test_nothing_is_overwritten(init, patients, tmp_path):
    suffix(tmp_path / "north", patients[:2], ("liver",))
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "experiment.yaml").write_text("mine")
    refused(init, "draft-exists", tmp_path / "north")
    with refusing("draft-exists"):
        write_draft([survey(tmp_path / "north", "north")], tmp_path / "exp")
    assert [path.name for path in (tmp_path / "exp").iterdir()] == ["experiment.yaml"]
    assert (tmp_path / "exp" / "experiment.yaml").read_text() == "mine"


def test_a_mask_that_is_missing_is_unknown_and_an_empty_one_absent(init, patients, tmp_path):
    mask_suffixes(tmp_path / "north", patients[:3], ("liver", "spleen"))
    (tmp_path / "north" / "p1_spleen.nrrd").unlink()
    save(tmp_path / "north" / "p2_spleen.nrrd", np.zeros(patients[2].voxels.shape, np.uint8), patients[2].affine)
    code, out, _ = init(tmp_path / "north", "--json")
    spleen = json.loads(out)["sites"]["north"]["labels"][1]
    assert code == 0
    assert (spleen["organ"], spleen["cases"], spleen["looked_at"]) == ("spleen", 1, 2)
    rows = list(csv.DictReader((tmp_path / "exp" / "cases.csv").open()))
    assert ["spleen=" in row["annotated"] for row in rows] == [True, False, True]


def test_names_that_yaml_would_read_as_something_else(init, patients, tmp_path):
    suffix(tmp_path / "007", patients[:2], ("liver",))
    suffix(tmp_path / "no", patients[2:], ("liver",))
    assert init(tmp_path / "007", tmp_path / "no", "--labels", "3=+on")[0] == 0
    experiment = load_experiment(tmp_path / "exp" / "experiment.yaml")
    assert list(experiment.sites) == ["007", "no"]
    assert experiment.vocabulary == ("on",)


def test_unknown_names_of_a_layout_are_guessed_or_left_out(init, patients, tmp_path):
    known_layout(tmp_path / "north", patients[:3], ("liver", "pancreas"))
    path = tmp_path / "north" / "dataset.json"
    path.write_text(path.read_text().replace('"liver"', '"Leberchen"').replace('"pancreas"', '"Ding"'))
    assert init(tmp_path / "north")[0] == 0
    site = load_experiment(tmp_path / "exp" / "experiment.yaml").sites["north"]
    assert (site.labels, site.ignore) == ({"Leberchen": "liver"}, ("Ding",))
    assert (site.folder, site.layout) == (tmp_path / "north", "auto")


def test_an_organ_that_a_name_says_is_not_guessed_again(init, patients, tmp_path):
    known_layout(tmp_path / "north", patients[:3], ("liver", "pancreas"))
    path = tmp_path / "north" / "dataset.json"
    path.write_text(path.read_text().replace('"liver"', '"Leberchen"').replace('"pancreas"', '"liver"'))
    assert init(tmp_path / "north")[0] == 0
    site = load_experiment(tmp_path / "exp" / "experiment.yaml").sites["north"]
    assert (site.labels, site.ignore) == ({}, ("Leberchen",))


def test_contours_of_other_things_are_left_out(init, patients, tmp_path):
    dicom_and_contours(tmp_path / "site", patients[:2], ("liver",))
    change_name(tmp_path / "site" / "pid0" / "rs.dcm", "liver", "PTV 60 Gy")
    assert init(tmp_path / "site")[0] == 0  # as large as a liver, and where the liver is
    site = load_experiment(tmp_path / "exp" / "experiment.yaml").sites["site"]
    assert site.ignore == ("PTV 60 Gy",)


# ---------------------------------------------------------------- what it asks


def test_a_person_is_asked_and_asked_again(init, patients, tmp_path, monkeypatch):
    suffix(tmp_path / "north", patients[:3], ("liver", "pancreas", "spleen"))
    answer(monkeypatch, "\npancraes\n+islet_mass\n-\n")  # label 3: yes; 7 (first wrong), 9
    code, out, err = init(tmp_path / "north")
    assert code == 0, err
    assert "Did you mean 'pancreas'" in out
    content = yaml.safe_load((tmp_path / "exp" / "experiment.yaml").read_text())
    assert content["sites"]["north"]["labels"] == {"label_3": "liver", "label_7": "islet_mass"}
    assert content["sites"]["north"]["ignore"] == ["label_9"]
    assert content["organs"] == {"islet_mass": {}}
    assert "Guessed from anatomy" not in out  # it was confirmed


def test_names_and_options_are_not_asked_about(init, patients, tmp_path, monkeypatch):
    suffix(tmp_path / "north", patients[:2], ("liver",))
    known_layout(tmp_path / "south", patients[2:], ("spleen",))
    answer(monkeypatch, "")
    code, out, _ = init(tmp_path / "north", tmp_path / "south", "--labels", "north:label_3=liver")
    assert code == 0
    assert "Which organ" not in out


def test_yes_asks_nothing(init, patients, tmp_path, monkeypatch):
    suffix(tmp_path / "north", patients[:2], ("liver",))
    answer(monkeypatch, "spleen\n")
    assert init(tmp_path / "north", "--yes")[0] == 0
    assert load_experiment(tmp_path / "exp" / "experiment.yaml").vocabulary == ("liver",)


# ---------------------------------------------------------------- what it refuses


def test_folders_without_scans_labels_or_pairs(init, patients, tmp_path):
    one = patients[0]
    (tmp_path / "empty").mkdir()
    refused(init, "no-scans", tmp_path / "empty")
    refused(init, "path-missing", tmp_path / "nowhere")
    (tmp_path / "exp").mkdir(exist_ok=True)
    (tmp_path / "exp" / "experiment.yaml").write_text("")
    refused(init, "path-missing", tmp_path / "nowhere")  # the input first, then the output
    (tmp_path / "exp" / "experiment.yaml").unlink()
    (tmp_path / "exp").rmdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "p1.png").write_bytes(b"\x89PNG")
    assert "picture" in refused(init, "no-scans", tmp_path / "pictures")["why"]
    for name in ("a", "b"):
        save(tmp_path / "scans" / f"{name}.nii.gz", one.voxels, one.affine)
        save(tmp_path / "masks" / f"{name}_seg.nii.gz", one.label_map(("liver",)), one.affine)
        save(tmp_path / "apart" / "scans" / f"{name}.nii.gz", one.voxels, one.affine)
        save(tmp_path / "apart" / "masks" / f"x{name}y.nii.gz", one.label_map(("liver",)), one.affine)
    refused(init, "no-labels", tmp_path / "scans")
    assert "labels" in refused(init, "no-scans", tmp_path / "masks")["why"]
    refused(init, "nothing-paired", tmp_path / "apart")
    assert not (tmp_path / "exp").exists()


def test_labels_that_are_none(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:3], ("liver",))
    blurred = [patient.label_map(("liver",)) * 0.37 for patient in patients]
    for n in (0, 1, 2):
        save(tmp_path / "site" / f"pat{n:03d}_seg.nii.gz", blurred[n].astype(np.float32), patients[n].affine)
    refused(init, "labels-not-usable", tmp_path / "site")
    for n in (0, 1):
        save(tmp_path / "site" / f"pat{n:03d}_seg.nii.gz", patients[n].label_map(("liver",)), patients[n].affine)
    code, out, _ = init(tmp_path / "site", "--json")
    assert code == 0
    assert json.loads(out)["sites"]["site"]["cases"] == 2
    assert "pat002" in json.loads(out)["sites"]["site"]["notes"][-1]


def test_labels_on_another_grid_are_not_guessed(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:2], ("liver",))
    for n in (0, 1):
        moved = patients[n].affine + np.array([[0, 0, 0, 30]] * 3 + [[0] * 4])
        save(tmp_path / "site" / f"pat{n:03d}_seg.nii.gz", patients[n].label_map(("liver",)), moved)
    assert "another grid" in refused(init, "labels-unknown", tmp_path / "site")["why"]
    assert init(tmp_path / "site", "--labels", "3=liver")[0] == 0  # so that the doctor can tell more


def test_labels_that_cannot_be_guessed(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:2], ("pancreas",))
    error = refused(init, "labels-unknown", tmp_path / "site")
    assert "9=ORGAN" in error["fix"]
    assert not (tmp_path / "exp").exists()


def test_several_files_of_a_case(init, patients, tmp_path):
    for n, one in enumerate(patients[:2]):
        for kind in ("t1", "t2"):
            save(tmp_path / "mr" / f"B{n}" / f"B{n}_{kind}.nii.gz", one.voxels, one.affine)
            save(tmp_path / "two" / f"B{n}_{kind}_seg.nii.gz", one.label_map(("liver", "spleen")), one.affine)
        save(tmp_path / "mr" / f"B{n}" / f"B{n}_seg.nii.gz", one.label_map(("liver",)), one.affine)
        save(tmp_path / "two" / f"B{n}.nii.gz", one.voxels, one.affine)
    assert "t1, t2" in refused(init, "several-files-fit", tmp_path / "mr")["fix"]
    assert "t1, t2" in refused(init, "several-files-fit", tmp_path / "two")["fix"]
    assert init(tmp_path / "mr", "--scan-file", "t2")[0] == 0
    rows = list(csv.DictReader((tmp_path / "exp" / "cases.csv").open()))
    assert [Path(row["image"]).name for row in rows] == ["B0_t2.nii.gz", "B1_t2.nii.gz"]
    assert init(tmp_path / "two", "--label-file", "T1", "--out", tmp_path / "other")[0] == 0
    rows = list(csv.DictReader((tmp_path / "other" / "cases.csv").open()))
    assert [Path(row["label"]).name for row in rows] == ["B0_t1_seg.nii.gz", "B1_t1_seg.nii.gz"]


def test_a_folder_of_sites(init, patients, tmp_path):
    suffix(tmp_path / "all" / "north", patients[:2], ("liver",))
    suffix(tmp_path / "all" / "south", patients[2:], ("liver",))
    error = refused(init, "folder-of-sites", tmp_path / "all")
    assert f"panorgan init {tmp_path / 'all' / 'north'} {tmp_path / 'all' / 'south'}" in error["fix"]
    assert init(tmp_path / "all", "--one-site")[0] == 0


def test_a_folder_around_a_layout_is_that_layout(init, patients, tmp_path):
    known_layout(tmp_path / "download" / "Dataset001", patients[:2], ("liver",))
    code, out, _ = init(tmp_path / "download", "--json")
    assert code == 0
    assert json.loads(out)["sites"]["download"]["layout"] == "nnunet"


def test_one_patient_is_too_few(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:1], ("liver",))
    refused(init, "too-few-patients", tmp_path / "site")


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("77=liver", "unknown-label"),
        ("3=pancraes", "unknown-organ"),
        ("nowhere:3=liver", "unknown-site"),
        ("liver", "bad-labels"),
        ("=liver", "bad-labels"),
        ("3=+Bad Name", "bad-organ-name"),
        ("3=+liver", "organ-known"),
    ],
)
def test_labels_that_are_given_wrongly(init, patients, tmp_path, given, code):
    suffix(tmp_path / "site", patients[:2], ("liver",))
    refused(init, code, tmp_path / "site", "--labels", given)


def test_what_is_given_is_checked_before_where_it_goes(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:2], ("liver",))
    (tmp_path / "empty").mkdir()
    assert init(tmp_path / "site")[0] == 0
    refused(init, "no-scans", tmp_path / "empty")
    assert refused(init, "unknown-organ", tmp_path / "site", "--organs", "livr")["where"] == "--organs livr"
    refused(init, "draft-exists", tmp_path / "site")


def test_a_folder_for_the_draft_that_is_a_file(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:2], ("liver",))
    (tmp_path / "file").touch()
    refused(init, "draft-exists", tmp_path / "site", "--out", tmp_path / "file")


def test_a_folder_that_is_given_twice(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:2], ("liver",))
    refused(init, "folder-twice", tmp_path / "site", tmp_path / "site" / ".." / "site")


def test_labels_and_organs_that_are_swapped(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:2], ("liver",))
    assert "3=liver" in refused(init, "unknown-organ", tmp_path / "site", "--labels", "liver=3")["fix"]


def test_an_organ_that_is_given_is_not_guessed_for_another_label(init, patients, tmp_path):
    suffix(tmp_path / "site", patients[:2], ("liver", "pancreas"))
    code, out, err = init(tmp_path / "site", "--labels", "9=liver", "--json")
    assert code == 0, err
    labels = {label["name"]: label["organ"] for label in json.loads(out)["sites"]["site"]["labels"]}
    assert labels == {"label_3": "", "label_9": "liver"}


def test_dicom_series_beside_label_maps(init, patients, tmp_path):
    dicom_and_labels(tmp_path / "site", patients[:2], ("liver",))
    code, out, err = init(tmp_path / "site", "--json")
    assert code == 0, err
    assert json.loads(out)["sites"]["site"]["modality"] == "CT"
    rows = list(csv.DictReader((tmp_path / "exp" / "cases.csv").open()))
    assert [Path(row["image"]).name for row in rows] == ["dicom", "dicom"]
    assert [row["patient"] for row in rows] == ["pid0", "pid1"]


def test_other_volumes_in_a_dicom_tree_are_named(init, patients, tmp_path):
    dicom_and_contours(tmp_path / "all" / "anna", patients[:2], ("liver",))
    suffix(tmp_path / "all" / "bert", patients[2:], ("liver",))
    code, out, err = init(tmp_path / "all", "--json")
    assert code == 0, err
    (note,) = json.loads(out)["sites"]["all"]["notes"]
    assert "4 NIfTI" in note
    assert "bert/pat000.nii.gz" in note
    _, out, _ = init(tmp_path / "all" / "anna", "--out", tmp_path / "exp2", "--json")
    assert json.loads(out)["sites"]["anna"]["notes"] == []
