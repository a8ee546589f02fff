"""The command line as a user meets it, in this process."""

from __future__ import annotations

import sys

import pytest

from panorgan.cli import main as cli


def invoke(capfd, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["panorgan", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capfd.readouterr()
    return int(left.value.code or 0), out, err
