"""Where the cache lies, how large it may grow, and that preparing lets go of what is too much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from panorgan.errors import ConfigError
from panorgan.workflows.cache import VARIABLE, cache_limit
from panorgan.workflows.prepare import prepare
from panorgan.workflows.site_cases import cache_folder


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep caches elsewhere")
def test_the_cache_is_the_users_unless_the_environment_names_another(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("PANORGAN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/ada/.cache/panorgan")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path("/home/ada/.cache/panorgan"), "not the working folder"
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert cache_folder() == Path("/fast/panorgan")
    monkeypatch.setenv("PANORGAN_CACHE", "/large")
    assert cache_folder() == Path("/large")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 100e9), ("20", 20e9), ("0.5 GB", 5e8), ("500mb", 5e8), ("2TB", 2e12), ("none", None), ("off", None)],
)
def test_the_limit_is_read_from_the_environment(monkeypatch, text, expected):
    monkeypatch.setenv(VARIABLE, text)
    assert cache_limit() == expected


def test_a_sites_own_setting_comes_after_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert cache_limit(7.0) == 7e9
    monkeypatch.setenv(VARIABLE, "3")
    assert cache_limit(7.0) == 3e9


@pytest.mark.parametrize("text", ["much", "-1", "10 KB", "1e3"])
def test_what_is_no_limit_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError) as caught:
        cache_limit()
    assert caught.value.code == "cache-limit"
    assert caught.value.fix


def test_preparing_lets_go_of_what_no_process_uses(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "none")
    cache = tmp_path / "cache"
    experiment = tiny(
        phantom={
            "sites": [
                {"name": "north", "annotated": ["liver", "spleen", "kidney"], "cases": 3, "spacing_mm": [20, 20, 20]},
            ]
        }
    )
    prepare(experiment, cache)
    stale = cache / "store" / "0123456789abcdef"
    stale.mkdir()
    (stale / "case.json").write_text("{}")
    monkeypatch.setenv(VARIABLE, "0")
    prepared = prepare(experiment, cache)
    assert not stale.exists()
    (site,) = prepared.sites
    assert all(case.image.size and case.labels.size for case in (*site.train, *site.validation))
