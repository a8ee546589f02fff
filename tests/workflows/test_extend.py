"""More rounds for a run that was begun with fewer."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from panorgan.errors import RunError
from panorgan.workflows.execute import train
from panorgan.workflows.extend import in_words
from panorgan.workflows.run import Run

CONSTANT = {"learning_rate": 0.01, "schedule": "constant"}


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.model_folder / "model.safetensors")


def training(rounds: int, **optimizer: object) -> dict[str, object]:
    return {"rounds": rounds, "validate_every": 1, "select": "last", "optimizer": {**CONSTANT, **optimizer}}


@pytest.fixture(scope="module")
def two_rounds(tiny, tmp_path_factory):
    return train(tiny(training=training(2)), tmp_path_factory.mktemp("short") / "run").path


@pytest.fixture
def short(two_rounds, tmp_path):
    """A finished run of two rounds, to extend."""
    return Run(shutil.copytree(two_rounds, tmp_path / "run"))


def test_with_a_constant_rate_it_is_the_longer_run(short, tiny, tmp_path):
    before = short.scores_file.read_bytes()
    heard = []
    longer = train(tiny(training=training(3)), short.path, resume=True, listeners=(heard.append,))
    straight = train(tiny(training=training(3)), tmp_path / "straight")
    expected = weights(straight)
    assert all(torch.equal(value, expected[key]) for key, value in weights(longer).items())
    assert longer.scores_file.read_bytes() == straight.scores_file.read_bytes()
    assert longer.delivered_round == longer.total_rounds == 3
    assert (longer.path / "metrics-2-rounds.csv").read_bytes() == before
    earlier = longer.manifest["extended"]
    assert [(entry["rounds"], entry["rounds_done"], entry["delivered_round"]) for entry in earlier] == [(2, 2, 2)]
    assert longer.manifest["fingerprint"] == straight.manifest["fingerprint"]
    assert [event.facts["number"] for event in heard if event.facts.get("code") == "extended"] == [3]
    assert [event.facts["extended"] for event in heard if event.kind == "resumed"] == [True]
    validated = [(event.facts["site"], event.facts["done"]) for event in heard if event.kind == "validate"]
    assert ("north", 0) in validated
    assert len(validated) > len({site for site, _ in validated})  # one by one


def test_extended_twice_it_remembers_both(short, tiny):
    train(tiny(training=training(3)), short.path, resume=True)
    run = train(tiny(training=training(4)), short.path, resume=True)
    assert [entry["rounds"] for entry in run.manifest["extended"]] == [2, 3]
    assert run.total_rounds == 4


def test_fewer_rounds_or_other_settings_are_another_experiment(short, tiny):
    for other in (training(1), {**training(3), "local_steps": 3}):
        with pytest.raises(RunError) as raised:
            train(tiny(training=other), short.path, resume=True)
        assert raised.value.code == "other-experiment"
    assert short.complete


def test_without_resume_a_run_is_never_extended(short, tiny):
    with pytest.raises(RunError) as raised:
        train(tiny(training=training(3)), short.path)
    assert raised.value.code == "run-exists"


def test_methods_with_other_stages_are_refused(tiny, tmp_path):
    changes = {"method": {"name": "fedavg_pl"}}
    run = train(tiny(**changes, training=training(1)), tmp_path / "run")
    with pytest.raises(RunError) as raised:
        train(tiny(**changes, training=training(2)), run.path, resume=True)
    assert raised.value.code == "cannot-extend"
    assert run.complete


def test_it_says_what_the_rate_does(tiny):
    poly = in_words(40, 40, tiny(training=training(80, schedule="poly")))
    assert "0.00036 in round 40" in poly  # 0.01 · (1/40)^0.9
    assert "0.0054 in round 41" in poly  # 0.01 · (1/2)^0.9
    assert "0.01" in in_words(40, 40, tiny(training=training(80)))
