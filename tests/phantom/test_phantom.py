"""The phantom: geometry, contents, files on disk."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from refusing import refused

from panorgan.anatomy import find_organ
from panorgan.errors import ConfigError
from panorgan.phantom import (
    PhantomCase,
    PhantomConfig,
    PhantomSite,
    drawable,
    generate_case,
    site_folders,
    withheld_folder,
    write_federation,
)
from panorgan.phantom.config import ORGANS, TUMOURS

COARSE = (8.0, 8.0, 8.0)
# Volumes in ml that no adult with these organs leaves, with room for a coarse grid and a cropped view.
PLAUSIBLE_ML = {
    "liver": (800, 2400),
    "spleen": (50, 450),
    "kidney_left": (60, 320),
    "kidney_right": (50, 320),
    "pancreas": (25, 160),
    "gallbladder": (6, 90),
    "stomach": (120, 900),
    "duodenum": (15, 150),
    "aorta": (30, 220),
    "inferior_vena_cava": (40, 220),
    "portal_and_splenic_vein": (1, 40),
    "oesophagus": (1, 40),
    "colon": (150, 1100),
    "lung_left": (50, 1800),
    "lung_right": (50, 1800),
}


def small_config(**changes: object) -> PhantomConfig:
    """Three tiny sites: disjoint labels, a union, and an external one."""
    settings: dict[str, object] = {
        "organs": ("liver", "spleen", "kidney_left", "kidney_right"),
        "sites": (
            PhantomSite(name="a", annotated=("liver",), cases=2, spacing_mm=COARSE, orientation="RAS"),
            PhantomSite(name="b", annotated=("kidney", "spleen"), cases=1, spacing_mm=COARSE, orientation="PIR"),
            PhantomSite(name="x", cases=1, external=True, spacing_mm=COARSE),
        ),
    }
    return PhantomConfig(**(settings | changes))  # type: ignore[arg-type]


def centre_mm(case: PhantomCase, organ: str) -> np.ndarray:
    """Centre of mass of a mask in RAS+ mm."""
    return case.affine[:3, :3] @ np.argwhere(case.masks[organ]).mean(axis=0) + case.affine[:3, 3]


def test_same_seed_site_and_index_give_the_same_case_whatever_the_other_sites() -> None:
    config = small_config()
    alone = small_config(sites=(config.sites[1],))
    first, second = generate_case(config, config.sites[1], 0), generate_case(alone, config.sites[1], 0)
    np.testing.assert_array_equal(first.hu, second.hu)
    assert all((first.masks[name] == second.masks[name]).all() for name in first.masks)


@pytest.mark.parametrize("other", ["seed", "site", "index"])
def test_another_seed_site_or_index_gives_another_patient(other: str) -> None:
    config = small_config()
    site = config.sites[0]
    changed = small_config(seed=1) if other == "seed" else config
    renamed = site.model_copy(update={"name": "c"}) if other == "site" else site
    first = generate_case(config, site, 0)
    second = generate_case(changed, renamed, 2 if other == "index" else 0)
    differ = (first.masks["liver"] != second.masks["liver"]).mean() / first.masks["liver"].mean()
    assert differ > 0.1


def test_the_vocabulary_does_not_change_the_image() -> None:
    config = small_config()
    wider = small_config(organs=ORGANS)
    np.testing.assert_array_equal(
        generate_case(config, config.sites[0], 1).hu, generate_case(wider, config.sites[0], 1).hu
    )


@pytest.mark.parametrize("site", PhantomConfig().sites, ids=lambda site: site.name)
def test_default_sites_place_every_organ_where_it_belongs(site: PhantomSite) -> None:
    case = generate_case(PhantomConfig(organs=ORGANS), site, 1)
    assert "".join(nib.aff2axcodes(case.affine)) == site.orientation
    assert set(case.masks) == set(ORGANS)
    voxel_ml = abs(np.linalg.det(case.affine[:3, :3])) / 1000
    for organ, (low, high) in PLAUSIBLE_ML.items():
        assert low < case.masks[organ].sum() * voxel_ml < high, organ
    for one, other in combinations(ORGANS, 2):
        assert not (case.masks[one] & case.masks[other]).any(), (one, other)
    centre = {organ: centre_mm(case, organ) for organ in ORGANS}
    right, front, up = 0, 1, 2
    assert centre["liver"][right] > centre["aorta"][right] > centre["spleen"][right]
    assert centre["kidney_right"][right] > 30 > -30 > centre["kidney_left"][right]
    assert centre["inferior_vena_cava"][right] > centre["aorta"][right]
    assert centre["stomach"][front] > centre["aorta"][front] > centre["kidney_left"][front]
    assert min(centre["lung_left"][up], centre["lung_right"][up]) > centre["liver"][up]


def test_left_kidneys_are_higher_on_average() -> None:
    config = small_config()
    cases = [generate_case(config, config.sites[0], index) for index in range(6)]
    steps = [centre_mm(case, "kidney_left")[2] - centre_mm(case, "kidney_right")[2] for case in cases]
    assert 5 < np.mean(steps) < 35


def test_bone_lies_behind_and_air_around() -> None:
    case = generate_case(small_config(), small_config().sites[0], 0)
    bone = case.affine[:3, :3] @ np.argwhere(case.hu > 350).mean(axis=0) + case.affine[:3, 3]
    assert bone[1] < centre_mm(case, "liver")[1] - 10
    assert case.hu.dtype == np.int16
    assert np.median(case.hu[:, 0, :]) < -900
    assert np.median(case.hu[:, -1, :]) < -900


@pytest.mark.parametrize(
    ("phase", "aorta", "spleen", "kidney"),
    [
        ("native", (10, 55), (20, 60), (10, 45)),
        ("arterial", (200, 360), (80, 130), (100, 190)),
        ("portal", (95, 190), (80, 140), (105, 190)),
    ],
)
def test_contrast_follows_the_phase(
    phase: str, aorta: tuple[int, int], spleen: tuple[int, int], kidney: tuple[int, int]
) -> None:
    organs = ("liver", "spleen", "kidney_left", "aorta", "lung_right")
    site = PhantomSite(name="s", annotated=("liver",), phases=(phase,), noise_hu=8, spacing_mm=(5, 5, 6))  # type: ignore[arg-type]
    case = generate_case(PhantomConfig(organs=organs, sites=(site,)), site, 0)
    median = {name: float(np.median(case.hu[mask])) for name, mask in case.masks.items()}
    for organ, (low, high) in {"aorta": aorta, "spleen": spleen, "kidney_left": kidney}.items():
        assert low < median[organ] < high, (organ, median)
    assert 30 < median["liver"] < 130
    assert -900 < median["lung_right"] < -650


def test_phases_take_turns() -> None:
    site = PhantomSite(name="s", annotated=("aorta",), phases=("native", "arterial"), spacing_mm=COARSE)
    config = PhantomConfig(organs=("aorta",), sites=(site,))
    cases = [generate_case(config, site, index) for index in range(4)]
    bright = [float(np.median(case.hu[case.masks["aorta"]])) > 120 for case in cases]
    assert bright == [False, True, False, True]


def test_noise_grows_with_the_setting() -> None:
    site = PhantomSite(name="s", annotated=("liver",), spacing_mm=COARSE, noise_hu=0)
    loud = site.model_copy(update={"noise_hu": 30.0})
    config = small_config()
    quiet, noisy = generate_case(config, site, 0), generate_case(config, loud, 0)
    np.testing.assert_array_equal(quiet.masks["liver"], noisy.masks["liver"])
    added = (noisy.hu.astype(float) - quiet.hu)[quiet.masks["liver"]].std()
    assert 20 < added < 45


def test_round_view_pads_the_corners() -> None:
    site = PhantomSite(name="s", annotated=("liver",), spacing_mm=COARSE, round_view_mm=300)
    case = generate_case(small_config(), site, 0)
    assert (case.hu[0, 0] == -1024).all()
    assert (case.hu[case.hu.shape[0] // 2, case.hu.shape[1] // 2] > -1024).all()


def test_tumours_lie_inside_their_organs_and_are_darker() -> None:
    site = PhantomSite(name="s", annotated=("liver", "liver_tumour"), spacing_mm=(5, 5, 5), noise_hu=5)
    config = PhantomConfig(organs=(*ORGANS, *TUMOURS), sites=(site,), tumours=True)
    for index in range(2):
        case = generate_case(config, site, index)
        kidneys = case.masks["kidney_left"] | case.masks["kidney_right"]
        hosts = {"liver": case.masks["liver"], "kidney": kidneys, "pancreas": case.masks["pancreas"]}
        for organ, host in hosts.items():
            tumour = case.masks[f"{organ}_tumour"]
            assert tumour.sum() >= 5
            assert not (tumour & ~host).any()
            assert np.median(case.hu[tumour]) < np.median(case.hu[host & ~tumour]) - 5, organ


def test_tumours_leave_the_rest_of_the_patient_alone() -> None:
    config, ill = (
        small_config(organs=("aorta", "lung_left")),
        small_config(organs=("aorta", "lung_left"), tumours=True),
    )
    healthy, sick = generate_case(config, config.sites[0], 0), generate_case(ill, config.sites[0], 0)
    assert (healthy.hu != sick.hu).any()
    for organ in ("aorta", "lung_left"):
        np.testing.assert_array_equal(healthy.masks[organ], sick.masks[organ])


def test_union_is_the_sum_of_its_parts() -> None:
    config = small_config()
    case = generate_case(config, config.sites[1], 0)
    both = case.masks["kidney_left"] | case.masks["kidney_right"]
    np.testing.assert_array_equal(case.masks["kidney"], both)


def test_every_drawable_name_is_canonical() -> None:
    for name, parts in drawable().items():
        assert [find_organ(part).name for part in (name, *parts)] == [name, *parts]
    assert drawable()["kidney"] == ("kidney_left", "kidney_right")


def test_aliases_become_canonical_names() -> None:
    assert PhantomSite(name="s", annotated=("Esophagus",)).annotated == ("oesophagus",)


def test_an_organ_it_cannot_draw_is_refused_with_the_list() -> None:
    with refused("not-drawable") as caught:
        PhantomConfig(organs=("livver",))
    assert "liver, spleen" in caught.value.fix
    assert "'liver'" in caught.value.why


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"annotated": ("kidney", "kidney_left")}, "union-with-part"),
        ({"annotated": ("liver", "liver")}, "organ-twice"),
        ({"annotated": ()}, "nothing-annotated"),
        ({"orientation": "RLS"}, "bad-orientation"),
        ({"spacing_mm": (4, 0, 4)}, "size-not-positive"),
    ],
)
def test_bad_site_settings_are_refused(changes: dict[str, object], code: str) -> None:
    with refused(code, ConfigError):
        PhantomSite(**({"name": "s", "annotated": ("liver",)} | changes))  # type: ignore[arg-type]


def test_two_sites_of_one_name_are_refused() -> None:
    site = PhantomSite(name="s", annotated=("liver",))
    with refused("site-name-twice", ConfigError):
        PhantomConfig(organs=("liver",), sites=(site, site))


def test_labelled_tumours_need_tumours() -> None:
    with refused("tumours-off") as caught:
        PhantomConfig(organs=("liver", "liver_tumour"))
    assert "tumours: true" in caught.value.fix


def read(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)  # type: ignore[attr-defined]


def test_files_agree_with_the_masks_and_hold_only_own_labels(tmp_path: Path) -> None:
    config, heard = small_config(), []
    folder = tmp_path / "phantoms"
    sites = write_federation(config, folder, on_case=lambda *event: heard.append(event))
    assert heard == [("a_000", 1, 4), ("a_001", 2, 4), ("b_000", 3, 4), ("x_000", 4, 4)]
    assert [path.name for path in sites.values()] == ["Dataset011_a", "Dataset012_b", "Dataset013_x"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["phantoms"]
    case = generate_case(config, config.sites[1], 0)
    image = nib.load(sites["b"] / "imagesTr" / "b_000_0000.nii.gz")
    np.testing.assert_array_equal(np.asarray(image.dataobj), case.hu)  # type: ignore[attr-defined]
    np.testing.assert_allclose(image.affine, case.affine, atol=1e-4)  # type: ignore[attr-defined]
    assert json.loads((sites["b"] / "dataset.json").read_text()) == {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "kidney": 1, "spleen": 2},
        "numTraining": 1,
        "file_ending": ".nii.gz",
    }
    labels = read(sites["b"] / "labelsTr" / "b_000.nii.gz")
    np.testing.assert_array_equal(labels == 1, case.masks["kidney"])
    np.testing.assert_array_equal(labels == 2, case.masks["spleen"])
    assert set(np.unique(labels)) == {0, 1, 2}
    hidden = withheld_folder(folder, "b")
    ids = json.loads((hidden / "dataset.json").read_text())["labels"]
    full = read(hidden / "labelsTr" / "b_000.nii.gz")
    assert list(ids) == ["background", *config.organs]
    for organ in config.organs:
        np.testing.assert_array_equal(full == ids[organ], case.masks[organ])


def test_the_external_site_has_images_and_only_withheld_labels(tmp_path: Path) -> None:
    config = small_config()
    sites = write_federation(config, tmp_path / "phantoms")
    assert (sites["x"] / "imagesTr" / "x_000_0000.nii.gz").is_file()
    assert not (sites["x"] / "labelsTr").exists()
    assert json.loads((sites["x"] / "dataset.json").read_text())["labels"] == {"background": 0}
    full = read(withheld_folder(tmp_path / "phantoms", "x") / "labelsTr" / "x_000.nii.gz")
    assert set(np.unique(full)) == {0, 1, 2, 3, 4}


def test_tumour_ids_are_painted_over_their_organ(tmp_path: Path) -> None:
    site = PhantomSite(name="t", annotated=("liver_tumour", "liver"), cases=1, spacing_mm=COARSE)
    config = PhantomConfig(organs=("liver", "liver_tumour"), sites=(site,), tumours=True)
    path = write_federation(config, tmp_path / "phantoms")["t"]
    assert json.loads((path / "dataset.json").read_text())["labels"] == {
        "background": 0,
        "liver": 1,
        "liver_tumour": 2,
    }
    case, labels = generate_case(config, site, 0), read(path / "labelsTr" / "t_000.nii.gz")
    np.testing.assert_array_equal(labels == 2, case.masks["liver_tumour"])
    np.testing.assert_array_equal(labels > 0, case.masks["liver"])


def test_an_equal_folder_is_reused_and_another_config_is_refused(tmp_path: Path) -> None:
    config, folder = small_config(), tmp_path / "phantoms"
    write_federation(config, folder)
    heard: list[tuple[str, int, int]] = []
    again = write_federation(config, folder, on_case=lambda *event: heard.append(event))
    assert heard == []
    assert again == site_folders(config, folder)
    with refused("phantom-of-other-config") as caught:
        write_federation(small_config(seed=3), folder)
    assert "seed" in caught.value.why


@pytest.mark.parametrize("what", ["phantom.json", "dataset.json", "*_0000.nii.gz"])
def test_a_damaged_federation_is_refused_or_made_again(tmp_path: Path, what: str) -> None:
    config, folder = small_config(), tmp_path / "phantoms"
    write_federation(config, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    damaged = next(iter(sorted(folder.rglob(what))))
    damaged.write_bytes(before[damaged][:-9] + b"\0" + before[damaged][-8:])
    with refused("phantom-damaged") as caught:
        write_federation(config, folder)
    assert str(damaged) in caught.value.where
    write_federation(config, folder, remake=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refused("folder-holds-other-files"):
        write_federation(small_config(), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_federation(small_config(), tmp_path / "phantoms", on_case=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_workers_write_the_same_files(tmp_path: Path) -> None:
    config = small_config()
    write_federation(config, tmp_path / "one")
    write_federation(config, tmp_path / "two", workers=2)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.nii.gz"))
    assert len(files) == 4 + 3 + 4
    for path in files:
        np.testing.assert_array_equal(read(tmp_path / "one" / path), read(tmp_path / "two" / path))
