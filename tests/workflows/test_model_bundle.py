"""A model of another format, or with weights that are no numbers, never predicts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from invoking import invoke
from safetensors.torch import load_file, save_file

from panorgan.checksums import read_json
from panorgan.errors import RunError
from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "run"
    train(tiny(training={"rounds": 1, "validate_every": 0, "local_steps": 1}), folder)
    return folder


@pytest.fixture
def model(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "model", tmp_path / "model"))


@pytest.mark.parametrize("found", [2, 0, "1", None, True], ids=repr)
def test_another_format_is_refused(model, found):
    card = read_json((model / "model.json").read_bytes())
    assert card["format"] == 1
    (model / "model.json").write_text(json.dumps({**card, "format": found}))
    with pytest.raises(RunError) as caught:
        load_model(model, CPU)
    assert caught.value.code == "model-format"
    assert card["panorgan"] in caught.value.why


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(model, value):
    weights = load_file(model / "model.safetensors")
    key = sorted(weights)[0]
    weights[key].view(-1)[0] = value
    save_file(weights, model / "model.safetensors")
    with pytest.raises(RunError) as caught:
        load_model(model, CPU)
    assert caught.value.code == "weights-not-finite"
    assert key in caught.value.why


def test_predict_says_so_and_writes_nothing(model, finished, tmp_path, capfd, monkeypatch):
    weights = {
        key: torch.full_like(value, float("nan")) for key, value in load_file(model / "model.safetensors").items()
    }
    save_file(weights, model / "model.safetensors")
    scan = next((finished / "predictions").glob("*/*.nii.gz"))
    code, _, err = invoke(capfd, monkeypatch, "predict", str(model), str(scan), "--out", str(tmp_path / "out"))
    assert code == 2
    assert "not finite" in err
    assert not (tmp_path / "out").exists()


def test_a_sound_model_loads(model):
    assert load_model(model, CPU).card["format"] == 1
