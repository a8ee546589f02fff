"""Kits, made once for all tests here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit_making import EXPERIMENT, federation

from panorgan.deployment.kits import KitsReport, make_kits


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> KitsReport:
    """Kits to look at; a test that changes something takes a `copy`."""
    pytest.importorskip("nvflare", reason="the network extra is not installed")
    return make_kits(federation(), EXPERIMENT, tmp_path_factory.mktemp("kits") / "pilot")


@pytest.fixture
def copy(made: KitsReport, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.folder, tmp_path / "pilot"))


@pytest.fixture
def pilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server's kit with a fake engine, and a clock that moves when the driver sleeps."""
    from driven_run import SITES, Clock, Federation
    from fake_engine import FakeEngine

    from panorgan.deployment import drive, watched_segment

    clock = Clock()
    monkeypatch.setattr(drive, "time", clock)
    monkeypatch.setattr(watched_segment, "time", clock)
    return Federation(tmp_path / "kit", clock, FakeEngine(SITES))
