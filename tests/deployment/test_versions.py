"""Versions: the same first two numbers are the same version."""

from __future__ import annotations

import pytest

from panorgan.deployment import versions
from panorgan.deployment.versions import check_versions, versions_here

HERE = {"panorgan": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "nvflare": "2.9.0"}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "versions_here", lambda: dict(HERE))


def test_this_machine_is_described() -> None:
    assert {"panorgan", "python", "torch"} <= versions_here().keys()


@pytest.mark.parametrize(
    ("agreed", "verdict", "code", "named"),
    [
        ({}, "ok", "", ["torch 2.13.0+cpu"]),
        (HERE, "ok", "", ["torch 2.13.0+cpu"]),
        ({"torch": "2.13.5+cu130", "nvflare": "2.9.3"}, "ok", "", ["nvflare 2.9.0"]),
        ({"torch": "2.11.0"}, "warning", "other-versions", ["torch 2.13.0+cpu", "2.11.0"]),
        ({"panorgan": "0.2.0"}, "warning", "other-versions", ["panorgan 0.1.0", "0.2.0"]),
        ({"monai": "1.6.0"}, "warning", "other-versions", ["monai", "1.6.0"]),
    ],
)
def test_compared_with_where_the_kit_was_made(
    agreed: dict[str, str], verdict: str, code: str, named: list[str]
) -> None:
    (found,) = check_versions(agreed)
    assert (found.verdict, found.code) == (verdict, code)
    assert all(name in found.what for name in named)


def test_without_the_network_engine_nothing_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "versions_here", lambda: {"panorgan": "0.1.0"})
    (found,) = check_versions({})
    assert (found.verdict, found.code) == ("failed", "nvflare-missing")
    assert "[network]" in found.fix
