"""A federation with two organs that the catalogue does not know, from folders to a prediction by the model alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke
from safetensors.torch import load_file

from panorgan.anatomy import catalogue
from panorgan.anatomy.catalogue import remove_added
from panorgan.checksums import read_json
from panorgan.config import Experiment, parse_experiment
from panorgan.report.page import write_report
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import cache_folder, site_settings

OWN = {
    "zorbium": {"title": "The zorbium", "snomed": "41216001", "colour": "#123456"},
    "glimmer": {"parent": "kidney", "kind": "tumour", "aliases": ["Glimmer of the kidney"]},
}


def own_hospitals(tiny_content: Callable[..., dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Folders whose dataset.json has organs of the experiment's own: by name, and by an alias."""
    generated = site_settings(parse_experiment(tiny_content()), cache_folder(), lambda what, done, total: None)
    names = {"north": {"liver": "zorbium"}, "south": {"spleen": "glimmer of the kidney"}}
    for site, new in names.items():
        shutil.copytree(generated[site].folder, folder / site)
        described = folder / site / "dataset.json"
        content = json.loads(described.read_text())
        content["labels"] = {new.get(name, name): ids for name, ids in content["labels"].items()}
        described.write_text(json.dumps(content))
    return {site: {"folder": str(folder / site)} for site in names}


@pytest.fixture
def fresh() -> Iterator[None]:
    remove_added()
    yield
    remove_added()


@pytest.fixture
def experiment(tiny_content, tmp_path: Path, fresh: None) -> Experiment:
    content = tiny_content(
        organs=OWN,
        vocabulary=["zorbium", "kidney_left", "kidney_right", "glimmer"],
        method={"name": "multihead"},  # keys of weights hold the names of organs
        training={"rounds": 1, "validate_every": 1, "local_steps": 1},
    )
    del content["phantom"]
    return parse_experiment({**content, "sites": own_hospitals(tiny_content, tmp_path)})


def test_from_folders_to_a_prediction_by_the_model_alone(experiment, tmp_path, capfd, monkeypatch):
    run = train(experiment, tmp_path / "run")
    assert {row["organ"] for row in Run(tmp_path / "run").scores} == {"zorbium", "kidney", "glimmer"}
    model = Path(shutil.copytree(run.model_folder, tmp_path / "elsewhere"))
    card = read_json((model / "model.json").read_bytes())
    assert list(card["own_organs"]) == ["glimmer", "zorbium"]
    # A tumour is the second output of its organ's head.
    keys = load_file(model / "model.safetensors")
    heads = {key.split(".")[1] for key in keys if key.startswith("heads.")}
    assert heads == {"zorbium", "kidney_left", "kidney_right", "kidney"}
    scan = next((tmp_path / "north" / "imagesTr").glob("*.nii.gz"))

    remove_added()  # as on a machine that has nothing but the model
    loaded = load_model(model, "cpu")
    assert tuple(loaded.vocabulary) == experiment.vocabulary
    assert (catalogue()["zorbium"].colour, catalogue()["glimmer"].parent) == ("#123456", "kidney")
    remove_added()
    code, _, err = invoke(capfd, monkeypatch, "predict", str(model), str(scan), "--out", str(tmp_path / "out"))
    assert code == 0, err
    beside = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert beside["labels"]["glimmer"] == 4
    assert beside["snomed"]["zorbium"] == {"value": "41216001", "meaning": "The zorbium"}
    assert "glimmer" not in beside["snomed"]


def test_a_report_is_written_from_the_folder_alone(experiment, tmp_path):
    train(experiment.with_method("fedavg"), tmp_path / "run")
    remove_added()
    page = write_report(Run(tmp_path / "run"))
    assert "The zorbium" in page.read_text()
