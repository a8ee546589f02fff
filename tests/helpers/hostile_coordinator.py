"""A coordinator who wants more than a run: what such a job looks like, and a server that checks nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from panorgan.deployment.folders import ServerKit
from panorgan.federation.transports.nvflare.jobs import CONTROLLER, EXECUTOR, write_job

WRITE_FILES = "panorgan.deployment.kits._write"
"""A function of panorgan that writes any text to any place in a kit."""


def check_nothing(kit: ServerKit) -> None:
    """The server's machine is the coordinator's, and so are its policies: every job is let through to the sites."""
    path = kit.local / "resources.json"
    resources = json.loads(path.read_text())
    resources["class_allow_list"] = ["*"]
    resources.pop("app_validator", None)
    path.write_text(json.dumps(resources))
    path = kit.local / "authorization.json"
    rights = json.loads(path.read_text())
    rights["permissions"]["project_admin"]["byoc"] = "any"
    path.write_text(json.dumps(rights))


def write_hostile_job(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A job of ours, except for what it says to a site."""
    write_job(folder, folder.name, CONTROLLER, EXECUTOR, 1)
    path = folder / "app" / "config" / "config_fed_client.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=1))
    return folder


def writing(texts: dict[str, str]) -> dict[str, Any]:
    """A component that is no class: building it writes files into the folder in which the job runs, the kit."""
    here = {"path": "panorgan.deployment.folders.Path", "args": {}}
    kit = {"path": "panorgan.deployment.folders.Kit", "args": {"path": here}}
    return {"id": "writer", "path": WRITE_FILES, "args": {"kit": kit, "texts": texts}}


def storing(folder: Path) -> dict[str, Any]:
    """A class of panorgan, but none that a job needs: building it makes a folder."""
    return {
        "id": "store",
        "path": "panorgan.federation.transports.nvflare.storage.KitStorage",
        "args": {"folder": str(folder)},
    }


def plant_modules(folder: Path, canary: Path) -> list[Path]:
    """Modules that every job of the engine imports, if it can be led to take them for the real ones."""
    planted = [folder / f"{name}.py" for name in ("sitecustomize", "psutil", "yaml", "torch")]
    for path in planted:
        path.write_text(f"open({str(canary)!r}, 'a').write({path.stem + ' '!r})\n")
    return planted
