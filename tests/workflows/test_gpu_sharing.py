"""Runs side by side on one GPU: the MPS daemon is started, found by children, and ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from panorgan.workflows.gpu_sharing import shared_gpu


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for NVIDIA's control program that records its commands; `fails` makes it fail."""
    log, program = tmp_path / "commands", tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f'#!/bin/sh\necho "$@ $(cat) in $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n[ ! -e {tmp_path}/fails ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return log


def test_a_daemon_serves_children_and_is_ended(control: Path) -> None:
    with shared_gpu(2) as shared:
        assert shared
        pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipes).is_dir()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not Path(pipes).exists()
    assert control.read_text().splitlines() == [f"-d  in {pipes}", f" quit in {pipes}"]


def test_it_is_ended_after_an_error_too(control: Path) -> None:
    with pytest.raises(KeyboardInterrupt), shared_gpu(2):
        raise KeyboardInterrupt
    assert "quit" in control.read_text()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_daemon_that_does_not_start_leaves_runs_as_they_were(control: Path) -> None:
    (control.parent / "fails").touch()
    with shared_gpu(2) as shared:
        assert not shared
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "quit" not in control.read_text()


@pytest.mark.parametrize("reason", ["one process", "no GPU", "MPS runs already"])
def test_nothing_is_started_without_need(reason: str, control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if reason == "MPS runs already":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with shared_gpu(1 if reason == "one process" else 2) as shared:
        assert not shared
    assert not control.exists()
    assert os.environ.get("CUDA_MPS_PIPE_DIRECTORY") == ("/somewhere" if reason == "MPS runs already" else None)
