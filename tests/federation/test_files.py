"""Files that are the old version or the new one: what is flushed when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from panorgan.federation.files import write_atomically


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed, how long it is by then, and what is renamed."""
    happened: list[str] = []
    rename = os.replace

    def flushed(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        happened.append(f"flushed {path.name}" + (f" of {path.stat().st_size}" if path.is_file() else ""))

    def renamed(source: Path, target: Path) -> None:
        happened.append(f"renamed to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    return happened


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="cannot see what is flushed")
def test_what_must_survive_a_power_cut_is_flushed_before_it_gets_its_name_and_its_folder_after(tmp_path, happened):
    write_atomically(tmp_path / "run" / "a.json", [b"one", memoryview(b"two")], durable=True)
    assert happened == ["flushed .a.json.incomplete of 6", "renamed to a.json", "flushed run"]
    assert (tmp_path / "run" / "a.json").read_bytes() == b"onetwo"


def test_nothing_else_waits_for_the_disk(tmp_path, happened):
    write_atomically(tmp_path / "a.json", "text")
    assert happened == ["renamed to a.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
