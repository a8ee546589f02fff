"""A delivered model is trained on with one site's own cases."""

from __future__ import annotations

import pytest
from hospitals import make_hospitals

from panorgan.config import load_agreement
from panorgan.deployment.finetune import of_kit
from panorgan.errors import ConfigError, RunError
from panorgan.federation.start_settings import weights_hash
from panorgan.workflows.execute import train
from panorgan.workflows.finetune import START_SCORES, of_run, score_start
from panorgan.workflows.model_bundle import load_model, save_model
from panorgan.workflows.run import Run
from panorgan.workflows.tables import read_metrics

QUICK = ["training.rounds=1", "training.validate_every=1", "training.local_steps=1"]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Run:
    experiment = tiny(plan={"window_hu": "pooled"}, training={"rounds": 1, "validate_every": 1})
    return train(experiment, tmp_path_factory.mktemp("federation") / "run")


def test_one_site_its_organs_and_the_models_own_plan(finished):
    known, found = finished.experiment, of_run(finished, "south")
    assert list(found.sites) == ["south"]
    assert found.vocabulary == ("spleen", "kidney_left", "kidney_right")  # it annotates the kidney as one
    assert found.training.start_from.sha256 == weights_hash(finished.model_folder)
    assert found.training.optimizer.learning_rate == pytest.approx(known.training.optimizer.learning_rate / 10)
    assert found.training.rounds == 5
    assert found.plan.as_json() == finished.manifest["plan"]
    assert (found.name, found.method["name"]) == ("tiny-south", "fedavg")


def test_the_same_patients_are_tested(finished, tmp_path):
    run = train(of_run(finished, "south", QUICK), tmp_path / "tuned")
    before = {row["case"] for row in finished.scores if row["site"] == "south"}
    assert {row["case"] for row in run.scores} == before
    assert load_model(run, "cpu").vocabulary.organs == ("spleen", "kidney_left", "kidney_right")
    rows = score_start(run)
    assert read_metrics(run.path / START_SCORES).column("dice") == rows.column("dice")
    known = {(r["case"], r["organ"]): r["dice"] for r in finished.scores if r["site"] == "south"}
    assert {(r["case"], r["organ"]): r["dice"] for r in rows} == pytest.approx(
        {key: known[key] for key in ((r["case"], r["organ"]) for r in rows)}, nan_ok=True
    )


def test_a_site_must_be_named_and_known(finished):
    for name in (None, "nowhere"):
        with pytest.raises(ConfigError) as raised:
            of_run(finished, name)
        assert raised.value.code == "no-such-site"
        assert "south" in raised.value.fix


def test_methods_that_need_others_go_on_as_plain_averaging(tiny, tmp_path):
    run = train(tiny(method={"name": "flkd"}, training={"rounds": 1, "validate_every": 1}), tmp_path / "flkd")
    found = of_run(run, "north", QUICK)
    assert found.method["name"] == "fedavg"
    assert found.network.organs == "heads"
    tuned = train(found, tmp_path / "tuned")
    event = next(event for event in tuned.events if event["event"] == "start_from")
    assert (event["organs"], event["fresh_organs"], event["taken"]) == (["liver"], [], event["of"])


def test_a_hospital_tunes_the_model_in_its_kit(finished, tmp_path):
    kit = make_hospitals(tmp_path, finished.experiment)["south"]
    with pytest.raises(RunError) as raised:
        of_kit(kit)
    assert raised.value.code == "model-not-delivered"
    model = load_model(finished, "cpu")
    card = {key: value for key, value in model.card.items() if key not in ("format", "panorgan")}
    save_model(kit.model, model.network.state_dict(), card)
    found = of_kit(kit, QUICK)
    assert list(found.sites) == ["south"]
    assert found.sites["south"].folder == (kit.path / "data").resolve()
    assert found.training.start_from.folder == kit.model
    assert found.vocabulary == ("spleen", "kidney_left", "kidney_right")
    assert load_agreement(kit.experiment).training.rounds == 1, "what was agreed stays"
