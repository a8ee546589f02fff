"""`panorgan plan`."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from panorgan.cli.main import app
from panorgan.config import parse_experiment
from panorgan.workflows.patch_size import oversized_patch


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
    lines = result.output[result.output.index("plan:\n") :].split("The file sets network")
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


# -- writing -----------------------------------------------------------------------------------------------------------

BARE = """\
# our first trial
vocabulary: [liver, spleen, kidney_left, kidney_right]   # all of them
phantom:
  field_of_view_mm: [364, 320, 220]
  sites:
    - {name: north, annotated: [liver], cases: 5, spacing_mm: [12, 12, 12]}
    - {name: south, annotated: [spleen, kidney], cases: 4, spacing_mm: [12, 12, 12]}
training:
  rounds: 3   # we are in a hurry
"""


@pytest.fixture
def bare_file(tmp_path):
    path = tmp_path / "bare.yaml"
    path.write_text(BARE)
    return path


def planned(path, *arguments) -> dict:
    command = ["plan", str(path), "--minutes", "5", *arguments, "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    return json.loads(result.output.splitlines()[-1])["result"]


def test_it_fills_in_what_is_not_set(bare_file):
    result = planned(bare_file, "--write")
    text = bare_file.read_text()
    assert [line for line in BARE.splitlines() if line not in text.splitlines()] == []
    experiment = parse_experiment(yaml.safe_load(text))
    assert experiment.training.rounds == 3
    assert list(experiment.network.features) == result["settings"]["network.features"]
    assert list(experiment.training.sampling.patch_size) == result["patch_size"]
    assert not experiment.plan.measures
    assert result["estimate"]["rounds"] == 3
    assert planned(bare_file, "--write")["settings"].keys() <= {"network.dimensions", "network.strides"}
    assert bare_file.read_text() == text


def test_a_new_file_has_everything_proposed(bare_file):
    new = bare_file.with_name("new.yaml")
    result = planned(bare_file, "--write-to", str(new))
    assert bare_file.read_text() == BARE
    experiment = parse_experiment(yaml.safe_load(new.read_text()))
    assert experiment.training.rounds == result["settings"]["training.rounds"] > 3
    assert "# our first trial" in new.read_text()


@pytest.mark.parametrize(("name", "code"), [("bare.yaml", "plan-file-exists"), ("sub/new.yaml", "written-elsewhere")])
def test_new_files_stand_beside_the_old_one(bare_file, name, code):
    (bare_file.parent / "sub").mkdir()
    arguments = ["plan", str(bare_file), "--write-to", str(bare_file.parent / name)]
    result = CliRunner().invoke(app, arguments)
    assert result.exception.code == code
    assert bare_file.read_text() == BARE


def test_a_patch_that_is_larger_than_the_scans_is_told(experiment_file) -> None:
    options = ["--set", "training.sampling.patch_size=[160, 160, 160]", "--json"]
    result = CliRunner().invoke(app, ["plan", str(experiment_file), *options], catch_exceptions=False)
    notices = json.loads(result.output.splitlines()[-1])["result"]["notices"]
    assert [notice["code"] for notice in notices] == ["patch-larger-than-scans"]
    usual = CliRunner().invoke(app, ["plan", str(experiment_file)], catch_exceptions=False).output
    assert "patch-larger-than-scans" not in usual
    assert usual.splitlines()[-1] == f"Next: panorgan train {experiment_file}"


def test_how_much_larger_a_patch_is() -> None:
    assert oversized_patch([32, 32, 32], [32, 20, 20]) == ""
    assert oversized_patch([32, 32, 1], [20, 20, 20]) == ""
    assert oversized_patch([32, 32, 32], []) == ""
    assert "64.0 times as large" in oversized_patch([32, 32, 32], [8.0, 8.0, 8.0])
