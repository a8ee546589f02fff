"""`panorgan federation approve`: what it says, and that a command of a federation imports nothing from a kit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit_making import EXPERIMENT, federation
from typer.testing import CliRunner

pytest.importorskip("nvflare", reason="the network extra is not installed")

from panorgan.cli.main import app
from panorgan.deployment.approval import deviations, reopen
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.kits import make_kits


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of a federation set it for what they start; not for the tests that follow."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kits(federation(), EXPERIMENT, tmp_path_factory.mktemp("kits") / "pilot").folder


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> SiteKit:
    return SiteKit(Path(shutil.copytree(made / "sites" / "north", tmp_path / "north")))


def reported(*words: object) -> dict[str, object]:
    result = CliRunner().invoke(app, ["federation", "approve", *map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_approve_edit_approve(kit: SiteKit) -> None:
    first = reported(kit.path)
    assert (first["approved"], first["first"]) == (str(kit.path), True)
    assert not deviations(kit)
    assert reported(kit.path, "--edit") == {"editable": str(kit.local)}
    kit.egress_policy.write_text("weights: true\n")
    again = reported(kit.path)
    assert (again["first"], again["changed"]) == (False, ["local/egress.yaml"])
    assert not deviations(kit)


def test_people_are_told_what_is_other_than_before(kit: SiteKit) -> None:
    reported(kit.path)
    reopen(kit)
    kit.egress_policy.write_text("weights: true\n")
    result = CliRunner().invoke(app, ["federation", "approve", str(kit.path)])
    assert result.exit_code == 0
    assert "local/egress.yaml" in result.stdout
    assert f"panorgan federation preflight {kit.path}" in result.stdout


def test_a_kit_that_is_not_filled_in_is_approved_with_a_word_about_it(kit: SiteKit) -> None:
    words = CliRunner().invoke(app, ["federation", "approve", str(kit.path)]).stdout
    assert "data folder is not filled in" in words
    reopen(kit)
    kit.settings.write_text(re.sub('folder: ".*"', f"folder: {kit.path}", kit.settings.read_text()))
    assert reported(kit.path)["trouble"] is None
    assert "not filled in" not in CliRunner().invoke(app, ["federation", "approve", str(kit.path)]).stdout


@pytest.mark.parametrize(
    ("folder", "code"),
    [
        ("foldr: /data", "data-folder-blank"),
        ("folder: /nowhere/at/all", "folder-missing"),
        ("folder: /\n  layot: auto", "unknown-setting"),
        ("folder: [", "not-yaml"),
    ],
)
def test_approval_names_what_keeps_the_site_from_taking_part(kit: SiteKit, folder: str, code: str) -> None:
    kit.settings.write_text(re.sub('folder: ".*"', folder, kit.settings.read_text()))
    trouble = reported(kit.path)["trouble"]
    assert trouble["code"] == code
    words = CliRunner().invoke(app, ["federation", "approve", str(kit.path)]).stdout
    assert f"[{code}]" in words
    assert trouble.get("why", "").splitlines()[:1] == [] or trouble["why"].splitlines()[0] in words


def test_a_servers_kit_is_not_approved(made: Path) -> None:
    assert CliRunner().invoke(app, ["federation", "approve", str(made / "server")]).exit_code != 0


def test_a_command_of_a_federation_keeps_the_working_folder_off_the_path_of_what_it_starts(
    kit: SiteKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preflight reads scans in processes of its own, from within the kit."""
    (kit.path / "planted.py").write_text("")
    monkeypatch.chdir(kit.path)
    CliRunner().invoke(app, ["federation", "preflight", "--no-data"])
    assert os.environ["PYTHONSAFEPATH"] == "1"
    tried = subprocess.run([sys.executable, "-c", "import planted"], capture_output=True, text=True, check=False)
    assert "No module named 'planted'" in tried.stderr
