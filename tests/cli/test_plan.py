"""`panorgan plan`."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from panorgan.cli.main import app
from panorgan.config import parse_experiment


@pytest.fixture
def experiment_file(tmp_path, tiny_content):
    content = tiny_content()
    content["plan"] = {"crop": "body"}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_printed_lines_fix_what_was_measured(experiment_file) -> None:
    result = CliRunner().invoke(app, ["plan", str(experiment_file)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "north" in result.output
    assert "island" not in result.output  # external: no say in the plan
    lines = result.output[result.output.index("plan:\n") :].split("Settings that suit")
    content = {**yaml.safe_load(experiment_file.read_text()), **yaml.safe_load(lines[0])}
    experiment = parse_experiment(content)
    assert not experiment.plan.measures
    assert experiment.plan.crop == "body"
    assert experiment.plan.spacing_mm == (12, 12, 12)  # three training cases of 12 mm, two of 11 × 11 × 13 mm


def test_json_has_the_numbers_that_would_travel(experiment_file) -> None:
    result = CliRunner().invoke(app, ["plan", str(experiment_file), "--json"], catch_exceptions=False)
    reported = json.loads(result.output.splitlines()[-1])["result"]
    assert set(reported["sites"]) == {"north", "south"}
    assert reported["sites"]["north"]["plan/cases"] == 3
    assert reported["plan"]["intensity"] == "window"
    assert reported["plan"]["window_hu"][0] < reported["plan"]["window_hu"][1]


def test_what_is_said_stays(experiment_file) -> None:
    arguments = ["plan", str(experiment_file), "--set", "plan.spacing_mm=[20, 20, 20]", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(result.output.splitlines()[-1])["result"]["plan"]["spacing_mm"] == [20, 20, 20]


def test_the_sizes_of_the_split_are_shown(experiment_file) -> None:
    reported = CliRunner().invoke(app, ["plan", str(experiment_file), "--json"], catch_exceptions=False).output
    patients = json.loads(reported.splitlines()[-1])["result"]["patients"]
    assert patients["north"] == {"train": 3, "validation": 1, "test": 1}
    assert patients["south"] == {"train": 2, "validation": 1, "test": 1}
    shown = CliRunner().invoke(app, ["plan", str(experiment_file)], catch_exceptions=False, env={"COLUMNS": "160"})
    assert "3, 1, 1" in shown.output
