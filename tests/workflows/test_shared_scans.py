"""One scan in two splits, or at two sites, is refused before anything is trained; allowed, it is in the report."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from panorgan.config import Experiment, SiteSettings, parse_experiment
from panorgan.errors import DataError
from panorgan.federation.events import read_events
from panorgan.federation.failures import code_of
from panorgan.report import write_report
from panorgan.workflows.execute import train
from panorgan.workflows.one_site import SiteFolder
from panorgan.workflows.prepare import prepare
from panorgan.workflows.site_cases import SiteCases, read_sites, site_settings


@pytest.fixture
def folders(tiny: Callable[..., Experiment], cache: Path, tmp_path: Path) -> dict[str, Path]:
    """The tiny federation's folders, to copy scans between."""
    settings = site_settings(tiny(), cache, lambda what, done, total: None)
    return {name: Path(shutil.copytree(site.folder, tmp_path / name)) for name, site in settings.items()}


@pytest.fixture
def experiment(tiny_content: Callable[..., dict[str, Any]], folders: dict[str, Path]) -> Callable[..., Experiment]:
    def make(**changes: Any) -> Experiment:
        content = tiny_content(training={"rounds": 1, "validate_every": 0}, **changes)
        del content["phantom"]
        sites = {name: {"folder": str(folder), "external": name == "island"} for name, folder in folders.items()}
        return parse_experiment({**content, "sites": sites})

    return make


def split_of(experiment: Experiment, site: str, cache: Path) -> SiteCases:
    return next(found for found in read_sites(experiment, cache, lambda *_: None) if found.name == site)


def scan(folder: Path, case: str) -> Path:
    return folder / "imagesTr" / f"{case}_0000.nii.gz"


def put(source: Path, target: Path) -> None:
    """The same file under another name; labels keep their grid, so nothing else is wrong."""
    target.write_bytes(source.read_bytes())


def copy_within_north(experiment: Experiment, folders: dict[str, Path], cache: Path) -> tuple[str, str]:
    north = split_of(experiment, "north", cache)
    trained, tested = north.train[0].id, north.test[0].id
    put(scan(folders["north"], trained), scan(folders["north"], tested))
    return trained, tested


def refused(experiment: Experiment, run: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        train(experiment, run)
    assert caught.value.code == "shared-scan"
    assert not run.exists(), "something was written"
    return caught.value


def test_scan_that_is_trained_on_and_tested_is_refused(experiment, folders, cache, tmp_path):
    trained, tested = copy_within_north(experiment(), folders, cache)
    error = refused(experiment(), tmp_path / "run")
    assert f"north/{trained} (train)" in error.where
    assert f"north/{tested} (test)" in error.where


@pytest.mark.parametrize("other", ["south", "island"])
def test_scan_at_two_sites_is_refused_external_ones_included(other, experiment, folders, cache, tmp_path):
    """Sites share the grid, so that the copied scan fits the label that it meets."""
    mine = split_of(experiment(), "north", cache).train[0].id
    theirs = (split_of(experiment(), other, cache).train or split_of(experiment(), other, cache).test)[0].id
    put(scan(folders[other], theirs), scan(folders["north"], mine))
    error = refused(experiment(), tmp_path / "run")
    assert f"north/{mine} (train)" in error.where
    assert f"{other}/{theirs}" in error.where


def test_copy_within_one_split_leaks_nothing(experiment, folders, cache):
    first, second = (case.id for case in split_of(experiment(), "north", cache).train[:2])
    put(scan(folders["north"], first), scan(folders["north"], second))
    assert prepare(experiment()).shared_scans == ()


def test_what_is_allowed_is_told_in_the_log_the_manifest_and_the_report(experiment, folders, cache, tmp_path):
    trained, tested = copy_within_north(experiment(), folders, cache)
    run = tmp_path / "run"
    train(experiment(allow_shared_scans=True), run)
    pair = f"north/{trained} (train) = north/{tested} (test)"
    reported = [event.facts["scans"] for event in read_events(run / "events.jsonl") if event.kind == "shared_scans"]
    assert reported == [[pair]]
    assert json.loads((run / "manifest.json").read_text())["shared_scans"] == [pair]
    page = write_report(run).read_text()
    assert page.count('role="alert"') == 1
    assert page.index(pair) < page.index('class="tiles"'), "before the scores"


def test_ordinary_report_has_no_such_warning(experiment, tmp_path):
    train(experiment(), tmp_path / "run")
    assert 'role="alert"' not in write_report(tmp_path / "run").read_text()


def test_site_of_a_network_checks_its_own_cases(experiment, folders, cache):
    copy_within_north(experiment(), folders, cache)
    settings = SiteSettings(folder=folders["north"])
    with pytest.raises(DataError) as caught:
        SiteFolder("north", settings, experiment().agreement(), cache).counts()
    assert caught.value.code == "shared-scan"
    assert code_of(caught.value) == "data", "only a code leaves the site"
    assert SiteFolder("north", settings, experiment(allow_shared_scans=True).agreement(), cache).counts()[0] == 3


def test_scan_that_was_compressed_again_is_another_file_which_the_doctor_compares(experiment, folders, cache):
    """What does not hold: files are compared, not voxels."""
    _, tested = copy_within_north(experiment(), folders, cache)
    path = scan(folders["north"], tested)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 1))
    assert prepare(experiment()).shared_scans == ()
