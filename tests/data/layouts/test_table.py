"""The table of cases: what a row may say, and what is refused because it would be read as something else."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from layout_folders import ABDOMEN, marks, numbered, save, write_csv
from refusing import refused

from panorgan import doctor
from panorgan.data.layouts import find_layout, find_problems, read_cases


@pytest.mark.parametrize("written", ["liver", "liver=0", "liver=one", "=1x"])
def test_a_csv_row_that_cannot_be_understood(tmp_path, written):
    write_csv(tmp_path)
    path = tmp_path / "cases.csv"
    path.write_text(path.read_text().replace("liver=1;Spleen=2", written))
    with refused("row-unreadable") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert "case a " in caught.value.what
    assert repr(written) in caught.value.why


def test_a_csv_with_a_case_twice(tmp_path):
    write_csv(tmp_path)
    path = tmp_path / "cases.csv"
    path.write_text(path.read_text() + "a,scans/a.nii.gz,,,p3\n")
    with refused("case-named-twice") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert caught.value.what.endswith(": a.")


def rewrite(folder: Path, old: str, new: str) -> None:
    """Change one cell of the table."""
    path = folder / "cases.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "named", "why"),
    [
        ("a,scans/a.nii.gz,", "a,,", "case a ", "no image"),
        ("a,scans/a.nii.gz,", ",scans/a.nii.gz,", "", "line 2 has no case"),
        ("liver=1;Spleen=2", "", "case a ", "the label's integers"),
        ("masks/a.nii.gz", "", "case a ", "no label"),
        ("liver=1;Spleen=2", "liver=1;liver=2", "case a ", "liver twice"),
        ("liver=1;Spleen=2", "liver=²", "case a ", "liver=²"),
    ],
    ids=["no image", "no case", "label without names", "names without label", "name twice", "no ASCII digit"],
)
def test_a_cell_that_would_be_read_as_something_else(tmp_path, old, new, named, why):
    write_csv(tmp_path)
    rewrite(tmp_path, old, new)
    with refused("row-unreadable") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert named in caught.value.what
    assert why in caught.value.why
    assert caught.value.fix


def test_bad_rows_are_told_together_and_the_others_can_be_looked_at(tmp_path):
    write_csv(tmp_path)
    rewrite(tmp_path, "liver=1;Spleen=2", "liver")
    rewrite(tmp_path, "c,scans/c.nii.gz", "c,")
    layout = find_layout(tmp_path)
    assert list(layout.images(tmp_path)) == list(layout.labels(tmp_path)) == ["b"]
    problems = find_problems(layout, tmp_path)
    assert [error.code for error in problems] == ["row-unreadable"] * 2
    assert ["case a " in problems[0].what, "case c " in problems[1].what] == [True, True]
    with refused("row-unreadable") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert "case a " in caught.value.what
    assert "1 more problem" in caught.value.what
    assert "case c" in caught.value.where


def test_rows_that_a_spreadsheet_left_empty_are_none(tmp_path):
    write_csv(tmp_path)
    path = tmp_path / "cases.csv"
    path.write_text(path.read_text() + ",,,,\n\n")
    assert [case.id for case in read_cases(tmp_path, "here", ABDOMEN)] == ["a", "b", "c"]


def test_a_table_may_say_the_modality(tmp_path):
    write_csv(tmp_path)
    lines = (tmp_path / "cases.csv").read_text().splitlines()
    said = [f"{line},{modality}" for line, modality in zip(lines, ("modality", "CT", "mri", ""), strict=True)]
    (tmp_path / "cases.csv").write_text("\n".join(said) + "\n")
    images = find_layout(tmp_path).images(tmp_path)
    assert {name: image.modality for name, image in images.items()} == {"a": "CT", "b": "MR", "c": ""}
    rewrite(tmp_path, ",mri", ",PET")
    with refused("row-unreadable") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert "case b " in caught.value.what
    assert "'PET'" in caught.value.why


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"case,image,label,annotated\nM\xfcller,a.nii,,\n", "utf-8"),
        (b"case,image\na,a.nii\n", "no column label, annotated"),
    ],
)
def test_a_table_that_cannot_be_read(tmp_path, content, why):
    (tmp_path / "cases.csv").write_bytes(content)
    with refused("table-unreadable") as caught:
        read_cases(tmp_path, "here", ABDOMEN, layout="csv")
    assert why in caught.value.why


def test_a_missing_column_is_named_instead_of_calling_the_folder_unknown(tmp_path):
    write_csv(tmp_path)
    rewrite(tmp_path, "case,image,", "case,img,")
    for place in (tmp_path, tmp_path / "cases.csv"):
        with refused("table-unreadable") as caught:
            read_cases(place, "here", ABDOMEN)
        assert "no column image; it has case, img, label" in caught.value.why


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_separators_are_understood(tmp_path, delimiter):
    write_csv(tmp_path)
    path = tmp_path / "cases.csv"
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)  # quotes "liver=1;spleen=2", as a spreadsheet does
    cases = {case.id: case.annotated for case in read_cases(tmp_path, "here", ABDOMEN)}
    assert cases["a"] == ("liver", "spleen")


def write_masks(folder: Path, annotated: str, label: str = "") -> None:
    for name, ids in (("liver", (1, 0, 1)), ("left", (0, 1))):
        save(folder / "masks" / f"a_{name}.nii.gz", numbered(*ids))
    save(folder / "scans" / "a.nii.gz")
    (folder / "cases.csv").write_text(f"case,image,label,annotated\na,scans/a.nii.gz,{label},{annotated}\n")


def test_a_file_of_its_own_for_every_structure(tmp_path):
    write_masks(tmp_path, "liver=masks/a_liver.nii.gz; kidney_left=masks/a_left.nii.gz")
    (case,) = read_cases(tmp_path, "here", ABDOMEN)
    assert case.annotated == ("kidney_left", "liver")
    assert marks(case, "liver") == [True, False, True, False]
    assert marks(case, "kidney_left") == [False, True, False, False]


def test_a_listed_mask_of_something_unknown_is_no_slip_to_overlook(tmp_path):
    write_masks(tmp_path, "liver=masks/a_liver.nii.gz;lump=masks/a_left.nii.gz")
    with refused("unknown-name"):
        read_cases(tmp_path, "here", ABDOMEN)
    assert "unknown-name" in [f.code for f in doctor(tmp_path).findings]
    (case,) = read_cases(tmp_path, "here", ABDOMEN, rename={"lump": "spleen"})
    assert case.annotated == ("liver", "spleen")


@pytest.mark.parametrize(
    ("annotated", "label"),
    [
        ("liver=masks/a_liver.nii.gz;spleen=2", ""),
        ("liver=masks/a_liver.nii.gz", "masks/a_liver.nii.gz"),
        ("masks/a_liver.nii.gz", ""),
        ("liver=masks/a_liver.nii.gz;liver=masks/a_left.nii.gz", ""),
    ],
    ids=["a file and an id", "files and a label", "no name", "twice"],
)
def test_masks_that_cannot_be_understood(tmp_path, annotated, label):
    write_masks(tmp_path, annotated, label)
    with refused("row-unreadable"):
        read_cases(tmp_path, "here", ABDOMEN)
