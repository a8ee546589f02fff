"""Folders as they are found: with a system's own files, with cases that are there twice, with unknown names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from layout_folders import (
    ABDOMEN,
    HEART,
    WRITERS,
    numbered,
    save,
    write_acdc,
    write_bids,
    write_lits,
    write_msd,
    write_nnunet,
    write_totalsegmentator,
)
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.data.layouts import find_layout, find_problems, read_cases
from panorgan.errors import DataError, PanorganError


@pytest.mark.parametrize("name", WRITERS)
def test_files_that_systems_hide_are_no_cases(tmp_path, name):
    """macOS puts `._x` beside every `x` on foreign discs, and other systems have folders for what was deleted."""
    WRITERS[name](tmp_path / "data")
    layout = find_layout(tmp_path / "data")

    def content() -> tuple[object, ...]:
        folder = tmp_path / "data"
        return layout.images(folder), layout.labels(folder), find_problems(layout, folder)

    before = content()
    paths = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    for path in paths:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    shutil.copytree(tmp_path / "data", tmp_path / "data" / ".Trash")
    assert find_layout(tmp_path / "data").name == name
    assert content() == before
    assert not before[2]


def error_of(code: str, folder: Path, vocabulary: Vocabulary = ABDOMEN) -> PanorganError:
    with refused(code, DataError) as caught:
        read_cases(folder, "here", vocabulary)
    assert caught.value.fix
    return caught.value


def left(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the cases whose scans and whose labels can still be looked at."""
    layout = find_layout(folder)
    return sorted(layout.images(folder)), sorted(layout.labels(folder))


@pytest.mark.parametrize("kind", ["volume", "segmentation"])
def test_lits_with_one_number_in_two_batches(tmp_path, kind):
    write_lits(tmp_path)
    again = save(tmp_path / "Training Batch 2" / f"{kind}-0.nii.gz")
    error = error_of("case-named-twice", tmp_path)
    assert "lits_000" in error.what
    assert str(again) in error.where
    assert "Training Batch 1" in error.where
    assert left(tmp_path) == (["lits_001"], ["lits_001"])


def test_lits_through_links(tmp_path):
    write_lits(tmp_path / "real")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "batch").symlink_to(tmp_path / "real" / "Training Batch 1")
    assert [case.id for case in read_cases(tmp_path / "data", "here", ABDOMEN)] == ["lits_000", "lits_001"]


def test_acdc_with_a_frame_twice(tmp_path):
    write_acdc(tmp_path)
    save(tmp_path / "patient001" / "patient001_frame12_gt.nii")
    assert "patient001_frame12" in error_of("case-named-twice", tmp_path, HEART).what
    others = ["patient001_frame01", "patient002_frame01", "patient002_frame07"]
    assert left(tmp_path) == (others, others)


def test_totalsegmentator_with_ct_and_mri_in_one_folder(tmp_path):
    write_totalsegmentator(tmp_path)
    assert {image.modality for image in find_layout(tmp_path).images(tmp_path).values()} == {"CT"}
    save(tmp_path / "s0002" / "mri.nii.gz")
    error = error_of("case-named-twice", tmp_path)
    assert "s0002" in error.what
    assert "ct.nii.gz" in error.where
    assert "mri.nii.gz" in error.where
    assert left(tmp_path) == (["s0001"], ["s0001"])


def test_bids_with_two_segmentations_of_a_scan(tmp_path):
    write_bids(tmp_path)
    shutil.copytree(tmp_path / "derivatives" / "manual", tmp_path / "derivatives" / "automatic")
    shutil.rmtree(tmp_path / "derivatives" / "automatic" / "sub-02")
    error = error_of("case-named-twice", tmp_path)
    assert "1 more problem" in error.what
    assert error.where.count("automatic") == 2
    assert left(tmp_path) == (["sub-02_ses-1"], ["sub-02_ses-1"])


