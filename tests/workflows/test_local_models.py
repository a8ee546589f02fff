"""Sites' models before they are averaged: what is kept, what is scored, and who has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from federations import make_coordinator, make_workers, same
from safetensors.torch import load_file, save_file

from panorgan.config import load_agreement
from panorgan.errors import ConfigError
from panorgan.federation.aggregation import SpooledUpdates
from panorgan.federation.local_models import read_local_models, write_local_models
from panorgan.federation.message import Message
from panorgan.federation.transports.local import LocalTransport
from panorgan.methods.base import MethodConfig, ServerRule
from panorgan.methods.protocol import Federation
from panorgan.workflows.execute import evaluate, train
from panorgan.workflows.tables import columns, read_metrics

PLAIN = {"name": "fedavg", "server_step": 1, "organ_parts": "everyone"}
TRAINING = {"rounds": 2, "validate_every": 0, "local_steps": 2}


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "run"
    train(tiny(training=TRAINING, method=PLAIN, local_models=True), folder)
    return folder


def test_the_mean_of_the_local_models_is_the_global_one(finished):
    """Three training cases in the north, two in the south: FedAvg's weights."""
    files = read_local_models(finished / "local_models")
    assert list(files) == ["north", "south", "global"]
    north, south, averaged = (load_file(path) for path in files.values())
    assert not same(north, south)
    assert all(torch.allclose((3 * north[k] + 2 * south[k]) / 5, averaged[k], atol=1e-6) for k in averaged)
    assert same(averaged, load_file(finished / "model" / "model.safetensors"))


def test_every_model_is_scored_on_every_organ_of_every_test_case(finished):
    assert (finished / "local_models.csv").read_text().splitlines()[0] == ",".join(columns(own_models=True))
    rows = read_metrics(finished / "local_models.csv")
    scored = read_metrics(finished / "metrics.csv")
    questions = [(row["split"], row["site"], row["case"], row["organ"]) for row in scored]
    for model in ("north", "south", "global"):
        own = [row for row in rows if row["model"] == model]
        assert [(row["split"], row["site"], row["case"], row["organ"]) for row in own] == questions
    # The last round was delivered: the averaged model is the delivered one.
    delivered = [{k: v for k, v in row.items() if k != "model"} for row in rows if row["model"] == "global"]
    assert [{k: str(v) for k, v in row.items()} for row in delivered] == [
        {k: str(v) for k, v in row.items()} for row in scored
    ]


def test_keeping_local_models_changes_no_weights(finished, tiny, tmp_path):
    train(tiny(training=TRAINING, method=PLAIN), tmp_path / "run")
    assert not (tmp_path / "run" / "local_models").exists()
    assert not (tmp_path / "run" / "local_models.csv").exists()
    for name in ("model/model.safetensors", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_evaluate_repeats_their_scores(finished):
    before = (finished / "local_models.csv").read_bytes()
    (finished / "local_models.csv").unlink()
    evaluate(finished)
    assert (finished / "local_models.csv").read_bytes() == before


def test_like_is_compared_with_like_when_an_earlier_round_is_delivered(tiny, tmp_path, monkeypatch):
    """Round 1 is delivered; the sites' models are of round 2, and so is the global model beside them."""
    calls = iter([0.8] * 3 + [0.1] * 3)  # north has one structure, south two; one validation case each
    monkeypatch.setattr("panorgan.federation.validation.dice", lambda predicted, truth: next(calls))
    train(tiny(training={"rounds": 2, "validate_every": 1}, local_models=True), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "model" / "model.json").read_text())["round"] == 1
    last = load_file(tmp_path / "run" / "local_models" / "global.safetensors")
    assert not same(last, load_file(tmp_path / "run" / "model" / "model.safetensors"))
    rows = [row for row in read_metrics(tmp_path / "run" / "local_models.csv") if row["model"] == "global"]
    scored = read_metrics(tmp_path / "run" / "metrics.csv")
    assert len(rows) == len(scored)
    assert [row["dice"] for row in rows] != [row["dice"] for row in scored]


