"""`panorgan cache`: shows what is kept, and removes it when asked."""

from __future__ import annotations

import json
import os
import time

import pytest
from invoking import invoke

from panorgan.checksums import sealed_json


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PANORGAN_CACHE_LIMIT", "2")
    for name, days in (("a", 40), ("b", 3), ("c", 0)):
        folder = tmp_path / "store" / name
        folder.mkdir(parents=True)
        source = f"/data/{'north' if name < 'c' else 'south'}/imagesTr/{name}.nii.gz"
        (folder / "case.json").write_text(sealed_json({"site": source.split("/")[2], "source": source}))
        os.utime(folder, (time.time() - days * 86400,) * 2)
    return tmp_path


@pytest.fixture
def result(capfd, monkeypatch):
    """What the command tells as JSON."""

    def reported(*arguments: str) -> dict:
        code, out, _ = invoke(capfd, monkeypatch, "cache", *arguments, "--json")
        assert code == 0
        return json.loads(out.splitlines()[-1])["result"]

    return reported


def test_it_shows_entries_by_data_set_and_changes_nothing(kept, result, capfd, monkeypatch):
    reported = result("--folder", str(kept))
    assert [(one["name"], one["entries"], one["source"]) for one in reported["data_sets"]] == [
        ("south", 1, "/data/south/imagesTr"),
        ("north", 2, "/data/north/imagesTr"),
    ]
    assert reported["limit"] == 2_000_000_000
    assert reported["bytes"] == sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    _, shown, _ = invoke(capfd, monkeypatch, "cache", "--folder", str(kept))
    assert "north" in shown
    assert "40 days ago" not in shown, "the data set was used since"
    assert len(list((kept / "store").glob("*/case.json"))) == 3


def test_it_removes_what_is_old(kept, result):
    assert result("--folder", str(kept), "--older-than", "30")["removed"]["entries"] == 1
    assert sorted(path.parent.name for path in (kept / "store").glob("*/case.json")) == ["b", "c"]


def test_it_removes_everything(kept, result, monkeypatch):
    monkeypatch.setenv("PANORGAN_CACHE", str(kept))
    assert result("--clear")["removed"]["entries"] == 3
    assert result()["data_sets"] == []


def test_an_empty_cache_is_shown(tmp_path, result):
    assert result("--folder", str(tmp_path / "absent"))["bytes"] == 0
    assert not (tmp_path / "absent").exists()
