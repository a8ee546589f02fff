"""`panorgan train --beside`: other methods in the same report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from panorgan.cli.main import app
from panorgan.errors import ConfigError

QUICK = ["--set", "training.rounds=1", "--set", "training.local_steps=1", "--set", "training.validate_every=0"]


@pytest.fixture(scope="module")
def experiment_file(tiny_content, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content()))
    return path


def test_other_methods_are_trained_shown_and_not_trained_again(experiment_file, tmp_path) -> None:
    run = tmp_path / "run"
    command = ["train", str(experiment_file), "--run", str(run), *QUICK]
    first = CliRunner().invoke(app, [*command, "--beside", "solo"], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    assert "north alone" in first.output
    assert 'id="beside"' in (run / "report.html").read_text()
    before = (run / "beside" / "solo" / "metrics.csv").stat().st_mtime_ns
    again = CliRunner().invoke(app, [*command, "--beside", "solo, central_full", "--resume", "--json"])
    assert again.exit_code == 0, again.output
    shown = json.loads(again.output.splitlines()[-1])["result"]["beside"]
    assert set(shown) == {"north alone", "south alone", "solo", "central_full"}
    assert (run / "beside" / "solo" / "metrics.csv").stat().st_mtime_ns == before


@pytest.mark.parametrize(("beside", "complaint"), [("nonsense", "nonsense"), ("fedavg", "itself")])
def test_a_wrong_method_is_refused_before_anything_is_trained(experiment_file, tmp_path, beside, complaint) -> None:
    run = tmp_path / "run"
    command = ["train", str(experiment_file), "--run", str(run), *QUICK, "--beside", beside]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)
    assert not run.exists()
