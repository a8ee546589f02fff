"""`panorgan watch`: an address on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from interrupts import hear_interrupts

from panorgan.cli.watch import watch_run
from panorgan.errors import ConfigError


@pytest.mark.slow
def test_the_page_is_there_until_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "panorgan", "watch", str(tmp_path / "later"), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    ) as process:
        assert process.stdout
        assert process.stderr
        try:
            url = json.loads(process.stdout.readline())["url"]
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert "panorgan live" in answer.read().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert "watching" in process.stderr.read()
        finally:
            process.kill()


def test_a_port_that_is_taken_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError) as refused:
            watch_run(tmp_path, other.getsockname()[1], open_page=False, as_json=True)
    assert refused.value.code == "page-port-taken"


def test_a_site_s_kit_has_no_run_to_watch(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "site.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        watch_run(tmp_path, 0, open_page=False, as_json=True)
    assert refused.value.code == "is-site-kit"
