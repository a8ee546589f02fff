"""Logs that others keep open do not grow without end."""

from __future__ import annotations

import json
import shutil

from panorgan.deployment import rotation
from panorgan.deployment.rotation import rotate, rotating

LIMIT, KEPT = 1000, 2


def test_a_log_that_another_keeps_open_stays_small_and_its_newest_lines_are_there(tmp_path):
    """The writer never closes the file, as NVFlare's audit log."""
    log = tmp_path / "audit.log"
    with log.open("a") as writer:
        for number in range(2000):
            writer.write(f"line {number}\n")
            writer.flush()
            rotate(log, LIMIT, KEPT)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.log", "audit.log.1", "audit.log.2"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= (KEPT + 1) * (LIMIT + 20)
    kept = [line for name in reversed(files) for line in (tmp_path / name).read_text().splitlines()]
    assert kept == [f"line {number}" for number in range(2000 - len(kept), 2000)], "in order, and none is missing"


def test_a_log_within_its_limit_is_left_alone(tmp_path):
    log = tmp_path / "audit.log"
    log.write_bytes(b"x" * LIMIT)
    assert not rotate(log, LIMIT, KEPT)
    assert not rotate(tmp_path / "none.log", LIMIT, KEPT)
    assert [path.name for path in tmp_path.iterdir()] == ["audit.log"]


def test_without_room_for_a_copy_the_log_still_ends(tmp_path, monkeypatch):
    log = tmp_path / "audit.log"
    log.write_bytes(b"x" * (LIMIT + 1))

    def no_room(*files: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", no_room)
    assert rotate(log, LIMIT, KEPT)
    assert log.stat().st_size == 0
    assert [path.name for path in tmp_path.iterdir()] == ["audit.log"]


def test_what_runs_from_a_kit_has_its_logs_kept_small(tmp_path, monkeypatch):
    """A stand-in for the engine writes far more than the limit into both logs, and waits until they were rotated."""
    from fake_engine import FakeEngine

    from panorgan.deployment import processes
    from panorgan.deployment.approval import record
    from panorgan.deployment.folders import SiteKit
    from panorgan.federation.engine import EngineProcess

    monkeypatch.setattr(rotation, "LIMIT_BYTES", LIMIT)
    monkeypatch.setattr(rotation.rotate, "__defaults__", (LIMIT, KEPT))
    monkeypatch.setattr(rotating.__wrapped__, "__defaults__", (0.05,))
    kit = SiteKit(tmp_path / "kit")
    kit.local.mkdir(parents=True)
    record(kit)
    engine = (
        "for i in $(seq 100); do echo a line of some length, number $i; echo audit $i $i $i >> audit.log; done\n"
        "for i in $(seq 100); do test -e engine.out.1 && test -e audit.log.1 && exit; sleep 0.1; done\n"
    )
    monkeypatch.setattr(processes, "network_engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "process", lambda self, kit, role: EngineProcess("", (), logs=("audit.log",)))
    monkeypatch.setattr(processes, "engine_command", lambda process: ["bash", "-c", engine])
    assert processes._run(kit, None) == 0
    for name in ("engine.out", "audit.log"):
        assert (kit.path / name).stat().st_size <= LIMIT


def test_the_engines_own_logs_are_bounded(made):
    for kit in (made.server, *made.sites.values()):
        handlers = json.loads((kit / "local" / "log_config.json").read_text())["handlers"]
        for name in ("logFileHandler", "errorFileHandler"):
            size = handlers[name]["maxBytes"] * (handlers[name]["backupCount"] + 1)
            assert 0 < size <= 40_000_000
