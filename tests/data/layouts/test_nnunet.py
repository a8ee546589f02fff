"""nnU-Net folders: names, ids and files."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.data.layouts import read_cases
from panorgan.errors import DataError, PanorganError

VOCABULARY = Vocabulary(["liver", "spleen", "kidney_left", "kidney_right"])
# One voxel per id, 0 to 5.
LABEL = np.arange(6, dtype=np.uint8).reshape(6, 1, 1)


def write_folder(folder: Path, labels: object, cases=("b", "a"), label_cases=("a", "b"), **more: object) -> Path:
    """A small data folder; with `label_cases` None it has no labelsTr."""
    folder.mkdir()
    ending = more.get("file_ending", ".nii.gz")
    (folder / "dataset.json").write_text(json.dumps({"labels": labels, **more}), encoding="utf-8")
    (folder / "imagesTr").mkdir()
    for case in cases:
        nib.save(nib.Nifti1Image(np.zeros(LABEL.shape, np.int16), np.eye(4)), folder / f"imagesTr/{case}_0000{ending}")
    if label_cases is not None:
        (folder / "labelsTr").mkdir()
        for case in label_cases:
            nib.save(nib.Nifti1Image(LABEL, np.eye(4)), folder / f"labelsTr/{case}{ending}")
    return folder


def inside(cases, structure: str) -> list[int]:
    """The ids that the structure's mask of the first case covers, found by reading the files."""
    case = cases[0]
    mask = case.read_masks(case.read_image())[structure]
    return LABEL[mask].tolist()


def error_of(code: str, folder: Path, vocabulary: Vocabulary = VOCABULARY, **options) -> PanorganError:
    with refused(code, DataError) as caught:
        read_cases(folder, "north", vocabulary, **options)
    assert caught.value.where.startswith(str(folder))
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("labels", "vocabulary", "expected"),
    [
        ({"Left Kidney": 1, "right-kidney": 2}, VOCABULARY, {"kidney_left": [1], "kidney_right": [2]}),
        ({"liver": [1, 2], "liver_tumour": 2}, VOCABULARY, {"liver": [1, 2]}),
        ({"liver": 1, "liver tumor": 5}, VOCABULARY, {"liver": [1, 5]}),
        ({"liver": 1, "liver tumor": 5}, Vocabulary(["liver", "liver_tumour"]), {"liver": [1, 5], "liver_tumour": [5]}),
        ({"left kidney": 2, "right kidney": 4}, Vocabulary(["kidney"]), {"kidney": [2, 4]}),
        ({"left kidney": 2, "right kidney": 4, "renal tumor": 5}, Vocabulary(["kidney"]), {"kidney": [2, 4, 5]}),
        ({"kidney": 3, "spleen": 1}, VOCABULARY, {"kidney": [3], "spleen": [1]}),
        ({"kidneys": 3, "kidney tumor": 4}, VOCABULARY, {"kidney": [3, 4]}),
        ({"spleen": 2, "spl": 4}, VOCABULARY, {"spleen": [2, 4]}),  # two names of one organ
        ({"spleen": "3"}, VOCABULARY, {"spleen": [3]}),
        ({"spleen": ["3", 4]}, VOCABULARY, {"spleen": [3, 4]}),
        ({"pancreas": 1, "liver": 2}, VOCABULARY, {"liver": [2]}),
    ],
)
def test_names_and_ids_become_structures(tmp_path, labels, vocabulary, expected) -> None:
    # "aorta" declares the ids that the row leaves out, and is outside every vocabulary here.
    used = {int(i) for value in labels.values() for i in (value if isinstance(value, list) else [value])}
    rest = {"aorta": sorted(set(range(1, 6)) - used)}
    folder = write_folder(tmp_path / "data", {"background": 0, **labels, **rest})
    cases = read_cases(folder, "north", vocabulary)
    assert cases[0].annotated == tuple(sorted(expected))
    assert {structure: inside(cases, structure) for structure in expected} == expected


def test_cases_are_sorted_and_know_their_files(tmp_path) -> None:
    folder = write_folder(tmp_path / "data", {"background": 0, "liver": [1, 2, 3, 4, 5]})
    first, second = read_cases(folder, "north", VOCABULARY)
    assert (first.id, second.id) == ("a", "b")
    assert (first.patient, first.site) == ("a", "north")
    assert first.image == folder / "imagesTr/a_0000.nii.gz"
    assert first.labels is not None
    assert first.labels.path == folder / "labelsTr/a.nii.gz"


def test_another_file_ending_is_followed(tmp_path) -> None:
    folder = write_folder(tmp_path / "data", {"background": 0, "liver": [1, 2, 3, 4, 5]}, file_ending=".nii")
    cases = read_cases(folder, "north", VOCABULARY)
    assert [case.id for case in cases] == ["a", "b"]
    assert inside(cases, "liver") == [1, 2, 3, 4, 5]


