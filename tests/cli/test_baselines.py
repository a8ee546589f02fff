"""`panorgan train --baselines`: other methods in the same report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from panorgan.cli.main import app
from panorgan.config import parse_experiment
from panorgan.errors import ConfigError, RunError
from panorgan.workflows.run import Run
from panorgan.workflows.site_cases import site_settings

QUICK = ["--set", "training.rounds=1", "--set", "training.local_steps=1", "--set", "training.validate_every=0"]


@pytest.fixture(scope="module")
def experiment_file(tiny_content, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content()))
    return path


def test_other_methods_are_trained_shown_and_not_trained_again(experiment_file, tmp_path) -> None:
    run = tmp_path / "run"
    command = ["train", str(experiment_file), "--run", str(run), *QUICK]
    first = CliRunner().invoke(app, [*command, "--baselines", "solo"], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    assert "north alone" in first.output
    assert re.search(r"delivered round +│( +1 of 1 +│){4}", first.output)
    assert 'id="baselines"' in (run / "report.html").read_text()
    before = (run / "beside" / "solo" / "metrics.csv").stat().st_mtime_ns
    again = CliRunner().invoke(app, [*command, "--baselines", "solo, central_full, solo", "--resume", "--json"])
    assert again.exit_code == 0, again.output
    shown = json.loads(again.output.splitlines()[-1])["result"]["beside"]
    assert set(shown) == {"north alone", "south alone", "solo", "central_full"}
    assert (run / "beside" / "solo" / "metrics.csv").stat().st_mtime_ns == before


def test_data_that_changed_in_between_is_noticed(tiny_content, tmp_path) -> None:
    """Other test cases beside the old ones would be no comparison."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content(name="a")))
    run = tmp_path / "run"
    assert CliRunner().invoke(app, ["train", str(path), "--run", str(run), *QUICK]).exit_code == 0
    manifest = Run(run).manifest
    (run / "manifest.json").write_text(json.dumps(manifest | {"test_fingerprint": "of other cases"}))
    result = CliRunner().invoke(app, ["train", str(path), "--run", str(run), *QUICK, "--resume", "--baselines", "solo"])
    assert isinstance(result.exception, RunError)
    assert "same cases" in str(result.exception)


def test_what_is_missing_for_another_method_shows_before_training(tiny_content, tmp_path, cache) -> None:
    """central_full needs full labels; phantoms have them, so a site without is made of a phantom's folder."""
    content = tiny_content()
    settings = site_settings(parse_experiment(content), cache, lambda *_: None)
    del content["phantom"]
    content["sites"] = {name: {"folder": str(settings[name].folder)} for name in ("north", "south")}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    command = ["train", str(path), "--run", str(tmp_path / "run"), *QUICK, "--baselines", "central_full"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert "full labels" in str(result.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("baselines", "named"), [("nonsense", "'nonsense'"), ("fedavg", "'fedavg'")])
def test_a_wrong_method_is_refused_before_anything_is_trained(experiment_file, tmp_path, baselines, named) -> None:
    run = tmp_path / "run"
    command = ["train", str(experiment_file), "--run", str(run), *QUICK, "--baselines", baselines]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert named in result.exception.what
    assert (result.exception.code == "beside-itself") == (baselines == "fedavg")
    assert not run.exists()


def test_the_old_name_of_the_option_still_works_and_says_so(experiment_file, tmp_path) -> None:
    command = ["train", str(experiment_file), "--run", str(tmp_path / "run"), *QUICK, "--beside", "fedavg"]
    result = CliRunner().invoke(app, command)
    assert result.stderr.count("--baselines") == 1
    assert isinstance(result.exception, ConfigError)
    assert result.exception.code == "beside-itself", "the method that it names was taken"
    assert "--beside" not in CliRunner().invoke(app, ["train", "--help"]).output
