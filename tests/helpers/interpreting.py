"""Triton's interpreter: kernels are checked without a GPU, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def interpret(module: str) -> None:
    """Run a test module as a program, in a process of its own: Triton must know from the beginning what it is to do."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", module]
    subprocess.run(command, env=environment, check=True, cwd=Path(__file__).parents[2], timeout=300)
