"""From folders to prepared cases: the pooled plan, bad cases, resuming."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from panorgan.config import parse_experiment
from panorgan.errors import ConfigError, DataError
from panorgan.preparation import store as store_module
from panorgan.preparation.site_statistics import SiteStatistics
from panorgan.preparation.store import Store
from panorgan.workflows.execute import train
from panorgan.workflows.manifest import scored_fingerprint
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.prepare import make_plan, prepare


def write_folder(folder: Path, organ: str, spacing: float, cases: int, hu: float, wider: int = 0) -> Path:
    """An nnU-Net folder of little boxes of tissue in air; a `wider` mask also holds the fat around."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    affine = np.diag([spacing, spacing, 2 * spacing, 1.0])
    for index in range(cases):
        voxels = np.full((20, 20, 12), -1000.0, dtype=np.float32)
        voxels[4:16, 4:16, 2:10] = -80 - index
        mask = np.zeros(voxels.shape, dtype=np.uint8)
        mask[6:10, 6:10, 4:8] = 1
        voxels[mask > 0] = hu
        mask[6 - wider : 10 + wider, 6:10, 4:8] = 1
        nib.save(nib.Nifti1Image(voxels, affine), folder / "imagesTr" / f"c{index}_0000.nii.gz")
        nib.save(nib.Nifti1Image(mask, affine), folder / "labelsTr" / f"c{index}.nii.gz")
    content = {"channel_names": {"0": "CT"}, "labels": {"background": 0, organ: 1}, "numTraining": cases}
    (folder / "dataset.json").write_text(json.dumps(content | {"file_ending": ".nii.gz"}))
    return folder


@pytest.fixture
def two_sites(tmp_path: Path) -> dict:
    folders = {
        "north": write_folder(tmp_path / "north", "liver", 2.0, 5, 60.0),
        "south": write_folder(tmp_path / "south", "spleen", 3.0, 4, 120.0),
    }
    return {
        "vocabulary": ["liver", "spleen"],
        "splits": {"balanced": True},
        "sites": {name: {"folder": str(folder)} for name, folder in folders.items()},
        "network": {"features": [4, 8]},
        "training": {
            "rounds": 1,
            "local_steps": 1,
            "sampling": {"patch_size": [8, 8, 8], "batch_size": 1},
            "validate_every": 0,
        },
    }


def test_the_plan_is_pooled_over_training_sites_and_travels_in_the_model(two_sites, tmp_path) -> None:
    experiment = parse_experiment({**two_sites, "plan": {"crop": "body", "image_interpolation": "cubic"}})
    prepared = prepare(experiment, tmp_path / "cache")
    # north has more training cases, so its voxel size is the median.
    assert prepared.plan.spacing_mm == (2.0, 2.0, 4.0)
    # 60 HU lies in the bin from 48 to 64, 120 HU in the one from 112 to 128.
    assert prepared.plan.window_hu == (48.0, 128.0)
    assert {name: site.cases for name, site in prepared.statistics.items()} == {"north": 3, "south": 2}
    run = train(experiment, tmp_path / "run", cache=tmp_path / "cache")
    manifest = run.manifest
    assert manifest["plan"]["spacing_mm"] == [2.0, 2.0, 4.0]
    assert SiteStatistics.from_numbers(manifest["statistics"]["south"]).cases == 2
    assert load_model(run.model_folder, torch.device("cpu")).plan == prepared.plan


def test_a_plan_that_is_given_measures_nothing(two_sites, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Store, "measure", lambda *_: pytest.fail("measured"))
    plan = {"spacing_mm": [4, 4, 4], "intensity": "window", "window_hu": [-100, 200]}
    prepared = prepare(parse_experiment({**two_sites, "plan": plan}), tmp_path / "cache")
    assert prepared.statistics == {}
    assert prepared.plan.spacing_mm == (4, 4, 4)


def test_a_plan_can_be_made_without_preparing(two_sites, tmp_path) -> None:
    plan, sites = make_plan(parse_experiment(two_sites), tmp_path / "cache")
    assert plan == prepare(parse_experiment(two_sites), tmp_path / "cache2").plan
    assert set(sites) == {"north", "south"}
    assert not list((tmp_path / "cache" / "store").glob("*/case.json"))


def test_measurements_are_kept(two_sites, tmp_path, monkeypatch) -> None:
    experiment = parse_experiment(two_sites)
    first = make_plan(experiment, tmp_path / "cache")
    monkeypatch.setattr("panorgan.preparation.store.measure_case", lambda *_: pytest.fail("measured again"))
    assert make_plan(experiment, tmp_path / "cache")[0] == first[0]


def test_external_and_test_cases_have_no_say_in_the_plan(two_sites, tmp_path) -> None:
    plan, _ = make_plan(parse_experiment(two_sites), tmp_path / "cache")
    outside = write_folder(tmp_path / "island", "liver", 9.0, 50, 2000.0)
    two_sites["sites"]["island"] = {"folder": str(outside), "external": True}
    assert make_plan(parse_experiment(two_sites), tmp_path / "cache")[0] == plan
    north = next(
        site for site in prepare(parse_experiment(two_sites), tmp_path / "cache").sites if site.name == "north"
    )
    for case in north.content["test"]:
        path = Path(two_sites["sites"]["north"]["folder"]) / "imagesTr" / f"{case}_0000.nii.gz"
        image = nib.load(path)
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj) + 500, image.affine), path)
    assert make_plan(parse_experiment(two_sites), tmp_path / "cache")[0] == plan