def test_bids_where_one_scan_is_missing(tmp_path):
    write_bids(tmp_path)
    next(tmp_path.glob("sub-02/**/*_CT.nii.gz")).unlink()
    assert left(tmp_path)[0] == ["sub-01_ses-1", "sub-01_ses-2"]


def test_msd_with_a_case_twice_and_two_ids_of_one_name(tmp_path):
    write_msd(tmp_path)
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    content["labels"]["3"] = "Anterior"
    path.write_text(json.dumps(content))
    assert find_layout(tmp_path).labels(tmp_path)["hippocampus_001"].ids["Anterior"] == (1, 3)
    content["training"].append(content["training"][0])
    path.write_text(json.dumps(content))
    assert "hippocampus_001" in error_of("case-named-twice", tmp_path, Vocabulary(["hippocampus"])).what
    assert left(tmp_path) == (["hippocampus_003"], ["hippocampus_003"])


def test_a_file_for_every_organ_of_a_program_may_have_names_nobody_knows(tmp_path):
    write_totalsegmentator(tmp_path)
    for name in ("vertebrae_C7", "gluteus_maximus_left", "spleeen", "rib_left_3"):
        save(tmp_path / "s0001" / "segmentations" / f"{name}.nii.gz", numbered())
    first, _ = read_cases(tmp_path, "here", Vocabulary(["liver", "spleen"]))
    assert first.annotated == ("liver", "spleen")
    with refused("unknown-name") as caught:
        read_cases(tmp_path, "here", ABDOMEN, rename={"vertebrae_C7": "leber"})
    assert "leber" in caught.value.what
    renamed = read_cases(tmp_path, "here", Vocabulary(["pancreas"]), rename={"vertebrae_C7": "pancreas"})
    assert renamed[0].annotated == ("pancreas",)
    (tmp_path / "s0001" / "segmentations" / "spleen.nii.gz").unlink()
    with refused("not-annotated") as caught:
        read_cases(tmp_path, "here", ABDOMEN, restrict=("spleen",))
    assert "spleen" in caught.value.what


def test_nnunets_ignore_label_is_refused_with_the_reason(tmp_path):
    write_nnunet(tmp_path)
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"labels": content["labels"] | {"ignore": 3}}))
    error = error_of("ignore-label", tmp_path)
    assert error.where == str(path)
    assert len(find_layout(tmp_path).images(tmp_path)) == 2, "the scans are what they are"


def test_the_decathlons_way_to_write_an_ignore_label(tmp_path):
    write_msd(tmp_path)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace('"2": "Posterior"', '"2": "Ignore"'))
    error_of("ignore-label", tmp_path, Vocabulary(["hippocampus"]))


@pytest.mark.parametrize("name", ["nnunet", "msd"])
def test_a_description_that_begins_with_a_byte_order_mark(tmp_path, name):
    WRITERS[name](tmp_path)
    path = tmp_path / "dataset.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert find_layout(tmp_path).name == name
    assert len(find_layout(tmp_path).images(tmp_path)) == 2


def test_errors_of_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    with refused("no-layout"):
        find_layout(tmp_path / "empty")
    with refused("folder-missing"):
        find_layout(tmp_path / "nowhere")
    write_nnunet(tmp_path / "both")
    WRITERS["kits"](tmp_path / "both")
    with refused("several-layouts") as caught:
        find_layout(tmp_path / "both")
    assert "--layout" in caught.value.fix
    WRITERS["nnunet"](tmp_path / "own")
    path = tmp_path / "own" / "dataset.json"
    path.write_text(path.read_text().replace("spleen", "blob"))
    error_of("unknown-name", tmp_path / "own")
    path.write_text(path.read_text().replace("blob", "spleen"))
    (tmp_path / "own" / "labelsTr" / "two.nii.gz").unlink()
    error_of("label-missing", tmp_path / "own")
    shutil.rmtree(tmp_path / "own" / "imagesTr")
    error_of("no-scans", tmp_path / "own")
