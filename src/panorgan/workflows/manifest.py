"""The record of a run: config, versions, data, seeds and hardware."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import panorgan
from panorgan.config import Experiment
from panorgan.data import splits
from panorgan.workflows.prepare import PreparedFederation

_PACKAGES = ("torch", "monai", "numpy", "scipy", "nibabel", "pydantic", "safetensors")


def make_manifest(experiment: Experiment, prepared: PreparedFederation, device: torch.device) -> dict[str, Any]:
    """Everything needed to identify a run, as plain JSON."""
    return {
        "format": 1,
        "run": uuid.uuid4().hex,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "experiment": experiment.as_json(),
        "fingerprint": experiment.fingerprint(),
        "plan": prepared.plan.as_json(),
        "statistics": {name: statistics.as_numbers() for name, statistics in prepared.statistics.items()},
        "sites": {site.name: site.describe() for site in prepared.sites},
        "data_fingerprint": data_fingerprint(prepared),
        "test_fingerprint": scored_fingerprint(prepared),
        "split_rule": splits.RULE,
        "shared_scans": list(prepared.shared_scans),
        "versions": {"panorgan": panorgan.__version__, "python": platform.python_version(), **_versions()},
        "git": git_hash(),
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
    }


def data_fingerprint(prepared: PreparedFederation, counted: Sequence[str] = ("train", "validation", "test")) -> str:
    """Changes when the content of any case changes, or any split."""
    digest = hashlib.sha256()
    for site in prepared.sites:
        for split in counted:
            for case, key in sorted(site.content[split].items()):
                digest.update(f"{site.name}/{split}/{case}/{key}\n".encode())
    return digest.hexdigest()[:16]


def scored_fingerprint(prepared: PreparedFederation) -> str:
    """Equal for runs that are scored on the same cases, whatever they were trained on."""
    return data_fingerprint(prepared, ("test",))


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # put on the path without metadata
            found[package] = "unknown"
    return found


def git_hash() -> str | None:
    """Commit of the source tree that runs, when it is one."""
    try:
        here = Path(panorgan.__file__).parent
        command = ["git", "-C", str(here), "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return answer.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
