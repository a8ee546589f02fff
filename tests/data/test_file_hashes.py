"""Hashes of files are remembered, and never outlive a change."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from panorgan.data import file_hashes as hashes_module
from panorgan.data.file_hashes import FileHashes


@pytest.fixture
def hashes(tmp_path: Path) -> FileHashes:
    return FileHashes(tmp_path / "hashes")


@pytest.fixture
def settled(monkeypatch) -> None:
    """Files of this moment count as old."""
    monkeypatch.setattr(hashes_module, "_SETTLED_SECONDS", -1.0)


def remembered(hashes: FileHashes) -> int:
    return len(list(hashes.folder.iterdir())) if hashes.folder.exists() else 0


@pytest.mark.usefixtures("settled")
def test_a_file_is_read_once(hashes, tmp_path, monkeypatch) -> None:
    path = tmp_path / "scan"
    path.write_bytes(b"voxels")
    assert hashes.of(path) == hashlib.sha256(b"voxels").digest()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert FileHashes(hashes.folder).of(path) == hashlib.sha256(b"voxels").digest()


@pytest.mark.usefixtures("settled")
def test_a_change_is_seen_even_when_size_and_time_are_put_back(hashes, tmp_path) -> None:
    path = tmp_path / "scan"
    path.write_bytes(b"voxels")
    hashes.of(path)
    old = path.stat()
    time.sleep(0.02)  # the file system's clock ticks
    path.write_bytes(b"VOXELS")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert hashes.of(path) == hashlib.sha256(b"VOXELS").digest()


def test_a_file_that_may_still_be_written_is_not_remembered(hashes, tmp_path) -> None:
    path = tmp_path / "scan"
    path.write_bytes(b"voxels")
    hashes.of(path)
    assert remembered(hashes) == 0


@pytest.mark.usefixtures("settled")
def test_a_damaged_memory_is_not_believed(hashes, tmp_path) -> None:
    path = tmp_path / "scan"
    path.write_bytes(b"voxels")
    hashes.of(path)
    (memory,) = hashes.folder.iterdir()
    memory.write_bytes(b"half")
    assert hashes.of(path) == hashlib.sha256(b"voxels").digest()
    assert remembered(hashes) == 1


@pytest.mark.usefixtures("settled")
def test_a_cache_that_cannot_be_written_is_no_trouble(tmp_path) -> None:
    (tmp_path / "hashes").write_text("a file where the folder should be")
    path = tmp_path / "scan"
    path.write_bytes(b"voxels")
    hashes = FileHashes(tmp_path / "hashes" / "deep")
    assert hashes.of(path) == hashlib.sha256(b"voxels").digest()


@pytest.mark.usefixtures("settled")
def test_a_flipped_bit_in_the_memory_is_not_believed(hashes, tmp_path) -> None:
    """It would look as if the scan had changed."""
    path = tmp_path / "scan"
    path.write_bytes(b"voxels")
    expected = hashes.of(path)
    (memory,) = hashes.folder.iterdir()
    whole = memory.read_bytes()
    for damaged in (bytes([whole[0] ^ 1]) + whole[1:], whole[:-1] + b"?", whole[:32], b""):
        memory.write_bytes(damaged)
        assert hashes.of(path) == expected
        assert memory.read_bytes() == whole, "remembered anew"
