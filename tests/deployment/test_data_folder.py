"""A site that cannot answer says so when it starts, instead of letting the run wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from panorgan.deployment.data_folder import FILL_IN, data_folder_warnings
from panorgan.deployment.folders import SiteKit


def kit_with(folder: Path, text: str) -> SiteKit:
    kit = SiteKit(folder)
    kit.local.mkdir()
    kit.settings.write_text(text)
    return kit


@pytest.mark.parametrize("data", [{"folder": FILL_IN}, {"folder": ""}, {"folder": None}, {}, None, {"folder": "gone"}])
def test_a_folder_that_is_not_there_is_said(data: object, tmp_path: Path) -> None:
    (words,) = data_folder_warnings(kit_with(tmp_path, yaml.safe_dump({"data": data})))
    assert "data.folder" in words
    assert f"panorgan federation approve {tmp_path} --edit" in words


def test_a_folder_that_is_there_is_not(tmp_path: Path) -> None:
    """Relative to the kit, or absolute."""
    (tmp_path / "scans").mkdir()
    kit = kit_with(tmp_path, yaml.safe_dump({"data": {"folder": "scans"}}))
    assert data_folder_warnings(kit) == []
    kit.settings.write_text(yaml.safe_dump({"data": {"folder": str(tmp_path / "scans")}}))
    assert data_folder_warnings(kit) == []


@pytest.mark.parametrize("text", ["data: [", "- a\n", ""])
def test_a_file_that_cannot_be_read_is_left_to_the_approval(text: str, tmp_path: Path) -> None:
    assert data_folder_warnings(kit_with(tmp_path, text)) == []


def test_a_kit_without_settings_says_nothing(tmp_path: Path) -> None:
    assert data_folder_warnings(SiteKit(tmp_path)) == []
