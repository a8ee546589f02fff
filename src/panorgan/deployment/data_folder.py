"""Checks that `local/site.yaml` names the hospital's data folder. Imports little: long-running processes use it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from panorgan.deployment.folders import SiteKit

FILL_IN = "<the folder with your scans and labels>"
"""Placeholder in a new `site.yaml` for the hospital's data folder."""


def is_blank(content: dict[str, Any]) -> bool:
    """Whether the folder was never filled in."""
    text = _folder(content)
    return not text or (text.startswith("<") and text.endswith(">"))


def data_folder_warnings(kit: SiteKit) -> list[str]:
    """Reasons why a starting site could not answer requests: it would connect, and the run would wait for it."""
    try:
        content = yaml.safe_load(kit.settings.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []  # the approval, or the first request, says what is wrong
    if not isinstance(content, dict):
        return []
    again = f"panorgan federation approve {kit.path} --edit, correct it, approve again; this site may keep running"
    if is_blank(content):
        return [f"data.folder in {kit.settings} is not filled in: this site connects, but cannot answer. Fix: {again}"]
    folder = kit.path / Path(_folder(content)).expanduser()
    if not folder.exists():
        return [f"{folder} does not exist (data.folder in {kit.settings}): this site cannot answer. Fix: {again}"]
    return []


def _folder(content: dict[str, Any]) -> str:
    data = content.get("data")
    folder = data.get("folder") if isinstance(data, dict) else data
    return "" if folder is None else str(folder).strip()
