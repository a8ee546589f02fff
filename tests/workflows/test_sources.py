"""What the doctor gets of an experiment: every site as training would read it, and no complaint about bad folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from panorgan.config import Experiment, parse_experiment
from panorgan.data_doctor import Source
from panorgan.workflows.prepare import prepare
from panorgan.workflows.site_cases import site_settings
from panorgan.workflows.sources import refusal_of, sources_of


def by_site(experiment: Experiment) -> dict[str, Source]:
    return {source.site: source for source in sources_of(experiment)}


@pytest.fixture
def folders(tiny: Callable[..., Experiment], cache: Path, tmp_path: Path) -> dict[str, Path]:
    """The tiny federation's folders, copied so that a test may damage them."""
    settings = site_settings(tiny(), cache, lambda what, done, total: None)
    return {name: Path(shutil.copytree(site.folder, tmp_path / name)) for name, site in settings.items()}


@pytest.fixture
def real(tiny_content: Callable[..., dict[str, Any]], folders: dict[str, Path]) -> Callable[..., Experiment]:
    """An experiment on real folders: `real(north={...}, south={...})`."""

    def make(**sites: dict[str, Any]) -> Experiment:
        content = tiny_content(splits={"balanced": True})  # halves of a small site must not lack a split
        del content["phantom"]
        return Experiment(**content, sites={name: {"folder": folders[name], **own} for name, own in sites.items()})

    return make


def test_phantom_sites_are_generated_and_split_as_training_does(tiny):
    heard = []
    sources = sources_of(tiny(), progress=lambda what, done, total: heard.append(what))
    assert set(heard) <= {"generating phantoms"}
    assert [source.site for source in sources] == ["island", "north", "south"]
    for site, source in zip(prepare(tiny()).sites, sources, strict=True):
        assert source.site == site.name
        assert source.folder.is_dir()
        assert source.vocabulary is not None
        assert source.vocabulary.organs == tiny().vocabulary
        tested = {case.id for case in site.test}
        assert {case for case, split in source.splits.items() if split == "test"} == tested
        counts = [list(source.splits.values()).count(split) for split in ("train", "validation", "test")]
        assert counts == [len(site.train), len(site.validation), len(site.test)]


def test_what_the_experiment_says_about_labels_is_kept(real):
    north = {"annotated": ["liver"], "labels": {"liver": "liver"}, "ignore": ["spleen"], "layout": "nnunet"}
    source = by_site(real(north=north))["north"]
    assert source.restrict == ("liver",)
    assert source.rename == {"liver": "liver"}
    assert source.ignore == ("spleen",)
    assert source.layout == "nnunet"
    assert source.patients is None
    assert len(source.splits) == 5


def test_two_parts_of_one_folder_are_two_sources_that_share_no_patient(real, folders):
    whole = by_site(real(north={}))["north"]
    parts = by_site(real(north={"part": [1, 2]}, south={"folder": folders["north"], "part": [2, 2]}))
    first, second = parts["north"], parts["south"]
    assert first.folder == second.folder
    assert len(first.patients) == 3
    assert len(second.patients) == 2
    assert not first.patients & second.patients
    assert set(first.splits) | set(second.splits) == set(whole.splits)
    assert set(first.splits) == set(first.patients), "phantom cases are named as their patients"


def test_splits_of_parts_are_those_of_training(real):
    experiment = real(north={"part": [1, 2]}, south={})
    tested = {site.name: {case.id for case in site.test} for site in prepare(experiment).sites}
    for name, source in by_site(experiment).items():
        assert {case for case, split in source.splits.items() if split == "test"} == tested[name]


def test_every_case_of_an_external_site_is_a_test_case(real):
    source = by_site(real(north={}, south={"external": True}))["south"]
    assert set(source.splits.values()) == {"test"}
    assert len(source.splits) == 4


@pytest.mark.parametrize("damage", ["no folder", "no description", "broken description", "other content", "no label"])
def test_bad_folder_is_left_to_the_doctor(real, folders, damage):
    experiment = real(north={"part": [1, 2]}, south={})
    north = folders["north"]
    if damage == "no folder":
        shutil.rmtree(north)
    elif damage == "no description":
        (north / "dataset.json").unlink()
    elif damage == "broken description":
        (north / "dataset.json").write_text("{")
    elif damage == "other content":
        (north / "dataset.json").write_text(json.dumps(["not", "a", "mapping"]))
    else:
        next((north / "labelsTr").iterdir()).unlink()
    sources = by_site(experiment)
    assert sources["north"].splits == {}
    assert sources["north"].folder == north
    assert len(sources["south"].splits) == 4, "the other site does not suffer"
    if damage == "no label":
        assert len(sources["north"].patients) == 3, "scans alone say who belongs to the part"


def test_unreadable_withheld_labels_do_not_hide_the_splits(real, tmp_path):
    experiment = real(north={"withheld": tmp_path / "nowhere"})
    assert len(by_site(experiment)["north"].splits) == 5


def test_site_with_one_patient_cannot_be_split(real, folders):
    for path in sorted((folders["north"] / "imagesTr").iterdir())[1:]:
        path.unlink()
    assert by_site(real(north={}))["north"].splits == {}


@pytest.mark.parametrize(
    ("plan", "modality"),
    [
        ({"intensity": "pooled", "window_hu": "pooled"}, ""),
        ({"intensity": "window", "window_hu": "pooled"}, "CT"),
        ({"intensity": "pooled", "window_hu": [-200, 300]}, "CT"),
        ({"intensity": "zscore", "window_hu": [-200, 300]}, ""),
    ],
)
def test_a_window_is_for_ct(plan, modality, tiny):
    """The doctor then reports scans that are not in Hounsfield units, instead of taking them for MR."""
    assert {source.modality for source in sources_of(tiny(plan=plan))} == {modality}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"vocabulary": ["liver", "spleen", "kidney_left", "kidney_right", "aorta"]}, "aorta"),
        ({"leave_out": ["nobody"]}, "'nobody'"),
        ({"external": True}, ""),
    ],
)
def test_what_training_would_refuse_is_told_although_the_folders_are_fine(tiny_content, cache, changes, name):
    content = tiny_content()
    settings = site_settings(parse_experiment(content), cache, lambda *_: None)
    del content["phantom"]
    content["sites"] = {name: {"folder": str(settings[name].folder)} for name in ("north", "south")}
    assert refusal_of(parse_experiment(content), cache) is None
    for site in content["sites"].values() if "vocabulary" not in changes else ():
        site |= changes
    content |= {key: value for key, value in changes.items() if key == "vocabulary"}
    refusal = refusal_of(parse_experiment(content), cache)
    assert refusal is not None
    assert refusal.code == "experiment-refused"
    assert name in refusal.what
    assert refusal.fix
