"""Organs by anatomy: right where it is sure, and silent otherwise."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ordinary_folders import IDS, ORGANS, make_patients, suffix

from panorgan.data.layouts.base import FoundImage, FoundLabelMap
from panorgan.data_doctor.guess_organs import Look, Shape, guess_organs
from panorgan.workflows.label_files import look_at_case, read_label_file

DATA = Path(__file__).parents[3] / "shared" / "data"
REAL = pytest.mark.skipif(not DATA.is_dir(), reason="the real scans are not here (../shared/data)")


def look(scan: Path, label: Path) -> Look:
    ids = {f"label_{i}": (i,) for i in read_label_file(label).volumes}
    seen = look_at_case(FoundImage(scan, "p"), FoundLabelMap(label, ids))
    assert not isinstance(seen, str), seen
    return seen[0]


def organs(looks: list[Look]) -> dict[str, str]:
    return {name: guess.organ for name, guess in guess_organs(looks).items()}


def subsets(of: Look, most: int = 99) -> list[Look]:
    """What one would see if only some of the labels were drawn."""
    names = [c for n in range(1, most + 1) for c in itertools.combinations(of.shapes, n)]
    return [replace(of, shapes={name: of.shapes[name] for name in own}) for own in names]


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory) -> list[Look]:
    folder = tmp_path_factory.mktemp("guess")
    suffix(folder / "site", make_patients(folder / "phantom", 3), ORGANS)
    scans = [path for path in sorted((folder / "site").iterdir()) if "_seg" not in path.name]
    return [look(scan, scan.with_name(scan.name.replace(".nii", "_seg.nii"))) for scan in scans]


def test_large_organs_of_an_abdomen_whatever_their_numbers(phantoms):
    wanted = {f"label_{IDS[o]}": o for o in ("liver", "spleen", "kidney_left", "kidney_right")}
    assert organs(phantoms) == wanted  # and no word about the pancreas


def test_fewer_labels_give_fewer_guesses_and_never_wrong_ones(phantoms):
    truth = {f"label_{number}": organ for organ, number in IDS.items()}
    guessed = [(name, organ) for one in phantoms for some in subsets(one) for name, organ in organs([some]).items()]
    assert [pair for pair in guessed if truth[pair[0]] != pair[1]] == []
    assert len(guessed) > 50


def test_a_spleen_alone_looks_like_a_kidney_and_is_not_guessed(phantoms):
    alone = [replace(one, shapes={"x": one.shapes[f"label_{IDS['spleen']}"]}) for one in phantoms]
    assert organs(alone) == {}


def test_a_mirrored_header_gives_no_liver_on_the_left(phantoms):
    mirrored = [
        replace(one, shapes={name: replace(s, side=-s.side) for name, s in one.shapes.items()}) for one in phantoms
    ]
    assert "liver" not in organs(mirrored).values()


def test_without_the_whole_body_there_are_no_sides(phantoms):
    nan = float("nan")
    cropped = [
        replace(one, shapes={name: replace(s, side=nan, depth=nan) for name, s in one.shapes.items()}, width_mm=nan)
        for one in phantoms
    ]
    assert organs(cropped) == {}


LUNG = Shape(2500, 0.2, 0.0, 0, (120, 180, 250), 1, 1.0, -850)


def test_lungs_are_full_of_air():
    left, right = replace(LUNG, side=-0.2), LUNG
    assert organs([Look("CT", {"a": left, "b": right}, 350)]) == {"a": "lung_left", "b": "lung_right"}
    both = replace(LUNG, side=0.01, size_mm=(280, 180, 250), pieces=2, largest_piece=0.55)
    assert organs([Look("CT", {"a": both}, 350)]) == {"a": "lung"}
    assert organs([Look("CT", {"a": right}, 350)]) == {}
    assert organs([Look("MR", {"a": left, "b": right}, 350, 30)]) == {}


KIDNEY = Shape(180, 0.18, -0.12, 0, (65, 60, 110), 1, 1.0, 100)


@pytest.mark.parametrize(
    ("change", "pair"),
    [
        ({}, True),
        ({"volume_ml": 30}, False),
        ({"size_mm": (90, 95, 290)}, False),  # a muscle of the back
        ({"height_mm": 60.0}, False),  # a spleen
        ({"depth": 0.2}, False),
        ({"cut": True}, False),
        ({"side": -0.45}, False),
        ({"size_mm": (100, 70, 105)}, False),
        ({"median": 600.0}, False),  # bone
    ],
)
def test_kidneys_mirror_each_other(change, pair):
    left = replace(KIDNEY, **{"side": -0.18, **change})
    found = organs([Look("CT", {"a": left, "b": KIDNEY}, 350)])
    assert found == ({"a": "kidney_left", "b": "kidney_right"} if pair else {})


def test_both_kidneys_in_one_label():
    both = Shape(350, 0.01, -0.12, 0, (180, 65, 130), 2, 0.52, 120)
    assert organs([Look("CT", {"a": both}, 350)]) == {"a": "kidney"}
    assert organs([Look("CT", {"a": replace(both, size_mm=(180, 65, 300))}, 350)]) == {}


def test_cases_must_agree(phantoms):
    other = {"label_3": "label_7", "label_7": "label_3"}
    exchanged = [replace(one, shapes={other.get(n, n): s for n, s in one.shapes.items()}) for one in phantoms]
    found = organs([phantoms[0], phantoms[1], exchanged[2]])
    assert {"label_3", "label_7"} & found.keys() == set()
    assert found["label_1"] == "kidney_left"


@REAL
@pytest.mark.slow
def test_real_abdomens_are_named_right_or_not_at_all():
    truth = {"label_1": "liver", "label_2": "kidney_right", "label_3": "kidney_left", "label_4": "spleen"}
    scans = sorted((DATA / "chaos_mr" / "imagesTr").glob("*.nii.gz"))[::3]
    looks = [look(scan, scan.parents[1] / "labelsTr" / scan.name) for scan in scans]
    assert organs(looks) == truth
    guessed = [pair for one in looks for some in subsets(one) for pair in organs([some]).items()]
    assert [pair for pair in guessed if truth[pair[0]] != pair[1]] == []
    assert len(guessed) > 50


@REAL
@pytest.mark.slow
def test_a_ct_with_many_structures_gives_four_guesses_and_no_wrong_one():
    folder = DATA / "totalsegmentator_examples"
    one = look(folder / "example_ct.nii.gz", folder / "example_seg_fast_force_split.nii.gz")
    truth = {"label_1": "spleen", "label_2": "kidney_right", "label_3": "kidney_left", "label_5": "liver"}
    assert organs([one]) == truth
    assert len(one.shapes) > 50
    wrong = [pair for some in subsets(one, 2) for pair in organs([some]).items() if truth.get(pair[0]) != pair[1]]
    assert wrong == []


@REAL
@pytest.mark.slow
def test_hearts_are_known_by_the_ring_and_halves_of_a_hippocampus_are_not():
    hearts = [look(Path(str(t).replace("_gt", "")), t) for t in sorted((DATA / "acdc").glob("*/*_gt.nii.gz"))[:12]]
    assert organs(hearts) == {
        "label_1": "heart_right_ventricle",
        "label_2": "heart_myocardium",
        "label_3": "heart_left_ventricle",
    }
    place = DATA / "Task04_Hippocampus"
    halves = [look(scan, place / "labelsTr" / scan.name) for scan in sorted((place / "imagesTr").glob("h*.gz"))[:5]]
    assert np.array([len(one.shapes) for one in halves]).min() == 2
    assert organs(halves) == {}
