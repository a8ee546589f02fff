"""Every layout, written as its own community writes it and read back; and how a folder's layout is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from layout_folders import (
    ABDOMEN,
    HEART,
    SHAPE,
    WRITERS,
    marks,
    save,
    write_acdc,
    write_bids,
    write_csv,
    write_kits,
    write_lits,
    write_msd,
    write_nnunet,
    write_totalsegmentator,
)
from refusing import refused

from panorgan.anatomy import Vocabulary
from panorgan.data.layouts import find_layout, layouts, read_cases


def test_every_layout_has_a_writer_here():
    assert set(layouts()) == set(WRITERS)


@pytest.mark.parametrize("name", WRITERS)
def test_each_folder_is_recognised_as_its_own_layout(tmp_path, name):
    WRITERS[name](tmp_path)
    assert find_layout(tmp_path).name == name
    assert find_layout(tmp_path, name).name == name


def test_nnunet(tmp_path):
    write_nnunet(tmp_path)
    cases = read_cases(tmp_path, "here", ABDOMEN)
    assert [(c.id, c.annotated) for c in cases] == [("one", ("liver", "spleen")), ("two", ("liver", "spleen"))]
    assert marks(cases[0], "spleen") == [False, True, False, False]


def test_msd(tmp_path):
    write_msd(tmp_path)
    cases = read_cases(tmp_path, "here", Vocabulary(["hippocampus_anterior", "hippocampus_posterior"]))
    assert [case.id for case in cases] == ["hippocampus_001", "hippocampus_003"]
    assert marks(cases[0], "hippocampus_anterior") == [True, False, False, False]
    whole = read_cases(tmp_path, "here", Vocabulary(["hippocampus"]))
    assert marks(whole[0], "hippocampus") == [True, True, False, False]


def test_nnunet_v1_stores_a_channel_number_that_it_does_not_list(tmp_path):
    write_msd(tmp_path)
    for path in (tmp_path / "imagesTr").iterdir():
        path.rename(path.with_name(path.name.replace(".nii.gz", "_0000.nii.gz")))
    cases = read_cases(tmp_path, "here", Vocabulary(["hippocampus"]))
    assert cases[0].id == "hippocampus_001"
    assert cases[0].read_image().voxels.shape == SHAPE


def test_kits_masks_are_inclusive_and_test_cases_unlabelled(tmp_path):
    write_kits(tmp_path)
    cases = read_cases(tmp_path, "here", ABDOMEN)
    assert [(c.id, c.annotated) for c in cases] == [
        ("case_00000", ("kidney", "kidney_tumour")),
        ("case_00001", ("kidney", "kidney_tumour")),
        ("case_00210", ()),
    ]
    assert marks(cases[0], "kidney") == [True, True, True, False]
    assert marks(cases[0], "kidney_tumour") == [False, True, False, False]


def test_lits(tmp_path):
    write_lits(tmp_path)
    cases = read_cases(tmp_path, "here", ABDOMEN)
    assert [case.id for case in cases] == ["lits_000", "lits_001"]
    assert marks(cases[0], "liver") == [True, True, False, False]
    assert marks(cases[0], "liver_tumour") == [False, True, False, False]


def test_acdc_keeps_a_patients_frames_together_and_leaves_the_cine_alone(tmp_path):
    write_acdc(tmp_path)
    cases = read_cases(tmp_path, "here", HEART)
    assert [(c.id, c.patient) for c in cases] == [
        ("patient001_frame01", "patient001"),
        ("patient001_frame12", "patient001"),
        ("patient002_frame01", "patient002"),
        ("patient002_frame07", "patient002"),
    ]
    assert [marks(cases[0], organ) for organ in HEART] == [
        [True, False, False, False],
        [False, True, False, False],
        [False, False, True, False],
    ]


def test_totalsegmentator_missing_file_is_unknown_empty_mask_is_absent(tmp_path):
    write_totalsegmentator(tmp_path)
    first, second = read_cases(tmp_path, "here", ABDOMEN)
    assert first.annotated == ("kidney_left", "kidney_right", "liver", "spleen")
    assert second.annotated == ("kidney_right", "liver", "spleen"), "kidney_left has no file: unknown"
    assert not any(marks(first, "spleen")), "empty mask: known to be absent"
    assert marks(first, "kidney_left") == [False, True, False, False]
    union = read_cases(tmp_path, "here", Vocabulary(["liver", "kidney"]), ignore=("kidney_right", "kidney_left"))
    assert union[0].annotated == ("liver",)


def test_totalsegmentator_parts_make_a_union(tmp_path):
    write_totalsegmentator(tmp_path)
    (tmp_path / "s0002" / "segmentations" / "kidney_right.nii.gz").unlink()
    first, second = read_cases(tmp_path, "here", Vocabulary(["liver", "kidney"]))
    assert marks(first, "kidney") == [False, True, True, False]
    assert second.annotated == ("liver",)


def test_bids_sessions_of_a_subject_stay_together(tmp_path):
    write_bids(tmp_path)
    cases = read_cases(tmp_path, "here", ABDOMEN)
    assert [(c.id, c.patient) for c in cases] == [
        ("sub-01_ses-1", "sub-01"),
        ("sub-01_ses-2", "sub-01"),
        ("sub-02_ses-1", "sub-02"),
    ]
    assert cases[0].image.name == "sub-01_ses-1_CT.nii.gz"
    assert marks(cases[0], "spleen") == [False, True, False, False]


def test_bids_the_nearest_table_counts(tmp_path):
    write_bids(tmp_path)
    (own,) = (tmp_path / "derivatives").rglob("sub-02*_dseg.nii.gz")
    own.with_name(own.name.replace(".nii.gz", ".tsv")).write_text("index\tname\n1\tspleen\n2\tliver\n")
    cases = {case.id: case for case in read_cases(tmp_path, "here", ABDOMEN)}
    assert marks(cases["sub-02_ses-1"], "spleen") == [True, False, False, False]
    assert marks(cases["sub-01_ses-1"], "spleen") == [False, True, False, False]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda f: (f / "derivatives" / "manual" / "dseg.tsv").unlink(), "labels-without-names"),
        (
            lambda f: (f / "derivatives" / "manual" / "dseg.tsv").write_text("id\tlabel\n1\tLiver\n"),
            "label-names-unreadable",
        ),
        (lambda f: next(f.glob("sub-02/**/*_CT.nii.gz")).unlink(), "segmentation-without-scan"),
        (lambda f: save(f / "sub-02" / "ses-1" / "anat" / "sub-02_ses-1_T1w.nii.gz"), "several-scans-fit"),
    ],
    ids=["no table", "other columns", "no scan", "two scans"],
)
def test_bids_refusals(tmp_path, damage, code):
    write_bids(tmp_path)
    damage(tmp_path)
    with refused(code) as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert caught.value.fix


def test_to_use_the_kidneys_is_not_to_forget_their_sides(tmp_path):
    write_totalsegmentator(tmp_path)
    shutil.rmtree(tmp_path / "s0002")
    (case,) = read_cases(tmp_path, "here", ABDOMEN, restrict=("kidney",))
    assert case.annotated == ("kidney_left", "kidney_right")


def test_parts_are_united_where_the_vocabulary_or_the_site_says_so(tmp_path):
    write_totalsegmentator(tmp_path)
    shutil.rmtree(tmp_path / "s0002")
    (case,) = read_cases(tmp_path, "here", Vocabulary(["kidney"]), restrict=("kidney",))
    assert case.annotated == ("kidney",)
    assert marks(case, "kidney") == [False, True, True, False]
    both = {"kidney_left": "kidney", "kidney_right": "kidney"}
    (case,) = read_cases(tmp_path, "here", ABDOMEN, restrict=("kidney",), rename=both)
    assert case.annotated == ("kidney",)
    assert marks(case, "kidney") == [False, True, True, False]


def test_csv_knows_per_case_what_is_annotated(tmp_path):
    write_csv(tmp_path)
    cases = {case.id: case for case in read_cases(tmp_path, "here", ABDOMEN)}
    assert cases["a"].annotated == ("liver", "spleen")
    assert cases["b"].annotated == ("kidney",)
    assert cases["c"].annotated == ()
    assert cases["a"].patient == cases["b"].patient == "p1"
    assert marks(cases["b"], "kidney") == [True, True, False, False]
    assert [c.id for c in read_cases(tmp_path / "cases.csv", "here", ABDOMEN)] == ["a", "b", "c"]


def test_names_can_be_given_and_left_out(tmp_path):
    write_nnunet(tmp_path)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace('"liver"', '"Leber"').replace('"spleen"', '"blob"'))
    with refused("unknown-name") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert "labels: {Leber: <organ>}" in caught.value.fix
    assert "ignore: [Leber]" in caught.value.fix
    cases = read_cases(tmp_path, "here", ABDOMEN, rename={"Leber": "liver"}, ignore=("blob",))
    assert cases[0].annotated == ("liver",)
    assert marks(cases[0], "liver") == [True, False, False, False], "an ignored id is still a declared one"


def test_a_folder_that_fits_nothing_or_too_much(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with refused("no-layout") as caught:
        find_layout(empty)
    assert "nnunet" in caught.value.why
    both = tmp_path / "both"
    write_nnunet(both)
    write_kits(both)
    with refused("several-layouts") as caught:
        find_layout(both)
    assert "kits, nnunet" in caught.value.what
    assert len(read_cases(both, "here", ABDOMEN, layout="kits")) == 3


def test_an_unknown_layout(tmp_path):
    with refused("unknown-layout") as caught:
        find_layout(tmp_path, "nnunett")
    assert "nnunet" in caught.value.why


def test_a_mask_on_another_grid(tmp_path):
    write_totalsegmentator(tmp_path)
    save(tmp_path / "s0001" / "segmentations" / "liver.nii.gz", np.zeros((9, 9, 9), np.uint8))
    case = read_cases(tmp_path, "here", ABDOMEN)[0]
    with refused("grid-mismatch"):
        case.read_masks(case.read_image())


DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.skipif(not DATA.is_dir(), reason="the real scans are not here (../shared/data)")
def test_real_folders_read():
    hippocampus = read_cases(
        DATA / "Task04_Hippocampus", "here", Vocabulary(["hippocampus_anterior", "hippocampus_posterior"])
    )
    assert len(hippocampus) == 120
    masks = hippocampus[0].read_masks(hippocampus[0].read_image())
    assert all(mask.sum() > 100 for mask in masks.values())
    heart = read_cases(DATA / "acdc", "here", HEART)
    assert len(heart) == 160
    assert len({case.patient for case in heart}) == 80
    masks = heart[0].read_masks(heart[0].read_image())
    assert masks["heart_left_ventricle"].sum() > 100
