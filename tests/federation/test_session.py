"""The coordinator's connection to the server: it never outlives an interrupted `start`."""

from __future__ import annotations

from typing import ClassVar

import pytest
from refusing import refused

pytest.importorskip("nvflare")

from panorgan.federation.transports.nvflare import session as adapter


class Connecting:
    """NVFlare's session, of which every trial to connect ends in the same way."""

    ends_with: BaseException
    made: ClassVar[list[Connecting]] = []

    def __init__(self, user: str, kit: str) -> None:
        self.closed = False
        self.made.append(self)

    def set_timeout(self, seconds: float) -> None:
        assert seconds > 0

    def try_connect(self, seconds: float) -> None:
        raise self.ends_with

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def connecting(monkeypatch):
    monkeypatch.setattr(adapter, "Session", Connecting)
    monkeypatch.setattr(Connecting, "made", [])
    return Connecting


def test_ctrl_c_while_it_connects_leaves_no_threads_behind(connecting, tmp_path, monkeypatch):
    monkeypatch.setattr(connecting, "ends_with", KeyboardInterrupt(), raising=False)
    with pytest.raises(KeyboardInterrupt):
        adapter.AdminSession(tmp_path, "coordinator@example.org").look()
    assert [session.closed for session in connecting.made] == [True]


def test_a_server_that_is_away_is_asked_anew_each_time(connecting, tmp_path, monkeypatch):
    monkeypatch.setattr(connecting, "ends_with", OSError("no listener"), raising=False)
    session = adapter.AdminSession(tmp_path, "coordinator@example.org")
    for _ in range(2):
        with refused("not-connected", adapter.NotConnectedError) as caught:
            session.look()
        assert "no listener" in caught.value.why
    assert [session.closed for session in connecting.made] == [True, True]
