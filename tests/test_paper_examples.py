"""examples/paper: every paper's setting as an experiment file, and what `panorgan methods NAME --yaml` prints."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import yaml
from invoking import invoke

from panorgan.anatomy import Vocabulary
from panorgan.config import load_experiment, parse_experiment
from panorgan.data.layouts import read_cases
from panorgan.fetching.catalogue import data_sets
from panorgan.methods.about.experiment import experiment_text
from panorgan.methods.registry import find_method, methods

ROOT = Path(__file__).parents[1]
PAPERS = sorted((ROOT / "examples" / "paper").glob("*.yaml"))
SYSTEMS = ("fediod", "flkd", "segviz", "ufps")
# The label names in the dataset.json of the decathlon's sets.
DECATHLON = {
    "Task03_Liver": ["liver", "cancer"],
    "Task06_Lung": ["cancer"],
    "Task07_Pancreas": ["pancreas", "cancer"],
    "Task08_HepaticVessel": ["Vessel", "Tumour"],
    "Task09_Spleen": ["spleen"],
    "Task10_Colon": ["colon cancer primaries"],
}
TRAINED = {
    "fediod": {"liver": {"liver"}, "pancreas": {"pancreas"}},
    "flkd": {
        "liver": {"liver", "liver_tumour"},
        "hepatic_vessel": {"hepatic_vessel", "liver_tumour"},
        "pancreas": {"pancreas", "pancreas_tumour"},
        "colon": {"colon_tumour"},
        "lung": {"lung_tumour"},
        "spleen": {"spleen"},
    },
    "segviz": {"liver": {"liver"}, "spleen": {"spleen"}, "pancreas": {"pancreas"}},
}


def test_every_paper_has_its_file():
    assert [path.stem for path in PAPERS] == [*SYSTEMS]


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_paper_s_file_has_every_number_of_the_recipe_and_only_known_sets(path):
    experiment = load_experiment(path)
    content = experiment.model_dump(mode="json")
    recipe = dict(find_method(path.stem).recipe)
    assert len(recipe) >= 10
    found = {
        setting: functools.reduce(lambda place, key: place[key], setting.split("."), content) for setting in recipe
    }
    assert found == recipe
    assert {site.folder.name for site in experiment.sites.values()} <= {one.folder for one in data_sets().values()}
    assert [name for name, site in experiment.sites.items() if site.external] == ["btcv"]
    fetched = {line.split()[-1] for line in path.read_text().splitlines() if line.startswith("#   panorgan fetch ")}
    assert {data_sets()[name].folder for name in fetched} == {s.folder.name for s in experiment.sites.values()}


@pytest.mark.parametrize("method", TRAINED)
def test_the_names_in_the_decathlon_s_files_are_understood(method, tmp_path, monkeypatch):
    monkeypatch.setenv("PANORGAN_DATA", str(tmp_path))
    for folder, names in DECATHLON.items():
        write_decathlon(tmp_path / folder, names)
    experiment = load_experiment(ROOT / "examples" / "paper" / f"{method}.yaml")
    annotated = {}
    for name, site in experiment.sites.items():
        if site.folder.exists():
            vocabulary = Vocabulary(experiment.vocabulary)
            (case,) = read_cases(site.folder, name, vocabulary, None, site.annotated, site.layout, site.labels)
            annotated[name] = set(case.annotated)
    assert annotated == TRAINED[method]


def write_decathlon(folder: Path, names: list[str]) -> None:
    labels = np.zeros((4, 4, 4), dtype=np.uint8)
    labels[: len(names), 0, 0] = range(1, len(names) + 1)
    for place in ("imagesTr", "labelsTr"):
        (folder / place).mkdir(parents=True)
        nib.save(nib.Nifti1Image(labels, np.eye(4)), folder / place / "a.nii.gz")
    listed = {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}
    known = {str(number): name for number, name in enumerate(["background", *names])}
    (folder / "dataset.json").write_text(json.dumps({"labels": known, "training": [listed]}))


def paper(name: str) -> str:
    """The example without its first line, which leads to the schema in the repository."""
    return (ROOT / "examples" / "paper" / f"{name}.yaml").read_text().partition("\n")[2]


@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_prints_an_experiment_that_can_be_used(name):
    text = experiment_text(find_method(name))
    assert parse_experiment(yaml.safe_load(text)).method["name"] == name
    assert (name in SYSTEMS) == ("phantom: {}" not in text)
    if name in SYSTEMS:
        assert text == paper(name), "copy it from examples/paper"


def test_the_command_prints_the_file(capfd, monkeypatch):
    code, out, _ = invoke(capfd, monkeypatch, "methods", "flkd", "--yaml")
    assert (code, out) == (0, paper("flkd"))
    assert invoke(capfd, monkeypatch, "methods", "--yaml")[0] == 2
    assert invoke(capfd, monkeypatch, "methods", "flkd", "--yaml", "--json")[0] == 2
