"""Data that changes while a run trains on it: noticed before the next round, at the price of a look at the files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from panorgan.anatomy import Vocabulary
from panorgan.config import Experiment, parse_experiment
from panorgan.data.layouts import read_cases
from panorgan.errors import DataError
from panorgan.federation.failures import code_of
from panorgan.preparation.store import Store
from panorgan.workflows.data_watch import DataWatch
from panorgan.workflows.execute import train
from panorgan.workflows.site_cases import cache_folder, site_settings


@pytest.fixture
def north(tiny, tmp_path) -> Path:
    """A copy of a hospital's folder."""
    settings = site_settings(tiny(), cache_folder(), lambda what, done, total: None)
    return Path(shutil.copytree(settings["north"].folder, tmp_path / "north"))


@pytest.fixture
def watch(north, tmp_path, monkeypatch) -> tuple[DataWatch, list[str]]:
    """A watch over three cases, and which of them it read; files count as settled at once."""
    cases = read_cases(north, "north", Vocabulary(["liver"]))
    monkeypatch.setattr("panorgan.workflows.data_watch._SETTLED_SECONDS", -1.0)
    store, read = Store(tmp_path / "store"), []
    original = store.content_of
    monkeypatch.setattr(store, "content_of", lambda case: read.append(case.id) or original(case))
    return DataWatch(store, {"train": cases[:2], "test": cases[2:3]}), read


def test_what_nobody_touched_is_not_read_again(watch):
    look, read = watch
    first = look()
    assert [key.split()[0] for key in first.values()] == ["test", "train", "train"]
    assert len(read) == 3
    assert look() == first
    assert len(read) == 3


def test_a_file_that_was_copied_anew_is_read_and_is_the_same(watch, north):
    look, read = watch
    first = look()
    path = sorted(north.rglob("labelsTr/*.nii.gz"))[0]
    path.write_bytes(path.read_bytes())
    assert look() == first
    assert len(read) == 4


def test_another_content_of_the_same_size_and_time_is_noticed(watch, north):
    look, _ = watch
    first = look()
    path = sorted(north.rglob("labelsTr/*.nii.gz"))[0]
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sum(look()[case] != key for case, key in first.items()) == 1


def test_a_scan_that_is_gone_is_named(watch, north):
    look, _ = watch
    look()
    path = sorted(north.rglob("imagesTr/*.nii.gz"))[0]
    path.unlink()
    with pytest.raises(DataError) as caught:
        look()
    assert caught.value.where == str(path)


def on_folders(content, folder: Path) -> Experiment:
    """The tiny experiment on copies of its sites' folders."""
    settings = site_settings(parse_experiment(content), cache_folder(), lambda what, done, total: None)
    sites = {}
    for name in ("north", "south"):
        shutil.copytree(settings[name].folder, folder / name)
        sites[name] = {"folder": str(folder / name)}
    del content["phantom"]
    return parse_experiment({**content, "sites": sites})


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("method", ["fedavg", "central_naive"])
def test_a_simulation_ends_when_its_data_changes_and_goes_on_when_it_is_back(tiny_content, tmp_path, split, method):
    training = {"rounds": 3, "local_steps": 1, "validate_every": 0}
    experiment = on_folders(tiny_content(training=training, method={"name": method}), tmp_path / "data")
    labels = sorted((tmp_path / "data" / "north").rglob("labelsTr/*.nii.gz"))
    backup = tmp_path / "backup"

    def meddle(event) -> None:
        """After round 1 some label holds what another one holds."""
        if event.kind == "round" and event.facts["number"] == 1 and not backup.exists():
            path = label_of(split)
            shutil.copy2(path, backup)
            path.write_bytes(next(one for one in labels if one != path).read_bytes())

    def label_of(split: str) -> Path:
        from panorgan.workflows.prepare import prepare

        (site,) = (site for site in prepare(experiment).sites if site.name == "north")
        wanted = sorted(site.content[split])[0]
        return next(path for path in labels if path.name.startswith(wanted.split(".")[0]))

    with pytest.raises(DataError) as caught:
        train(experiment, tmp_path / "run", listeners=(meddle,))
    assert code_of(caught.value) == "data-changed"
    shutil.copy2(backup, label_of(split))
    assert train(experiment, tmp_path / "run", resume=True).scores
