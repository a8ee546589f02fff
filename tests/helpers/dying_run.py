"""A training run that kills itself (`kill -9`) at a chosen point. Runs in a child process of the resume tests."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from panorgan.config import parse_experiment
from panorgan.federation import checkpoint
from panorgan.workflows.execute import train


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _patch(target: str, call: int, works: bool) -> None:
    """Replace `target` by a version that kills the process at its call number `call`."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            holder: Any = importlib.import_module(".".join(parts[:cut]))
            break
        except ImportError:
            continue
    for name in parts[cut:-1]:
        holder = getattr(holder, name)
    original = getattr(holder, parts[-1])
    calls = 0

    def deadly(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= call:
            return original(*arguments, **named)
        if works:
            original(*arguments, **named)
        return _die()

    setattr(holder, parts[-1], deadly)


def _patch_halfway(call: int) -> None:
    """Die with half of a checkpoint on disk."""
    original, calls = checkpoint.write_atomically, 0

    def deadly(path: Path, content: bytes | Sequence[bytes], durable: bool = False) -> None:
        nonlocal calls
        calls += 1
        if calls <= call:
            return original(path, content, durable)
        whole = content if isinstance(content, bytes) else b"".join(content)
        path.with_name(f".{path.name}.incomplete").write_bytes(whole[: len(whole) // 2])
        return _die()

    checkpoint.write_atomically = deadly


def train_and_die(content: dict[str, Any], folder: Path, cache: Path, point: tuple[str, int, bool]) -> None:
    """Runs in a child process."""
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # what a killed process wrote is there for the next, flushed or not
    target, call, works = point
    if target == "halfway":
        _patch_halfway(call)
    else:
        _patch(target, call, works)
    train(parse_experiment(content), folder, resume=True, cache=cache)