def test_names_outside_the_vocabulary_are_declared_all_the_same(tmp_path) -> None:
    known = {"background": 0, "liver": 1, "pancreas": [2, 3], "stomach": 4}
    case = read_cases(write_folder(tmp_path / "without", known), "north", VOCABULARY)[0]
    with refused("stray-label") as caught:
        case.read_masks(case.read_image())
    assert "[5]" in caught.value.what
    case = read_cases(write_folder(tmp_path / "with", {**known, "aorta": 5}), "north", VOCABULARY)[0]
    assert set(case.read_masks(case.read_image())) == {"liver"}


def test_restrict_keeps_only_what_is_asked_for(tmp_path) -> None:
    labels = {"background": 0, "liver": 1, "spleen": 2, "kidney": [3, 4, 5]}
    folder = write_folder(tmp_path / "data", labels)
    cases = read_cases(folder, "north", VOCABULARY, restrict=("Spleen", "kidneys"))
    assert cases[0].annotated == ("kidney", "spleen")
    assert inside(cases, "kidney") == [3, 4, 5]
    assert set(cases[0].read_masks(cases[0].read_image())) == {"kidney", "spleen"}


def test_restrict_refuses_what_the_folder_does_not_annotate(tmp_path) -> None:
    folder = write_folder(tmp_path / "data", {"background": 0, "liver": 1})
    error = error_of("not-annotated", folder, restrict=("liver", "spleen"))
    assert "spleen" in error.what
    assert "liver" in error.why


def test_an_unknown_name_gets_a_suggestion(tmp_path) -> None:
    error = error_of("unknown-name", write_folder(tmp_path / "data", {"background": 0, "spleeen": 1}))
    assert "spleeen" in error.what
    assert "'spleen'" in error.fix
    assert error.where.endswith("data")


def test_one_side_alone_says_nothing_about_both(tmp_path) -> None:
    folder = write_folder(tmp_path / "data", {"background": 0, "left kidney": 1})
    error = error_of("part-of-union", folder, Vocabulary(["kidney"]))
    assert "kidney_right" in error.fix


def test_a_missing_label_file_is_named(tmp_path) -> None:
    folder = write_folder(tmp_path / "data", {"background": 0, "liver": 1}, label_cases=("a",))
    assert error_of("label-missing", folder).where == str(folder / "labelsTr/b.nii.gz")


def test_missing_images_are_an_error(tmp_path) -> None:
    folder = write_folder(tmp_path / "data", {"background": 0, "liver": 1}, cases=())
    error_of("no-scans", folder)
    (folder / "imagesTr").rmdir()
    error_of("no-scans", folder)


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_description_is_an_error(tmp_path, exists) -> None:
    folder = tmp_path / "data"
    if exists:
        folder.mkdir()
    error_of("no-layout" if exists else "folder-missing", folder)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"labels": ["liver"]}',
        '{"labels": {"liver": "one"}}',
        '{"labels": {"liver": null}}',
        '{"labels": {"liver": [1, "two"]}}',
        '{"labels": {"0": "background", "1": "liver"}}',
        '{"labels": {"liver": 0, "spleen": 1}}',
        '{"labels": {"background": 0, "liver": [0, 1]}}',
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_description_is_an_error(tmp_path, text) -> None:
    folder = write_folder(tmp_path / "data", {})
    (folder / "dataset.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert error_of("dataset-json-unreadable", folder).why


def test_withheld_labels_replace_the_folders_own(tmp_path) -> None:
    own = write_folder(tmp_path / "own", {"background": 0, "liver": [1, 2, 3, 4, 5]})
    withheld = write_folder(tmp_path / "withheld", {"background": 0, "spleen": 2, "liver": [1, 3, 4, 5]}, cases=())
    cases = read_cases(own, "north", VOCABULARY, labels_from=withheld)
    assert cases[0].annotated == ("liver", "spleen")
    assert cases[0].image.is_relative_to(own)
    assert inside(cases, "liver") == [1, 3, 4, 5]
    (withheld / "labelsTr/b.nii.gz").unlink()
    with refused("label-missing") as caught:
        read_cases(own, "north", VOCABULARY, labels_from=withheld)
    assert caught.value.where == str(withheld)
    assert "case b" in caught.value.why


@pytest.mark.parametrize("labels", [{}, {"background": 0}, {"background": 0, "pancreas": 1}])
def test_an_external_folder_needs_no_labels(tmp_path, labels) -> None:
    folder = write_folder(tmp_path / "data", labels, label_cases=None)
    cases = read_cases(folder, "east", VOCABULARY)
    assert [(case.id, case.annotated, case.labels) for case in cases] == [("a", (), None), ("b", (), None)]
    withheld = write_folder(tmp_path / "withheld", {"background": 0, "spleen": [1, 2, 3, 4, 5]}, cases=())
    assert inside(read_cases(folder, "east", VOCABULARY, labels_from=withheld), "spleen") == [1, 2, 3, 4, 5]
