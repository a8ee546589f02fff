"""Following a log that others write."""

from __future__ import annotations

from pathlib import Path

from panorgan.cli.follow import LogTail


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
