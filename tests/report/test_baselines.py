"""The baselines of a run: what the table holds, from hand-written scores."""

from __future__ import annotations

import json

import pytest

from panorgan.evaluation.metrics import METRICS
from panorgan.evaluation.statistics import summarise
from panorgan.report.baselines import BaselineModel, baseline_models, baseline_rows, gains
from panorgan.report.page import render
from panorgan.workflows.execute import train
from panorgan.workflows.run import Run
from panorgan.workflows.tables import read_metrics, write_metrics


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Run:
    folder = Run(tmp_path_factory.mktemp("baselines") / "run")
    experiment = tiny(training={"rounds": 1, "local_steps": 1, "validate_every": 0})
    train(experiment, folder.path)
    train(experiment.with_method("solo"), folder.baseline("solo").path)
    return folder


def test_each_sites_own_model_is_scored_on_what_it_knows(run) -> None:
    rows = read_metrics(run.baseline("solo").own_models_file)
    known = {model: {row["organ"] for row in rows if row["model"] == model} for model in ("north", "south")}
    # South was taught both kidneys as one: it cannot be asked for a single side, as which they are scored.
    assert known == {"north": {"liver"}, "south": {"spleen"}}
    # Every model is scored on all test cases, external ones too, not only on its own site's.
    assert {row["site"] for row in rows if row["model"] == "north"} == {"north", "south", "island"}


def test_a_run_without_baselines_has_no_table(tiny, tmp_path) -> None:
    train(tiny(training={"rounds": 1, "local_steps": 1, "validate_every": 0}), tmp_path / "run")
    record = Run(tmp_path / "run")
    assert baseline_models(record) == ()
    assert 'id="baselines"' not in render(record, {})


def test_the_page_shows_every_model_and_what_it_does_not_know(run) -> None:
    record = Run(run.path)
    models = baseline_models(record)
    assert [model.name for model in models] == ["fedavg", "north alone", "south alone", "solo"]
    assert [model.is_this_run for model in models] == [True, False, False, False]
    page = render(record, {})
    section = page[page.index('id="baselines"') : page.index('id="scores"')]
    assert "north alone" in section
    assert "unknown" in section
    assert [model.delivered for model in models] == ["1 of 1"] * 4
    assert section.count("<td>1 of 1</td>") == 4


def test_means_are_over_the_test_cases_of_the_federation(run) -> None:
    """Hand-written scores: external rows do not count, and a model that lacks an organ has no mean for it."""

    def row(model: str, split: str, case: str, organ: str, dice: float) -> dict[str, object]:
        metrics = dict.fromkeys(METRICS, 0.5)
        return {"model": model, "split": split, "site": "north", "case": case, "organ": organ, **metrics, "dice": dice}

    rows = [
        row("north", "test", "a", "liver", 0.5),
        row("north", "test", "b", "liver", 0.9),
        row("north", "external", "c", "liver", 0.0),
        row("south", "test", "a", "spleen", 0.25),
    ]
    own = run.baseline("solo").own_models_file
    kept = own.read_bytes()
    try:
        write_metrics(own, rows, own_models=True)
        record = Run(run.path)
        models = baseline_models(record)
        by_name = {model.name: model for model in models}
        assert by_name["north alone"].organs["liver"].mean == pytest.approx(0.7)
        assert by_name["north alone"].overall.mean == pytest.approx(0.7)
        assert set(by_name["south alone"].organs) == {"spleen"}
        table = dict(baseline_rows(models, ["liver", "spleen"]))
        assert [cell.text for cell in table["liver"]][1:3] == ["0.70", "unknown"]
        assert [cell.text for cell in table["spleen"]][1:3] == ["unknown", "0.25"]
    finally:
        own.write_bytes(kept)


def test_a_baseline_scored_on_other_cases_is_not_shown(run) -> None:
    baseline = run.baseline("solo")
    kept = baseline.manifest_file.read_text()
    try:
        baseline.manifest_file.write_text(json.dumps({**baseline.manifest, "test_fingerprint": "other"}))
        assert baseline_models(Run(run.path)) == ()
    finally:
        baseline.manifest_file.write_text(kept)


def test_an_unfinished_baseline_is_not_shown(run) -> None:
    half = run.baseline("central_full").path
    half.mkdir(parents=True)
    (half / "manifest.json").write_text(json.dumps({}))
    assert list(run.baselines()) == ["solo"]


def test_a_baseline_is_compared_on_the_organs_that_it_knows():
    def model(name, **dice):
        organs = {organ: summarise([value, value]) for organ, value in dice.items()}
        return BaselineModel(name, "", organs, summarise(list(dice.values())), "1 of 1")

    whole = model("all", liver=0.9, spleen=0.5)
    found = gains([whole, model("pooled", liver=0.2, spleen=0.4), model("a alone", liver=0.904)])
    assert [(gain.name, gain.known, gain.difference) for gain in found] == [("a alone", 1, 0.0), ("pooled", 2, 0.4)]
    assert [round(gain.this_run, 3) for gain in found] == [0.9, 0.7]
    assert gains([]) == []
