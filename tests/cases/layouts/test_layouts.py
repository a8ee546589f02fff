"""Every layout, written as its own community writes it and read back; and how a folder's layout is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from dicom_files import LIVER, describe, write_segmentation, write_series

from panorgan.anatomy import Vocabulary
from panorgan.cases.case import Case
from panorgan.cases.layouts import find_layout, layouts, read_cases
from panorgan.errors import ConfigError, DataError

SHAPE = (4, 5, 6)
ABDOMEN = Vocabulary(["liver", "liver_tumour", "spleen", "kidney_left", "kidney_right", "kidney_tumour"])
HEART = Vocabulary(["heart_right_ventricle", "heart_myocardium", "heart_left_ventricle"])


def save(path: Path, voxels: np.ndarray | None = None) -> Path:
    """A small scan, or the given voxels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.zeros(SHAPE, np.int16) if voxels is None else voxels
    nib.save(nib.Nifti1Image(image, np.diag([1.0, 2.0, 3.0, 1.0])), path)
    return path


def numbered(*ids: int) -> np.ndarray:
    """A label map whose first voxels hold these ids."""
    voxels = np.zeros(SHAPE, np.uint8)
    voxels.reshape(-1)[: len(ids)] = ids
    return voxels


def marks(case: Case, structure: str) -> list[bool]:
    """The first four voxels of a structure's mask."""
    return case.read_masks(case.read_image())[structure].reshape(-1)[:4].tolist()


def write_nnunet(folder: Path) -> None:
    for name in ("one", "two"):
        save(folder / "imagesTr" / f"{name}_0000.nii.gz")
        save(folder / "labelsTr" / f"{name}.nii.gz", numbered(1, 2))
    content = {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "liver": 1, "spleen": 2},
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(content))


def write_msd(folder: Path) -> None:
    pairs = []
    for name in ("hippocampus_001", "hippocampus_003"):
        save(folder / "imagesTr" / f"{name}.nii.gz")
        save(folder / "labelsTr" / f"{name}.nii.gz", numbered(1, 2))
        pairs.append({"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"})
    content = {
        "name": "Hippocampus",
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "Anterior", "2": "Posterior"},
        "numTraining": 2,
        "training": pairs,
        "test": ["./imagesTs/hippocampus_002.nii.gz"],
    }
    (folder / "dataset.json").write_text(json.dumps(content))


def write_kits(folder: Path) -> None:
    for name in ("case_00000", "case_00001"):
        save(folder / name / "imaging.nii.gz")
        save(folder / name / "segmentation.nii.gz", numbered(1, 2, 3))
    save(folder / "case_00210" / "imaging.nii.gz")  # the challenge's test cases have no segmentation


def write_lits(folder: Path) -> None:
    for number in (0, 1):
        save(folder / "Training Batch 1" / f"volume-{number}.nii")
        save(folder / "Training Batch 1" / f"segmentation-{number}.nii", numbered(1, 2))


def write_acdc(folder: Path) -> None:
    for patient, end_systole in (("patient001", 12), ("patient002", 7)):
        for frame in (1, end_systole):
            save(folder / patient / f"{patient}_frame{frame:02d}.nii.gz")
            save(folder / patient / f"{patient}_frame{frame:02d}_gt.nii.gz", numbered(1, 2, 3))
        save(folder / patient / f"{patient}_4d.nii.gz", np.zeros((*SHAPE, 3), np.int16))
        (folder / patient / "Info.cfg").write_text(f"ED: 1\nES: {end_systole}\n")


def write_totalsegmentator(folder: Path) -> None:
    for name in ("s0001", "s0002"):
        save(folder / name / "ct.nii.gz")
        for organ, place in (("liver", 1), ("kidney_left", 2), ("kidney_right", 3), ("vertebrae_L1", 4), ("spleen", 0)):
            if (name, organ) != ("s0002", "kidney_left"):
                save(
                    folder / name / "segmentations" / f"{organ}.nii.gz",
                    (numbered(1, 2, 3, 4) == place).astype(np.uint8),
                )
    for name in ("s0001", "s0002"):  # an organ that is absent has an empty mask
        save(folder / name / "segmentations" / "spleen.nii.gz", numbered())


def write_bids(folder: Path) -> None:
    (folder / "derivatives" / "manual").mkdir(parents=True)
    (folder / "dataset_description.json").write_text(json.dumps({"Name": "x", "BIDSVersion": "1.9.0"}))
    (folder / "derivatives" / "manual" / "dseg.tsv").write_text("index\tname\n0\tBackground\n1\tLiver\n2\tSpleen\n")
    for subject, session in (("sub-01", "ses-1"), ("sub-01", "ses-2"), ("sub-02", "ses-1")):
        stem, place = f"{subject}_{session}", Path(subject) / session / "anat"
        save(folder / place / f"{stem}_CT.nii.gz")
        save(folder / "derivatives" / "manual" / place / f"{stem}_desc-manual_dseg.nii.gz", numbered(1, 2))


def write_csv(folder: Path) -> None:
    save(folder / "scans" / "a.nii.gz")
    save(folder / "scans" / "b.nii.gz")
    save(folder / "scans" / "c.nii.gz")
    save(folder / "masks" / "a.nii.gz", numbered(1, 2))
    save(folder / "masks" / "b.nii.gz", numbered(4, 5))
    (folder / "cases.csv").write_text(
        "case,image,label,annotated,patient\n"
        "a,scans/a.nii.gz,masks/a.nii.gz,liver=1;Spleen=2,p1\n"
        "b,scans/b.nii.gz,masks/b.nii.gz,\"kidney=4,5\",p1\n"
        "c,scans/c.nii.gz,,,p2\n"
    )  # fmt: skip


