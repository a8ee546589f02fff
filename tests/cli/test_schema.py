"""The JSON schemas of the settings files: fresh, true of every example, and strict about names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from invoking import invoke
from json_schema import problems
from refusing import refused

from panorgan.cli.schema import FILES, schema

ROOT = Path(__file__).parents[2]
EXPERIMENTS = [
    *sorted((ROOT / "examples").rglob("*.yaml")),
    *sorted((ROOT / "benchmarks" / "experiments").glob("*.yaml")),
]
FEDERATION = ROOT / "src" / "panorgan" / "cli" / "federation.example.yaml"


def wrong(name, content):
    return list(problems(schema(name), content))


@pytest.mark.parametrize("name", FILES)
def test_the_stored_schemas_are_fresh(name):
    stored = ROOT / "docs" / "schemas" / f"{name}.json"
    assert json.loads(stored.read_text()) == schema(name), (
        f"stale; write it anew: panorgan schema {name} > docs/schemas/{name}.json"
    )


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_example_is_valid_and_leads_its_editor_to_the_schema(path):
    assert wrong("experiment", yaml.safe_load(path.read_text())) == []
    if path.is_relative_to(ROOT / "examples"):
        first = path.read_text().splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema=")
        assert (path.parent / first.partition("=")[2]).resolve() == ROOT / "docs" / "schemas" / "experiment.json"


def test_the_example_of_a_federation_is_valid_also_with_bare_names():
    content = yaml.safe_load(FEDERATION.read_text())
    assert wrong("federation", content) == []
    assert wrong("federation", {**content, "sites": ["north", "east"]}) == []
    assert wrong("federation", {**content, "sites": {"north": None}}) == []
    assert wrong("federation", {**content, "sites": "north"}) != []
    assert wrong("federation", {**content, "certificate_day": 3}) == [".certificate_day is not known"]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"trainin": {}}, ".trainin"),
        ({"training": {"rounds": 0}}, ".training.rounds"),
        ({"training": {"sampling": {"patch_size": [16, 16]}}}, ".training.sampling.patch_size"),
        ({"method": {"name": "fedprox", "muu": 1}}, ".method"),
        ({"method": {"name": "nobody"}}, ".method"),
        ({"sites": {"a": {"folder": "x", "external": "perhaps"}}}, ".sites.a.external"),
    ],
)
def test_what_is_wrong_is_found_where_it_is(tiny_content, changes, place):
    assert wrong("experiment", tiny_content()) == []
    (found,) = wrong("experiment", {**tiny_content(), **changes})
    assert found.startswith(place)


def test_a_phantom_brings_its_own_organs_and_folders_do_not():
    assert wrong("experiment", {"phantom": {}, "local_models": True}) == []
    assert len(wrong("experiment", {"sites": {"a": {"folder": "x"}}})) == 1


def test_the_command_prints_one(capfd, monkeypatch):
    code, out, _ = invoke(capfd, monkeypatch, "schema", "site")
    assert (code, json.loads(out)) == (0, schema("site"))
    with refused("unknown-schema"):
        schema("experimnt")
