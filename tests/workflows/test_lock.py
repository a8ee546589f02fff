"""One process per run folder, and whoever asks whether there is one."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from refusing import refused

from panorgan.workflows.lock import BusyError, is_locked, only_one_process

HOLDER = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from pathlib import Path
from panorgan.workflows.lock import only_one_process
with only_one_process(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_is_held_until_its_process_ends_however_it_ends(tmp_path: Path, holder: subprocess.Popen[str]):
    assert is_locked(tmp_path) is True
    with refused("run-busy", BusyError), only_one_process(tmp_path):
        pass
    holder.kill()
    with only_one_process(tmp_path, wait=30):
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path) is False


def test_waiting_has_an_end(tmp_path: Path):
    with only_one_process(tmp_path), refused("run-busy", BusyError), only_one_process(tmp_path, wait=0.2):
        pass


def test_one_thread_enters_and_another_leaves(tmp_path: Path):
    held = ExitStack()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(held.enter_context, only_one_process(tmp_path)).result()
    assert is_locked(tmp_path) is True
    held.close()
    assert is_locked(tmp_path) is False


def test_a_disk_without_locks_is_an_error_and_no_file_stands_in_for_a_lock(tmp_path: Path, monkeypatch):
    def missing(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with refused("no-lock"), only_one_process(tmp_path):
        pass
    assert is_locked(tmp_path) is None


def test_a_folder_that_was_never_held_is_free_and_asking_leaves_no_trace(tmp_path: Path):
    assert is_locked(tmp_path) is False
    assert list(tmp_path.iterdir()) == []
