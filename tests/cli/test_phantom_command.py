"""`panorgan phantom`."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest
import yaml
from refusing import refused
from typer.testing import CliRunner

from panorgan.anatomy import Vocabulary
from panorgan.cli.main import app
from panorgan.cli.phantom import experiment_text
from panorgan.config import load_experiment, parse_experiment
from panorgan.data.layouts import read_cases
from panorgan.phantom import generate_case
from panorgan.workflows.execute import train

SMALL = {
    "field_of_view_mm": [364, 320, 220],
    "sites": [
        {"name": "north", "annotated": ["liver"], "cases": 2, "spacing_mm": [14, 14, 14]},
        {"name": "south", "annotated": ["spleen", "kidney"], "cases": 2, "spacing_mm": [14, 14, 14]},
        {"name": "island", "cases": 1, "external": True, "spacing_mm": [14, 14, 14]},
    ],
}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Fresh worker processes cost more than these few cases."""
    monkeypatch.setattr("panorgan.cli.phantom.usable_cores", lambda: 1)


@pytest.fixture
def experiment_file(tmp_path, tiny_content):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content(phantom=SMALL)))
    return path


def phantom(*arguments: object):
    return CliRunner().invoke(app, ["phantom", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def written(tmp_path, experiment_file):
    result = phantom(tmp_path / "data", "--experiment", experiment_file)
    assert result.exit_code == 0
    return tmp_path / "data", result.output


def test_each_hospital_has_its_own_scans_and_labels_and_nothing_else(written, experiment_file) -> None:
    folder, said = written
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(
        ["north", "south", "island", "withheld", "experiment.yaml", "phantom.json"]
    )
    vocabulary = Vocabulary(["liver", "spleen", "kidney_left", "kidney_right"])
    south = read_cases(folder / "south", "south", vocabulary)
    assert [sorted(case.annotated) for case in south] == [["kidney", "spleen"]] * 2
    assert not (folder / "island" / "labelsTr").exists()
    config = load_experiment(experiment_file).phantom
    expected = generate_case(config, config.sites[0], 1)
    scan = nib.load(folder / "north" / "imagesTr" / "north_001_0000.nii.gz")
    np.testing.assert_array_equal(np.asarray(scan.dataobj), expected.hu)
    assert "south" in said
    assert "labels spleen, kidney" in said
    assert "external" in said


def test_the_experiment_file_trains_on_the_folders(written, tmp_path) -> None:
    """The same model as the experiment that generates its hospitals."""
    folder, _ = written
    changes = ["training.rounds=1", "hardware.threads=1", "hardware.device=cpu"]
    from_folders = load_experiment(folder / "experiment.yaml", changes)
    assert from_folders.sites["island"].external
    assert from_folders.sites["north"].withheld == folder / "withheld" / "north"
    generated = load_experiment(tmp_path / "tiny.yaml", changes)
    assert from_folders.agreement().fingerprint() == generated.agreement().fingerprint()
    weights = [
        (train(experiment, tmp_path / name).model_folder / "model.safetensors").read_bytes()
        for name, experiment in (("folders", from_folders), ("generated", generated))
    ]
    assert weights[0] == weights[1]


def test_again_keeps_what_is_there(written, experiment_file) -> None:
    folder, _ = written
    (folder / "experiment.yaml").write_text("mine: true\n")
    scan = folder / "north" / "imagesTr" / "north_000_0000.nii.gz"
    before = scan.stat().st_mtime_ns
    result = phantom(folder, "--experiment", experiment_file)
    assert "unchanged" in result.output
    assert (folder / "experiment.yaml").read_text() == "mine: true\n"
    assert scan.stat().st_mtime_ns == before


def test_json_names_the_folders(tmp_path, experiment_file) -> None:
    result = phantom(tmp_path / "data", "--experiment", experiment_file, "--json")
    reported = json.loads(result.stdout)
    assert reported["sites"]["north"] == str(tmp_path / "data" / "north")
    assert reported["experiment"] == str(tmp_path / "data" / "experiment.yaml")


def test_other_files_are_left_alone(tmp_path, experiment_file) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("mine")
    with refused("folder-holds-other-files"):
        phantom(tmp_path / "data", "--experiment", experiment_file)
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["notes.txt"]


def test_an_experiment_without_phantoms_is_refused(tmp_path) -> None:
    path = tmp_path / "real.yaml"
    path.write_text(yaml.safe_dump({"vocabulary": ["liver"], "sites": {"a": {"folder": "a"}}}))
    with refused("no-phantom") as caught:
        phantom(tmp_path / "data", "--experiment", path)
    assert "phantom: {}" in caught.value.fix
    assert not (tmp_path / "data").exists()


def test_a_vocabulary_left_to_the_phantom_is_written_down(tmp_path) -> None:
    config = parse_experiment({"phantom": {"organs": ["liver", "aorta"]}}).phantom
    sites = {site.name: tmp_path / site.name for site in config.sites}
    content = yaml.safe_load(experiment_text({"phantom": {"organs": ["liver", "aorta"]}}, config, tmp_path, sites))
    assert content["vocabulary"] == ["liver", "aorta"]
    assert "phantom" not in content
    assert set(content["sites"]) == {"north", "east", "south", "island"}