def write_dicom(folder: Path) -> None:
    for patient in ("anna", "bert"):
        series = write_series(folder / patient / "ct", np.zeros(SHAPE, np.int16), PatientID=patient)
        write_segmentation(folder / patient / "seg.dcm", series, [numbered(1) == 1], [describe(1, "Liver", LIVER)])


WRITERS: dict[str, Callable[[Path], None]] = {
    "nnunet": write_nnunet,
    "msd": write_msd,
    "kits": write_kits,
    "lits": write_lits,
    "acdc": write_acdc,
    "totalsegmentator": write_totalsegmentator,
    "bids": write_bids,
    "csv": write_csv,
    "dicom": write_dicom,
}


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
    ignore = ("vertebrae_L1",)
    first, second = read_cases(tmp_path, "here", ABDOMEN, ignore=ignore)
    assert first.annotated == ("kidney_left", "kidney_right", "liver", "spleen")
    assert second.annotated == ("kidney_right", "liver", "spleen"), "kidney_left has no file: unknown"
    assert not any(marks(first, "spleen")), "empty mask: known to be absent"
    assert marks(first, "kidney_left") == [False, True, False, False]
    union = read_cases(
        tmp_path, "here", Vocabulary(["liver", "kidney"]), ignore=(*ignore, "kidney_right", "kidney_left")
    )
    assert union[0].annotated == ("liver",)


def test_totalsegmentator_parts_make_a_union(tmp_path):
    write_totalsegmentator(tmp_path)
    (tmp_path / "s0002" / "segmentations" / "kidney_right.nii.gz").unlink()
    first, second = read_cases(tmp_path, "here", Vocabulary(["liver", "kidney"]), ignore=("vertebrae_L1",))
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
    ("damage", "says"),
    [
        (lambda f: (f / "derivatives" / "manual" / "dseg.tsv").unlink(), "no table"),
        (
            lambda f: (f / "derivatives" / "manual" / "dseg.tsv").write_text("id\tlabel\n1\tLiver\n"),
            "cannot be understood",
        ),
        (lambda f: next(f.glob("sub-02/**/*_CT.nii.gz")).unlink(), "belongs to no scan"),
        (lambda f: save(f / "sub-02" / "ses-1" / "anat" / "sub-02_ses-1_T1w.nii.gz"), "belongs to several scans"),
    ],
    ids=["no table", "other columns", "no scan", "two scans"],
)
def test_bids_refusals(tmp_path, damage, says):
    write_bids(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=says) as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert caught.value.fix


def test_a_site_may_unite_the_parts_that_its_folder_keeps_apart(tmp_path):
    write_totalsegmentator(tmp_path)
    shutil.rmtree(tmp_path / "s0002")
    (case,) = read_cases(tmp_path, "here", ABDOMEN, restrict=("kidney",), ignore=("vertebrae_L1",))
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


@pytest.mark.parametrize("written", ["liver", "liver=0", "liver=one", "=1x"])
def test_a_csv_row_that_cannot_be_understood(tmp_path, written):
    write_csv(tmp_path)
    path = tmp_path / "cases.csv"
    path.write_text(path.read_text().replace("liver=1;Spleen=2", written))
    with pytest.raises(DataError, match="row of case a") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert "liver=1" in caught.value.fix


def test_a_csv_with_a_case_twice(tmp_path):
    write_csv(tmp_path)
    path = tmp_path / "cases.csv"
    path.write_text(path.read_text() + "a,scans/a.nii.gz,,,p3\n")
    with pytest.raises(DataError, match="listed twice: a"):
        read_cases(tmp_path, "here", ABDOMEN)


def test_names_can_be_given_and_left_out(tmp_path):
    write_nnunet(tmp_path)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace('"liver"', '"Leber"').replace('"spleen"', '"blob"'))
    with pytest.raises(DataError, match="Leber") as caught:
        read_cases(tmp_path, "here", ABDOMEN)
    assert "labels: {Leber: <organ>}" in caught.value.fix
    assert "ignore: [Leber]" in caught.value.fix
    cases = read_cases(tmp_path, "here", ABDOMEN, rename={"Leber": "liver"}, ignore=("blob",))
    assert cases[0].annotated == ("liver",)
    assert marks(cases[0], "liver") == [True, False, False, False], "an ignored id is still a declared one"


def test_a_folder_that_fits_nothing_or_too_much(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="fits no layout") as caught:
        find_layout(empty)
    assert "nnunet" in caught.value.why
    both = tmp_path / "both"
    write_nnunet(both)
    write_kits(both)
    with pytest.raises(DataError, match="kits, nnunet") as caught:
        find_layout(both)
    assert "layout:" in caught.value.fix
    assert len(read_cases(both, "here", ABDOMEN, layout="kits")) == 3


def test_an_unknown_layout(tmp_path):
    with pytest.raises(ConfigError, match="no layout called 'nnunett'") as caught:
        find_layout(tmp_path, "nnunett")
    assert "nnunet" in caught.value.why


def test_a_mask_on_another_grid(tmp_path):
    write_totalsegmentator(tmp_path)
    save(tmp_path / "s0001" / "segmentations" / "liver.nii.gz", np.zeros((9, 9, 9), np.uint8))
    case = read_cases(tmp_path, "here", ABDOMEN, ignore=("vertebrae_L1",))[0]
    with pytest.raises(DataError, match="another grid"):
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