def test_full_labels_change_neither_plan_nor_splits(two_sites, tmp_path) -> None:
    """central_full must be comparable: the same preprocessing, the same test cases."""
    for name, organ, spacing in (("north", "liver", 2.0), ("south", "spleen", 3.0)):
        full = write_folder(tmp_path / f"full_{name}", organ, spacing, 5, 60.0, wider=2)
        two_sites["sites"][name]["withheld"] = str(full)
    plans, tested = [], []
    for method in ("fedavg", "central_full"):
        prepared = prepare(parse_experiment({**two_sites, "method": {"name": method}}), tmp_path / "cache")
        plans.append(prepared.plan)
        tested.append(scored_fingerprint(prepared))
    assert plans[0] == plans[1]
    assert tested[0] == tested[1]


def test_a_patient_is_left_out_where_it_is(two_sites, tmp_path) -> None:
    north = two_sites["sites"].pop("north")["folder"]
    two_sites["sites"] |= {
        "one": {"folder": north, "part": [1, 2], "leave_out": ["c2"]},
        "two": {"folder": north, "part": [2, 2]},
    }
    prepared = prepare(parse_experiment(two_sites), tmp_path / "cache")
    used = {site.name: {case for split in site.content.values() for case in split} for site in prepared.sites}
    assert used["one"] == {"c0", "c4"}
    assert used["two"] == {"c1", "c3"}
    two_sites["sites"]["one"]["leave_out"] = ["c1"]
    with pytest.raises(ConfigError) as caught:
        prepare(parse_experiment(two_sites), tmp_path / "cache")
    assert caught.value.code == "unknown-case"
    assert "'c1'" in caught.value.what
    assert "[1, 2]" in caught.value.why
    two_sites["sites"]["one"]["leave_out"] = ["c22"]
    with pytest.raises(ConfigError) as caught:
        prepare(parse_experiment(two_sites), tmp_path / "cache")
    assert caught.value.code == "unknown-case"
    assert "c22" in caught.value.what
    assert "c2" in caught.value.why


def test_all_cases_with_undeclared_ids_are_named_at_once(two_sites, tmp_path) -> None:
    labels = Path(two_sites["sites"]["north"]["folder"]) / "labelsTr"
    for name in ("c1", "c3"):
        image = nib.load(labels / f"{name}.nii.gz")
        voxels = np.asarray(image.dataobj).copy()
        voxels[0, 0, 0] = 7
        nib.save(nib.Nifti1Image(voxels, image.affine), labels / f"{name}.nii.gz")
    with pytest.raises(DataError, match=r"undeclared label ids: \[7\]") as caught:
        prepare(parse_experiment({**two_sites, "plan": {"spacing_mm": [4, 4, 4]}}), tmp_path / "cache")
    assert "c1.nii.gz" in caught.value.where
    assert "c3.nii.gz" in caught.value.where


def test_what_was_prepared_before_a_failure_is_not_prepared_again(two_sites, tmp_path, monkeypatch) -> None:
    """Resumable: a killed or failed preparation loses nothing that was done."""
    plan = {"spacing_mm": [4, 4, 4], "intensity": "window", "window_hu": [-100, 200]}
    experiment = parse_experiment({**two_sites, "plan": plan, "hardware": {"workers": 1}})
    add, calls = Store.add, []

    def third_fails(self, case, plan):
        calls.append(case.id)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return add(self, case, plan)

    monkeypatch.setattr(Store, "add", third_fails)
    with pytest.raises(KeyboardInterrupt):
        prepare(experiment, tmp_path / "cache")
    kept = {path.parent.name for path in (tmp_path / "cache" / "store").glob("*/case.json")}
    assert len(kept) >= 2
    monkeypatch.setattr(Store, "add", add)
    written: list[str] = []
    write = store_module._write

    def counted(case, plan, folder) -> None:
        written.append(case.id)
        write(case, plan, folder)

    monkeypatch.setattr("panorgan.preparation.store._write", counted)
    prepared = prepare(experiment, tmp_path / "cache")
    everything = sum(len(site.train) + len(site.validation) for site in prepared.sites)
    assert len(written) == everything - len(kept)


def test_leftovers_of_killed_processes_are_swept_once_they_are_old(tmp_path) -> None:
    store = Store(tmp_path)
    for name, age in (("old", 2 * 24 * 3600), ("young", 60)):
        folder = tmp_path / f".incomplete-{name}"
        folder.mkdir()
        (folder / "image.npy").touch()
        os.utime(folder, (time.time() - age,) * 2)
    store.sweep()
    assert [path.name for path in tmp_path.iterdir()] == [".incomplete-young"]


def test_windows_of_a_cropped_model_still_answer_on_the_whole_scan(two_sites, tmp_path) -> None:
    experiment = parse_experiment({**two_sites, "plan": {"spacing_mm": [4, 4, 4], "crop": "body"}})
    run = train(experiment, tmp_path / "run", cache=tmp_path / "cache")
    predictions = list(run.predictions_folder.glob("*/*.nii.gz"))
    assert predictions
    for path in predictions:
        scan = nib.load(tmp_path / path.parent.name / "imagesTr" / path.name.replace(".nii.gz", "_0000.nii.gz"))
        label = nib.load(path)
        assert label.shape == scan.shape
        np.testing.assert_array_equal(label.affine, scan.affine)
