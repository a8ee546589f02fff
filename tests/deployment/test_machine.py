"""The machine: clock, folders, device, port."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("cryptography", reason="the network extra is not installed")

from trial_federation import Authority, free_port

from panorgan.config import HardwareSettings
from panorgan.deployment import machine
from panorgan.deployment.machine import check_clock, check_device, check_folder, check_port

DAY = 86400


@pytest.mark.parametrize(
    ("synchronised", "verdict", "code"),
    [(True, "ok", ""), (None, "ok", ""), (False, "warning", "clock-unsynchronised")],
)
def test_a_clock_that_may_be_right(
    monkeypatch, tmp_path: Path, synchronised: bool | None, verdict: str, code: str
) -> None:
    monkeypatch.setattr(machine, "_is_synchronised", lambda: synchronised)
    found = check_clock(Authority().write(tmp_path, "north"))
    assert (found.verdict, found.code) == (verdict, code)


def test_a_clock_behind_the_day_of_the_kit_is_wrong(tmp_path: Path) -> None:
    own = Authority().write(tmp_path, "north", begin=-1)
    found = check_clock(own, time.time() - 2 * DAY)
    assert (found.verdict, found.code) == ("failed", "clock-behind")
    assert check_clock(own, time.time() - DAY / 2).verdict != "failed"


@pytest.mark.parametrize(
    ("ahead", "verdict", "code", "seconds"),
    [(3600.0, "warning", "clock-off", "3600 s"), (-90.0, "warning", "clock-off", "90 s"), (5.0, "ok", "", "")],
)
def test_a_clock_that_differed_from_the_servers_is_said(
    monkeypatch, tmp_path: Path, ahead: float, verdict: str, code: str, seconds: str
) -> None:
    monkeypatch.setattr(machine, "_is_synchronised", lambda: True)
    seen = tmp_path / "clock.json"
    seen.write_text(json.dumps({"server_ahead": ahead, "time": time.time()}))
    found = check_clock(Authority().write(tmp_path, "north"), seen=seen)
    assert (found.verdict, found.code) == (verdict, code)
    assert seconds in found.what


def test_the_server_does_not_compare_its_clock_with_itself(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_is_synchronised", lambda: False)
    own = Authority().write(tmp_path, "north")
    assert "the server's" not in check_clock(own).what
    assert "not compared with the server's" in check_clock(own, seen=tmp_path / "clock.json").what


def test_a_clock_without_certificates_cannot_be_judged(tmp_path: Path) -> None:
    own = Authority().write(tmp_path, "north")
    own.root.unlink()
    assert check_clock(own).verdict == "skipped"


def test_the_kernel_gives_the_same_answer_twice() -> None:
    assert machine._is_synchronised() is machine._is_synchronised()


def test_a_folder_that_is_not_there_yet_is_judged_by_its_disk(tmp_path: Path) -> None:
    found = check_folder("cache", tmp_path / "a" / "b", 0.0)
    assert (found.name, found.verdict) == ("disk: cache", "ok")
    assert str(tmp_path) in found.what
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_a_disk_without_room(tmp_path: Path) -> None:
    found = check_folder("cache", tmp_path, 1e9)
    assert (found.verdict, found.code) == ("failed", "too-little-disk")
    assert "1e+09 GB" in found.what


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = check_folder("state", file, 0.0)
    assert (found.verdict, found.code) == ("failed", "not-writable")


@pytest.mark.parametrize(
    ("device", "need_gb", "has_gpu", "verdict", "code"),
    [
        ("cpu", 0, False, "ok", ""),
        ("cpu", 8, True, "failed", "cpu-with-gpu-memory"),
        ("auto", 0, False, "warning", "no-gpu"),
        ("auto", 8, False, "failed", "no-gpu"),
        ("cuda", 0, False, "failed", "no-gpu"),
        ("auto", 8, True, "ok", ""),
        ("cuda", 12, True, "failed", "too-little-gpu-memory"),
        ("cuda", 32, True, "failed", "too-little-gpu-memory"),
    ],
)
def test_device(monkeypatch, device: str, need_gb: float, has_gpu: bool, verdict: str, code: str) -> None:
    """A card with 10 of 24 GB free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10_000_000_000, 24_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    found = check_device(HardwareSettings(device=device), need_gb)
    assert (found.verdict, found.code) == (verdict, code)
    if need_gb > 8:
        assert all(amount in found.what for amount in ("10.0", "24.0 GB", f"{need_gb} GB"))
    if need_gb == 12:
        assert "nvidia-smi" in found.fix, "what else runs on it may end"
    if need_gb == 32:
        assert "nvidia-smi" not in found.fix, "the card is too small"


@pytest.mark.parametrize(("threads", "words"), [(1, "1 CPU thread,"), (3, "3 CPU threads,"), (None, "CPU cores,")])
def test_without_a_gpu_the_threads_of_site_yaml_are_named(monkeypatch, threads: int | None, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert words in check_device(HardwareSettings(threads=threads), 0.0).what


def test_port() -> None:
    assert check_port("localhost", free_port(), running=False).verdict == "ok"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = check_port("localhost", port, running=False)
        assert (found.verdict, found.code) == ("failed", "port-taken")
        assert check_port("localhost", port, running=True).verdict == "ok"
