"""Scans and labels of ordinary folders, distinguished and paired by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from panorgan.data.file_roles import file_candidate, sort_by_role
from panorgan.data.pairing import Pairing, pair, site_folders

ROOT = Path("/data")


def paired(*names: str, labels: tuple[str, ...] = ()) -> Pairing:
    """Pair files of these names; `labels` are those whose content is a label map, where names do not say it."""
    candidates = [file_candidate(ROOT / name, ROOT) for name in sorted(names)]
    return pair(*sort_by_role(candidates, lambda path: str(path.relative_to(ROOT)) in labels))


def found(pairing: Pairing) -> dict[str, tuple[str, dict[str, str]]]:
    """Scan and labels by case, below the root."""
    return {
        case.name: (
            str(case.image.path.relative_to(ROOT)),
            {name: str(path.relative_to(ROOT)) for name, path in case.labels.items()},
        )
        for case in pairing.cases
    }


ONE_MAP = {
    "suffix": (["a1.nii.gz", "a1_seg.nii.gz"], "a1"),
    "hyphen": (["a1.nii.gz", "a1-label.nii.gz"], "a1"),
    "both say what they are": (["a1-ct.nii.gz", "a1-mask.nii.gz"], "a1"),
    "prefix": (["img_a1.nrrd", "gt_a1.nrrd"], "img_a1"),
    "folder per patient": (["P_1/ct.nii.gz", "P_1/label.nii.gz"], "P_1"),
    "two folders": (["scans/a1.nii.gz", "masks/a1.nii.gz"], "a1"),
    "related names": (["imgs/img0001.mha", "lbl/label1.mha"], "img0001"),
    "folders within a patient": (["P_1/ct/vol.nii.gz", "P_1/seg/seg.nii.gz"], "P_1"),
    "more in the scan's name": (["a1_20200101.nii.gz", "a1_mask.nii.gz"], "a1_20200101"),
    "more in the label's name": (["a1.nii.gz", "a1_final_v2_seg.nii.gz"], "a1"),
    "another name beside it": (["P_1/portal.nii.gz", "P_1/drawn_seg.nii.gz"], "P_1_portal"),
    "numbers alone agree": (["volume-1.mha", "tumour_case_gt_1.mha"], "volume-1"),
    "a single pair": (["scan.nii.gz", "labels.nii.gz"], "case"),
    "nnU-Net": (["imagesTr/liver_1_0000.nii.gz", "labelsTr/liver_1.nii.gz"], "liver_1"),
    "numbers like channels": (["a_0000.nii.gz", "a_0000_seg.nii.gz"], "a_0000"),
}


@pytest.mark.parametrize(("names", "case"), ONE_MAP.values(), ids=ONE_MAP)
def test_a_scan_and_its_label_map(names, case):
    # Another case, whose name holds the first one's.
    others = [name.replace("1", "12") for name in names] if "1" in names[0] else []
    pairing = paired(*names, *others)
    assert found(pairing)[case] == (names[0], {"": names[1]})
    assert len(pairing.cases) == (2 if others else 1)
    assert (pairing.unlabelled, pairing.orphans, pairing.unclear) == ((), (), ())


@pytest.mark.parametrize(
    "names",
    [
        ["P1/ct.nii.gz", "P1/masks/liver.nii.gz", "P1/masks/left_kidney.nii.gz"],
        ["P1.nii.gz", "P1_liver.nii.gz", "P1_left-kidney.nii.gz"],
        ["scans/P1.nii.gz", "liver/P1.nii.gz", "left_kidney/P1.nii.gz"],
        ["P1/img.nii.gz", "P1/P1_mask_liver.nii.gz", "P1/P1_mask_left_kidney.nii.gz"],
        ["P1/img_2020.nii.gz", "P1/Liver.nii.gz", "P1/left kidney.nii.gz"],
    ],
)
def test_a_mask_per_organ(names):
    pairing = paired(*names, labels=tuple(names[1:]))
    ((_, labels),) = found(pairing).values()
    assert labels == {"liver": names[1], "left_kidney": names[2]}
    assert pairing.unlabelled == ()


def test_an_organ_in_every_name_is_the_case_and_no_mask():
    names = ["liver_0.nii.gz", "liver_0_seg.nii.gz", "liver_1.nii.gz", "liver_1_seg.nii.gz"]
    assert list(found(paired(*names))) == ["liver_0", "liver_1"]


def test_a_scan_that_is_named_after_an_organ_is_recognised_by_its_content():
    pairing = paired("0_liver.nii.gz", "0_liver_seg.nii.gz")
    assert found(pairing) == {"0_liver": ("0_liver.nii.gz", {"": "0_liver_seg.nii.gz"})}


def test_names_that_say_nothing_are_decided_by_content():
    names = [f"{folder}/{n}.nii.gz" for folder in "ab" for n in (1, 2)]
    pairing = paired(*names, labels=("b/1.nii.gz", "b/2.nii.gz"))
    assert found(pairing)["a_1"] == ("a/1.nii.gz", {"": "b/1.nii.gz"})
    assert {case.image.patient for case in pairing.cases} == {"a_1", "a_2"}  # one folder for all is no patient


def test_one_file_of_a_kind_is_looked_at():
    seen: list[Path] = []
    candidates = [file_candidate(ROOT / f"{n:03d}.nii.gz", ROOT) for n in range(50)]
    sort_by_role(candidates, lambda path: bool(seen.append(path)))
    assert len(seen) == 1


def test_several_scans_that_fit_are_not_chosen_from():
    pairing = paired("B1/B1_t1.nii.gz", "B1/B1_t2.nii.gz", "B1/B1_seg.nii.gz")
    assert pairing.cases == ()
    ((_, paths),) = pairing.unclear
    assert [path.name for path in paths] == ["B1_t1.nii.gz", "B1_t2.nii.gz"]
    assert pairing.unlabelled == ()


def test_a_label_that_is_there_twice_is_not_chosen_from():
    pairing = paired("a1.nii.gz", "a1_seg.nii.gz", "old/a1_seg.nii.gz")
    assert pairing.cases == ()
    ((case, paths),) = pairing.unclear
    assert case == "a1"
    assert [path.parent.name for path in paths] == ["data", "old"]


def test_what_has_no_counterpart_is_told():
    pairing = paired("a1.nii.gz", "a1_seg.nii.gz", "a2.nii.gz", "b7_seg.nii.gz")
    assert list(found(pairing)) == ["a1"]
    assert [path.name for path in pairing.unlabelled] == ["a2.nii.gz"]
    assert [path.name for path in pairing.orphans] == ["b7_seg.nii.gz"]


def test_folders_of_few_scans_are_patients():
    visits = [f"anna_{p}/{v}_{kind}.nii.gz" for p in (1, 2) for v in ("first", "second") for kind in ("ct", "seg")]
    pairing = paired(*visits)
    assert [case.image.patient for case in pairing.cases] == ["anna_1", "anna_1", "anna_2", "anna_2"]
    assert pairing.by_folder
    batches = [f"batch{b}/p{n}{kind}.nii.gz" for b in (1, 2) for n in range(6) for kind in ("", "_seg")]
    pairing = paired(*batches)
    assert len({case.image.patient for case in pairing.cases}) == 12
    assert not pairing.by_folder


def test_folders_that_look_like_sites():
    def of(*folders: str) -> tuple[str, ...]:
        names = [f"{folder}/p{n}{kind}.nii.gz" for folder in folders for n in (1, 2) for kind in ("", "_seg")]
        return site_folders(paired(*names), ROOT)

    assert of("north", "south") == ("north", "south")
    assert of("visit_1", "visit_2") == ()
    assert of("only") == ()
    assert site_folders(paired("scans/a1.nii.gz", "masks/a1.nii.gz"), ROOT) == ()
