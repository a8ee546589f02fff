"""A page in a headless Chromium: what it looks like to a script, and what the browser complained about."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def visit(page: str, folder: Path) -> tuple[str, str]:
    """The page's markup after it was loaded, and the browser's log. Skips where there is no browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    path = folder / "visited.html"
    path.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    logged = ["--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"]
    command = [chromium, *options, *logged, "--dump-dom", path.as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return answer.stdout, answer.stderr


def blocked(log: str) -> list[str]:
    """Lines that report what the page's policy has blocked."""
    return [line for line in log.splitlines() if "Content Security Policy" in line]
