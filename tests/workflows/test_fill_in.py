"""Settings go into a YAML file without touching anything else in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from panorgan.errors import ConfigError
from panorgan.workflows.fill_in import filled_in, is_set

TEXT = """\
# An experiment.
name: liver   # its name
network:
  residual: true   # keep

training:        # how
  rounds: 7
  sampling: {foreground: 0.5}   # inline
  # a remark about nothing

splits: {}
method:
  name: fedavg"""
HERE = Path("experiment.yaml")


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({"training.local_steps": 9}, ["  local_steps: 9"]),
        ({"network.features": [8, 16]}, ["  features: [8, 16]"]),
        ({"training.optimizer.learning_rate": 0.1}, ["  optimizer:", "    learning_rate: 0.1"]),
        ({"method.mu": 0.5}, ["  mu: 0.5"]),
        ({"plan.crop": "body"}, ["plan:", "  crop: body"]),
    ],
)
def test_lines_are_added_and_no_other_is_touched(settings, added):
    after = filled_in(TEXT, settings, HERE).splitlines()
    assert [line for line in after if line not in TEXT.splitlines()] == added
    assert [line for line in after if line in TEXT.splitlines()] == TEXT.splitlines()


def test_inline_mappings_are_filled():
    after = filled_in(TEXT, {"training.sampling.batch_size": 3, "splits.test": 0.5}, HERE)
    assert "  sampling: {foreground: 0.5, batch_size: 3}   # inline" in after
    assert "splits: {test: 0.5}" in after


def test_values_are_replaced_where_they_stand():
    after = filled_in(TEXT, {"training.rounds": 70, "name": "spleen"}, HERE)
    assert "name: spleen   # its name" in after
    assert yaml.safe_load(after)["training"]["rounds"] == 70
    assert len(after.splitlines()) == len(TEXT.splitlines())


def test_an_empty_group_gets_its_settings():
    after = filled_in("name: a\nnetwork:\ntraining:  # later\n", {"network.dropout": 0.1, "training.rounds": 2}, HERE)
    assert yaml.safe_load(after) == {"name": "a", "network": {"dropout": 0.1}, "training": {"rounds": 2}}
    assert "# later" in after


def test_a_file_that_cannot_be_filled_in_is_left_alone():
    text = "base: &base {rounds: 3}\ntraining: *base\n"  # one node in two places
    with pytest.raises(ConfigError) as raised:
        filled_in(text, {"training.rounds": 5}, HERE)
    assert raised.value.code == "not-filled-in"
    assert "training.rounds: 5" in raised.value.fix


def test_is_set():
    content = yaml.safe_load(TEXT)
    assert is_set(content, "training.sampling.foreground")
    assert not is_set(content, "training.sampling.batch_size")
    assert not is_set(content, "method.name.mu")
    assert not is_set({"network": None}, "network")
