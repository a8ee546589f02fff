"""Organs that the catalogue does not know, described in the federation file, are part of every kit's experiment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kit_making import federation
from refusing import refused

from panorgan.anatomy import catalogue
from panorgan.anatomy.catalogue import remove_added
from panorgan.config import load_agreement
from panorgan.deployment.kit_files import load_federation
from panorgan.deployment.kit_texts import experiment_text


@pytest.fixture
def described(tmp_path: Path) -> Iterator[Path]:
    """A federation file with an own organ, beside an experiment with another."""
    remove_added()
    content = yaml.safe_load(federation().model_dump_json())
    content |= {"experiment": "experiment.yaml", "organs": {"zorbium": {"colour": "#123456"}, "zorb_cyst": None}}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(content))
    experiment = {"organs": ["glimmer"], "vocabulary": ["liver", "zorbium", "glimmer"], "sites": {"a": {"folder": "x"}}}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    yield tmp_path
    remove_added()


def test_both_files_may_describe_organs(described: Path) -> None:
    _, agreement = load_federation(described / "federation.yaml")
    assert list(agreement.organs) == ["glimmer", "zorb_cyst", "zorbium"]
    assert agreement.vocabulary == ("liver", "zorbium", "glimmer")
    kept = described / "agreed.yaml"
    kept.write_text(experiment_text("pilot", agreement))
    remove_added()  # as at a hospital
    assert load_agreement(kept).fingerprint() == agreement.fingerprint()
    assert catalogue()["zorbium"].colour == "#123456"


def test_one_organ_is_described_once(described: Path) -> None:
    experiment = described / "experiment.yaml"
    experiment.write_text(experiment.read_text().replace("- glimmer", "- zorbium", 1))
    with refused("organ-described-twice"):
        load_federation(described / "federation.yaml")
