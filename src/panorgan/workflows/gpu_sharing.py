"""Several processes on one NVIDIA GPU: side by side under MPS, instead of taking turns.

Without NVIDIA's Multi-Process Service only one process at a time has the GPU, and small steps leave most of it idle.
docs/results.md has measurements on an H200.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_SECONDS_TO_ANSWER = 20.0


@contextmanager
def shared_gpu(processes: int) -> Iterator[bool]:
    """Processes started inside share the GPU under an MPS daemon of their own; yields whether they do.

    Does nothing for a single process, without a GPU or MPS, or where MPS is already running.
    """
    control = shutil.which(_CONTROL)
    if processes < 2 or control is None or _PIPES in os.environ or not torch.cuda.is_available():
        yield False
        return
    # A short path: the daemon's pipes are sockets, whose names may not be long.
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {_PIPES: folder, _LOGS: folder}
        try:
            started = _answers(control, "-d")
            if not started:
                _forget()
            yield started
        finally:
            if _PIPES in os.environ:
                _answers(control, said="quit\n")
                _forget()


def _answers(control: str, *arguments: str, said: str = "") -> bool:
    """Whether the daemon's control program succeeds."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [control, *arguments], input=said, text=True, capture_output=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
        return done.returncode == 0
    return False


def _forget() -> None:
    for name in (_PIPES, _LOGS):
        os.environ.pop(name, None)
