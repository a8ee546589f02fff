"""Lines and bars for people who wait: on a terminal's error output, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from panorgan.cli import loading, progress
from panorgan.cli.console import Console


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """What a terminal's error output gets."""
    written = io.StringIO()
    for module in (loading, progress):
        monkeypatch.setattr(module, "Console", lambda stderr: Console(file=written, force_terminal=stderr))
    return written


def test_a_bar_counts_on_a_terminal(terminal, capsys):
    with progress.progress_bar("segmenting", 3) as advance:
        advance()
        print("a result")
    assert "segmenting" in terminal.getvalue()
    assert "1/3" in terminal.getvalue()
    assert capsys.readouterr().out == "a result\n"


def test_json_a_single_scan_and_a_pipe_get_no_bar(terminal, capsys):
    with progress.progress_bar("segmenting", 3, quiet=True) as advance:
        advance()
    with progress.progress_bar("segmenting", 1) as advance:
        advance()
    assert terminal.getvalue() == ""


def test_no_bar_without_a_terminal(capfd):
    with progress.progress_bar("segmenting", 3) as advance:
        advance()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def unloaded(monkeypatch) -> str:
    monkeypatch.delitem(sys.modules, "panorgan.cli.cache", raising=False)
    return "panorgan.cli.cache"


def test_loading_is_said_at_once_on_a_terminal(terminal, unloaded, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["panorgan", "cache"])
    loading.load(unloaded)
    assert "Loading…" in terminal.getvalue()
    assert unloaded in sys.modules
    before = terminal.getvalue()
    loading.load(unloaded)
    assert terminal.getvalue() == before, "there is nothing left to load"


def test_loading_is_quiet_with_json(terminal, unloaded, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["panorgan", "cache", "--json"])
    loading.load(unloaded)
    assert terminal.getvalue() == ""
    assert unloaded in sys.modules
