"""`joins_at` in a whole run: the plan without the newcomer, the run folder, kills around the join, and bad values."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
from dying_run import train_and_die

from panorgan.config import parse_experiment
from panorgan.errors import ConfigError
from panorgan.federation.events import read_events
from panorgan.report.page import render
from panorgan.workflows.execute import train
from panorgan.workflows.prepare import make_plan, prepare
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import site_settings

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dying_run"])

TRAINING = {"rounds": 4, "validate_every": 2, "local_steps": 1, "optimizer": {"keep_state": True}}


def with_late_south(content: dict[str, Any], joins_at: int = 3) -> dict[str, Any]:
    content["phantom"]["sites"][1]["joins_at"] = joins_at
    return content


@pytest.fixture(scope="module")
def content(tiny_content) -> dict[str, Any]:
    return with_late_south(tiny_content(training=TRAINING, local_models=True))


def outcome(folder: Path) -> list[bytes]:
    names = ["model/model.safetensors", "metrics.csv", "local_models.csv"]
    names += [f"local_models/{name}.safetensors" for name in ("north", "south", "global")]
    return [(folder / name).read_bytes() for name in names]


@pytest.fixture(scope="module")
def finished(content, cache, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("late") / "run"
    train(parse_experiment(content), folder, cache=cache)
    return folder


def test_the_run_folder_tells_of_the_join(finished):
    kinds = [event.kind for event in read_events(finished / "events.jsonl")]
    assert kinds == ["started", "split", "joined", "round", "round", "late_join", "round", "round", "finished"]
    record = Run(finished)
    assert {site.name: site.joined_in for site in record.training_sites} == {"north": 1, "south": 3}
    (south,) = [site for site in record.sites if site.name == "south"]
    assert south.labelled_cases["spleen"] == 2
    page = " ".join(render(record, {}).split())
    assert "from round 3</span>" in page
    assert "Round 3: south joined, with 2 training cases of kidney, spleen." in page


KILL_POINTS = {
    # function to interrupt, which call of it, whether it still does its work before the kill
    "before the newcomer is asked": ("panorgan.federation.coordinator.Coordinator._admit", 0, False),
    "the newcomer is in the checkpoint, not in the log": ("panorgan.federation.checkpoint.Checkpoints.save", 3, True),
    "in the newcomer's first steps": ("panorgan.methods.base.SiteRule.step", 3, True),
    "one local model is written": ("panorgan.federation.local_models.write_atomically", 0, True),
    "local models are written, the checkpoint is not": ("panorgan.federation.checkpoint.Checkpoints.save", 5, False),
    "before local_models.csv is in place": ("panorgan.workflows.execute.write_metrics", 0, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", KILL_POINTS.values(), ids=KILL_POINTS.keys())
def test_killed_around_the_join_then_resumed(point, content, cache, finished, tmp_path):
    folder = tmp_path / "run"
    child = CONTEXT.Process(target=train_and_die, args=(content, folder, cache, point))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL, "the kill point was never reached"
    train(parse_experiment(content), folder, resume=True, cache=cache)
    assert outcome(folder) == outcome(finished)
    kinds = [event.kind for event in read_events(folder / "events.jsonl")]
    assert [kind for kind in kinds if kind in ("joined", "late_join")] == ["joined", "late_join"]


# -- the plan and the data -----------------------------------------------------------------------------------


def test_who_joins_later_has_no_say_in_the_plan(tiny_content):
    """As between hospitals: the plan is made by those who are there. Pooled data knows no late site."""
    pooled = {"plan": {"spacing_mm": "pooled", "window_hu": "pooled"}}
    plan, statistics = make_plan(parse_experiment(with_late_south(tiny_content(**pooled))))
    assert set(statistics) == {"north"}
    assert plan.spacing_mm == (12, 12, 12)
    central = with_late_south(tiny_content(**pooled, method={"name": "central_full"}))
    assert set(make_plan(parse_experiment(central))[1]) == {"north", "south"}


def test_the_scans_do_not_depend_on_when_a_site_joins(tiny, tiny_content, cache):
    early, late = tiny(), parse_experiment(with_late_south(tiny_content()))
    folders = [
        {name: site.folder for name, site in site_settings(experiment, cache, lambda *_: None).items()}
        for experiment in (early, late)
    ]
    assert folders[0] == folders[1]
    assert site_settings(late, cache, lambda *_: None)["south"].joins_at == 3
    assert [s.content for s in prepare(early).sites] == [s.content for s in prepare(late).sites]


def test_pooled_methods_take_all_cases_from_the_first_round(tiny, tiny_content, tmp_path):
    training = {"rounds": 2, "validate_every": 0, "local_steps": 1}
    method = {"name": "central_partial"}
    late = parse_experiment(with_late_south(tiny_content(training=training, method=method), joins_at=9))
    train(late, tmp_path / "late")
    train(tiny(training=training, method=method), tmp_path / "early")
    weights = "model/model.safetensors"
    assert (tmp_path / "late" / weights).read_bytes() == (tmp_path / "early" / weights).read_bytes()


# -- bad values ----------------------------------------------------------------------------------------------


def test_a_site_that_would_never_join(tiny_content):
    assert parse_experiment(with_late_south(tiny_content(), joins_at=3)).late_sites() == {"south": 3}
    with pytest.raises(ConfigError, match="Site south would never join") as caught:
        parse_experiment(with_late_south(tiny_content(), joins_at=4))
    assert "3 rounds in all" in caught.value.why
    assert "south" in caught.value.where
    assert caught.value.fix


def test_rounds_of_all_stages_count(tiny_content, monkeypatch):
    """A method that pre-trains for two rounds: round 5 of the run is round 3 of training."""
    from panorgan.methods.fedavg import FedAvg
    from panorgan.methods.protocol import Stage

    stages = lambda self, rounds: (Stage("pretrain", 2), Stage("train", rounds))  # noqa: E731
    monkeypatch.setattr(FedAvg, "stages", stages)
    assert parse_experiment(with_late_south(tiny_content(), joins_at=5)).late_sites() == {"south": 5}
    with pytest.raises(ConfigError, match="never join"):
        parse_experiment(with_late_south(tiny_content(), joins_at=6))


def test_somebody_must_begin(tiny_content):
    content = with_late_south(tiny_content(), joins_at=2)
    content["phantom"]["sites"][0]["joins_at"] = 3
    with pytest.raises(ConfigError, match="No site takes part in the first round, 1 must") as caught:
        parse_experiment(content)
    assert "north, south" in caught.value.why
    with pytest.raises(ConfigError, match="1 site takes part in the first round, 2 must"):
        parse_experiment(with_late_south(tiny_content(training={"min_sites": 2})))


def test_external_sites_never_join(tiny_content, tmp_path):
    content = tiny_content()
    content["phantom"]["sites"][2]["joins_at"] = 2
    with pytest.raises(ConfigError, match="An external site never joins"):
        parse_experiment(content)
    sites = {"island": {"folder": str(tmp_path), "external": True, "joins_at": 2}}
    with pytest.raises(ConfigError) as caught:
        parse_experiment({"vocabulary": ["liver"], "sites": sites})
    assert "an external site never joins" in caught.value.why


@pytest.mark.parametrize("value", [1, 0, 2.5])
def test_the_first_round_is_no_late_one(tiny_content, value):
    with pytest.raises(ConfigError, match="cannot be used as written"):
        parse_experiment(with_late_south(tiny_content(), joins_at=value))
