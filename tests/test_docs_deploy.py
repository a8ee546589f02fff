"""The deployment guide names real commands, settings, failure codes and preflight checks."""

from __future__ import annotations

import re
from pathlib import Path

import typer
import yaml

from panorgan.cli.main import app
from panorgan.deployment.settings import CoordinatorFile, FederationSettings, SiteFile
from panorgan.federation.failures import CODES
from panorgan.federation.limits import HospitalLimits
from panorgan.settings import validated

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "deploy.md").read_text()


def test_its_federation_file_is_valid():
    first, site = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL))
    settings = validated(FederationSettings, first, "docs/deploy.md")
    assert list(settings.sites) == ["north", "east", "south"]
    assert settings.rounds.on_missing == "wait"
    assert settings.limits == HospitalLimits(), "it shows the defaults"
    assert set(site) <= SiteFile.model_fields.keys()


def test_the_example_file_shows_the_limits_that_hold():
    example = yaml.safe_load((ROOT / "src" / "panorgan" / "cli" / "federation.example.yaml").read_text())
    assert validated(FederationSettings, example, "example").limits == HospitalLimits()
    assert example["limits"].keys() == HospitalLimits.model_fields.keys()


def test_its_commands_and_options_exist():
    commands = typer.main.get_command(app).commands
    federation = commands["federation"].commands
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", PAGE, flags=re.DOTALL))
    named = re.findall(r"panorgan (federation )?([a-z]+)([^#`\n]*)", code)
    assert len(named) > 15
    for group, name, rest in named:
        known = federation if group else commands
        assert name in known, name
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, (name, rest)
    assert [name for name in federation if f"`{name}`" not in PAGE] == []


def test_every_failure_code_is_explained():
    assert [code for code in CODES if f"| `{code}` |" not in PAGE] == []


def test_defaults_it_quotes():
    fields = FederationSettings.model_fields
    assert f"`heartbeat_seconds`, {fields['heartbeat_seconds'].default} by default" in PAGE
    assert f"valid for {fields['certificate_days'].default} days" in PAGE
    assert "run" in CoordinatorFile.model_fields


def test_the_trial_behind_firewalls_is_there():
    script = ROOT / "benchmarks" / "network_namespaces.sh"
    assert str(script.relative_to(ROOT)) in PAGE
    assert script.stat().st_mode & 0o100  # may be run as it is
