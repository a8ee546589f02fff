"""Following a log that others write."""

from __future__ import annotations

from pathlib import Path

from panorgan.cli.follow import _SERVER_ENGINE, _SITE_ENGINE, LogTail, translate


def test_only_what_is_new_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = LogTail(path)
    with path.open("a") as file:
        file.write("one\ntwo\nthr")
    assert list(tail.new()) == ["one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert list(tail.new()) == ["three"]
    assert list(tail.new()) == []


def test_a_file_that_comes_later_and_one_that_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert list(tail.new()) == []
    path.write_text("first line\n")
    assert list(tail.new()) == ["first line"]
    path.write_text("new\n")
    assert list(tail.new()) == ["new"]


def test_a_site_that_the_renewed_server_ignores_does_not_stay_connected() -> None:
    """Lines of NVFlare 2.9, as both sides wrote them when the server was renewed under a running site."""
    waits = "CoreCell - WARNING - [ME=north O=? CH=task TP=heart_beat SEQ=?] timeout on Request 02d4-6d93 for "
    assert "restart this site once" in translate(f"{waits}['heart_beat'] after 30.0 secs", _SITE_ENGINE)
    assert translate(f"{waits}['get_task'] after 30.0 secs", _SITE_ENGINE) == ""
    refused = "FederatedServer - ERROR - unauthenticated msg (channel='task' topic='heart_beat') received from north: "
    assert translate(f"{refused}invalid auth token signature", _SERVER_ENGINE).startswith("north is refused")


def test_a_server_that_is_away_is_said_at_the_site() -> None:
    line = "CoreCell - ERROR - [ME=north CH=task TP=heart_beat] cannot send to 'server': target_unreachable"
    assert "keeps trying" in translate(line, _SITE_ENGINE)
