"""`panorgan view`: the address, refusals, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from interrupts import hear_interrupts
from invoking import invoke
from viewed_files import SHAPE, save


@pytest.fixture
def scan(tmp_path):
    return save(tmp_path / "scan.nii.gz", np.zeros(SHAPE, np.int16))


def test_it_prints_the_address_opens_it_and_ends_in_time(scan, capfd, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    code, out, err = invoke(capfd, monkeypatch, "view", str(scan), "--for", "0")
    assert (code, len(opened)) == (0, 1), err
    assert opened[0].startswith("http://127.0.0.1:")
    assert opened[0] in out
    code, out, _ = invoke(capfd, monkeypatch, "view", str(scan), "--for", "0", "--no-browser", "--json")
    assert (code, len(opened)) == (0, 1)
    facts = json.loads(out)
    assert (facts["kind"], facts["cases"]) == ("folder", 1)
    assert facts["url"] != opened[0]


def test_without_a_screen_no_browser_takes_the_terminal(scan, capfd, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("it was opened"))
    code, out, _ = invoke(capfd, monkeypatch, "view", str(scan), "--for", "0")
    assert (code, "http://127.0.0.1:" in out) == (0, True)


@pytest.mark.parametrize(
    ("options", "code"), [(["--case", "x"], "no-such-case"), (["--organ", "liver"], "no-such-organ")]
)
def test_what_is_not_there_is_refused_before_anything_is_served(scan, capfd, monkeypatch, options, code):
    status, out, err = invoke(capfd, monkeypatch, "view", str(scan), "--no-browser", *options)
    assert (status, out) == (2, "")
    assert f"[{code}]" in err


def test_ctrl_c_ends_it(scan):
    command = [sys.executable, "-m", "panorgan", "view", str(scan), "--no-browser", "--json", "--for", "120"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    ) as process:
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}study", timeout=30) as answer:
            assert json.load(answer)["cases"][0]["name"] == "scan.nii.gz"
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)
    assert "Stopped" in out
