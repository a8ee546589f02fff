"""`panorgan finetune`: before and after."""

from __future__ import annotations

import json

import pytest
from hospitals import make_hospitals
from invoking import invoke

from panorgan.workflows.execute import train
from panorgan.workflows.model_bundle import load_model, save_model
from panorgan.workflows.run import Run

QUICK = ["--set", "training.rounds=1", "--set", "training.local_steps=1"]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Run:
    return train(tiny(training={"rounds": 1}), tmp_path_factory.mktemp("federation") / "run")


def test_it_shows_the_site_before_and_after(finished, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = invoke(capfd, monkeypatch, "finetune", str(finished.path), "--site", "north", *QUICK)
    assert code == 0
    assert "before" in out
    assert "after" in out
    assert Run(tmp_path / "runs" / "tiny-north").complete
    arguments = ["finetune", str(finished.path), "--site", "north", *QUICK, "--resume", "--json"]
    code, out, _ = invoke(capfd, monkeypatch, *arguments)
    result = json.loads(out.splitlines()[-1])["result"]
    assert set(result["dice_before"]) == set(result["dice_after"]) == {"liver"}


def test_in_a_kit_everything_stays_there(finished, tmp_path, capfd, monkeypatch):
    kit = make_hospitals(tmp_path, finished.experiment)["north"]
    model = load_model(finished, "cpu")
    card = {key: value for key, value in model.card.items() if key not in ("format", "panorgan")}
    save_model(kit.model, model.network.state_dict(), card)
    before = (kit.model / "model.safetensors").read_bytes()
    code, _, err = invoke(capfd, monkeypatch, "finetune", str(kit.path), "--site", "north", *QUICK)
    assert code == 2
    assert "[site-of-a-kit]" in err
    assert invoke(capfd, monkeypatch, "finetune", str(kit.path), *QUICK)[0] == 0
    assert Run(kit.path / "finetuned").complete
    assert (kit.model / "model.safetensors").read_bytes() == before
