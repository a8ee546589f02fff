"""How the engine's process starts: under which name, and with which code on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusing import refused

from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import SiteKit
from panorgan.deployment.kits import KitsReport
from panorgan.deployment.processes import engine_command, engine_environment
from panorgan.errors import ConfigError
from panorgan.federation.engine import EngineProcess


def test_the_certificate_names_the_participant(made: KitsReport) -> None:
    site = engine_command(network_engine().process(made.sites["east-2"], "site"))
    assert site[:3] == [sys.executable, "-P", "-u"]
    assert site[site.index("--set") + 1 :] == ["secure_train=true", "uid=east-2", "org=east_2", "config_folder=config"]
    server = engine_command(network_engine().process(made.server, "server"))
    assert server[:3] == [sys.executable, "-P", "-u"]
    assert "org=coordination" in server


def test_a_folder_that_is_no_kit(tmp_path: Path) -> None:
    with refused("not-a-kit", ConfigError):
        network_engine().process(tmp_path, "site")


def test_the_working_folder_is_on_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry means the working folder, also with PYTHONSAFEPATH; so does a relative one."""
    kit, elsewhere = SiteKit(tmp_path / "kit"), tmp_path / "elsewhere"
    kit.path.mkdir()
    (kit.path / "planted.py").write_text("")
    entries = ["", str(elsewhere), "relative", str(kit.path), str(kit.path / "inside"), ""]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entries))
    engine = EngineProcess("planted", (), {"PYTHONSAFEPATH": "", "OWN": "1"})
    environment = engine_environment(kit, engine)
    assert environment["OWN"] == environment["PYTHONSAFEPATH"] == "1", "no engine may take it back"
    assert engine_command(engine)[:3] == [sys.executable, "-P", "-u"]
    assert environment["PYTHONPATH"] == str(elsewhere)
    # As the engine is started, and as anything that it starts may start Python again.
    for command in ([sys.executable, "-P", "-c", "import planted"], [sys.executable, "-c", "import planted"]):
        tried = subprocess.run(command, cwd=kit.path, env=environment, capture_output=True, text=True, check=False)
        assert "No module named 'planted'" in tried.stderr
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in engine_environment(kit, engine)