@pytest.mark.parametrize("method", ["solo", "central_full"])
def test_methods_without_an_average_keep_none(tiny, tmp_path, method):
    changes = {"training": {**TRAINING, "rounds": 1, "local_steps": 1}, "method": {"name": method}}
    train(tiny(**changes, local_models=True), tmp_path / "run")
    assert not (tmp_path / "run" / "local_models").exists()
    assert not (tmp_path / "run" / "local_models.csv").exists()


def test_the_global_model_has_a_name_of_its_own(tiny_content):
    from panorgan.config import parse_experiment

    content = tiny_content(local_models=True)
    content["phantom"]["sites"][0]["name"] = "global"
    with pytest.raises(ConfigError) as caught:
        parse_experiment(content)
    assert "no site may be called 'global'" in caught.value.why
    assert parse_experiment({**content, "local_models": False})


def test_between_hospitals_nobody_keeps_them(tiny, tmp_path):
    """The setting is no part of what sites agree on, and a coordinator keeps none by default."""
    assert tiny(local_models=True).agreement() == tiny().agreement()
    path = tmp_path / "experiment.yaml"
    path.write_text("vocabulary: [liver]\nlocal_models: true\n")
    assert load_agreement(path).vocabulary == ("liver",)
    experiment = tiny(training={**TRAINING, "rounds": 1, "local_steps": 1}, local_models=True)
    make_coordinator(experiment, tmp_path, LocalTransport(make_workers(experiment, tmp_path))).run()
    assert not list(tmp_path.glob("**/local_models*"))


def test_a_local_model_is_what_was_sent_over_what_it_started_from(tmp_path):
    """A site that sends its own head only; what is no part of the model stays out; a stale file goes."""

    class Averaging(ServerRule):
        def delivered(self):
            return {key: value + 100 for key, value in self.weights.items()}  # as a method that averages over rounds

    weights = {"body": torch.tensor([1.0]), "head:liver": torch.tensor([2.0]), "head:spleen": torch.tensor([3.0])}
    rule = Averaging(MethodConfig(), Federation.__new__(Federation), weights)
    from panorgan.federation.message import MessageFile

    path = tmp_path / "spool.safetensors"
    sent = {"body": torch.tensor([10.0]), "head:liver": torch.tensor([20.0]), "control": torch.tensor([7.0])}
    path.write_bytes(Message(sent, {}, {}).to_bytes())
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "gone.safetensors").write_bytes(b"of a round that was done again")
    write_local_models(folder, rule, SpooledUpdates({"north": MessageFile(path)}))
    assert list(read_local_models(folder)) == ["north"]
    found = {key: float(value) for key, value in load_file(folder / "north.safetensors").items()}
    assert found == {"body": 10.0, "head:liver": 20.0, "head:spleen": 3.0}


def test_an_organ_seen_everywhere_hides_no_other(tiny, tmp_path):
    """Heads are independent. One that has gone mad must not cost the others their score."""
    experiment = tiny(
        method={"name": "multihead", "organ_parts": "everyone"},
        training={"rounds": 1, "local_steps": 1, "validate_every": 0},
        local_models=True,
    )
    folder = tmp_path / "run"
    train(experiment, folder)
    file = folder / "local_models" / "north.safetensors"
    weights = load_file(file)
    for organ, bias in (("spleen", 2.0), ("liver", 1.0)):  # both seen everywhere; the spleen more surely
        weights[f"heads.{organ}.4.weight"].zero_()
        weights[f"heads.{organ}.4.bias"].fill_(bias)
    save_file(weights, file)
    evaluate(folder)
    rows = read_metrics(folder / "local_models.csv")
    liver = [row["sensitivity"] for row in rows if row["model"] == "north" and row["organ"] == "liver"]
    assert liver
    assert set(liver) == {1.0}
