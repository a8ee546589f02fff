"""A folder that fits no layout: what lies there, which layout is near, and what it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from layout_folders import WRITERS, numbered, save
from refusing import refused

from panorgan.data.folder_contents import list_contents
from panorgan.data.layouts import find_layout
from panorgan.errors import PanorganError


def refusal(folder: Path) -> PanorganError:
    with refused("no-layout") as caught:
        find_layout(folder)
    return caught.value


def test_files_are_counted_by_kind_with_an_example(tmp_path):
    for number in range(3):
        save(tmp_path / "a" / f"pat{number}.nii.gz")
    (tmp_path / "a" / "view.png").write_bytes(b"")
    (tmp_path / "notes").write_text("x")
    (tmp_path / ".hidden.png").write_bytes(b"")
    contents = list_contents(tmp_path)
    assert {kind: len(paths) for kind, paths in contents.files.items()} == {"NIfTI": 3, "picture": 1, "other": 1}
    assert [path.name for path in contents.volumes] == ["pat0.nii.gz", "pat1.nii.gz", "pat2.nii.gz"]
    error = refusal(tmp_path)
    assert "3 NIfTI files (such as a/pat0.nii.gz)" in error.why
    assert "1 picture file (such as a/view.png)" in error.why
    assert f"panorgan init {tmp_path}" in error.fix


def test_an_empty_folder_is_not_worth_a_draft(tmp_path):
    error = refusal(tmp_path)
    assert "no files" in error.why
    assert "init" not in error.fix


@pytest.mark.parametrize(
    ("layout", "spoil", "lacks"),
    [
        ("nnunet", lambda f: (f / "dataset.json").unlink(), "dataset.json"),
        ("nnunet", lambda f: [(f / "dataset.json").unlink(), shutil.rmtree(f / "labelsTr")], "labelsTr"),
        ("bids", lambda f: (f / "dataset_description.json").unlink(), "dataset_description.json"),
        ("totalsegmentator", lambda f: [p.rename(p.with_name("scan.nii.gz")) for p in f.glob("*/ct.nii.gz")], "ct.nii"),
        ("totalsegmentator", lambda f: [shutil.rmtree(p) for p in f.glob("*/segmentations")], "segmentations"),
        ("kits", lambda f: [p.rename(f / f"p{n}") for n, p in enumerate(sorted(f.iterdir()))], "case_00000"),
        ("kits", lambda f: [p.rename(p.with_name("img.nii.gz")) for p in f.glob("*/imaging*")], "imaging.nii.gz"),
        ("lits", lambda f: [p.rename(p.with_name(p.name.replace("-", "_"))) for p in f.glob("*/*")], "volume-0"),
        ("acdc", lambda f: [p.rename(p.with_name(p.name.replace("_frame", "-"))) for p in f.glob("*/*frame*")], "_gt"),
        ("csv", lambda f: (f / "cases.csv").rename(f / "list.csv"), "list.csv"),
    ],
)
def test_the_nearest_layout_and_what_it_lacks(tmp_path, layout, spoil, lacks):
    WRITERS[layout](tmp_path)
    assert find_layout(tmp_path).name == layout
    spoil(tmp_path)
    why = refusal(tmp_path).why
    assert f"nearest is {layout} " in why
    assert lacks in why.split("nearest is")[1]


def test_sites_within_a_folder_are_named(tmp_path):
    WRITERS["nnunet"](tmp_path / "north")
    WRITERS["acdc"](tmp_path / "south")
    save(tmp_path / "east" / "a.nii.gz", numbered(1))
    why = refusal(tmp_path).why
    assert "north (nnunet), south (acdc)" in why


def test_a_file_that_is_no_table(tmp_path):
    (tmp_path / "list.txt").write_text("a,b\n")
    error = refusal(tmp_path / "list.txt")
    assert "init" not in error.fix


def test_a_folder_with_an_experiment_file_names_it(tmp_path):
    (tmp_path / "notes.yaml").write_text("sites: {}\n")
    with refused("no-layout") as plain:
        find_layout(tmp_path)
    (tmp_path / "experiment.yaml").write_text("name: a\nvocabulary: [liver]\n")
    with refused("no-layout") as caught:
        find_layout(tmp_path)
    assert str(tmp_path / "experiment.yaml") in caught.value.fix
    assert "notes.yaml" not in plain.value.fix
