"""What a shell completes, and the short form of --help."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from invoking import invoke

from panorgan.cli.completion import complete_data_set, complete_method, complete_methods, complete_organ
from panorgan.methods.registry import methods


def test_names_that_begin_so(monkeypatch):
    assert complete_method("fedp") == ["fedprox", "fedprox_pl"]
    assert complete_methods("fedavg,sol") == ["fedavg,solo"]
    assert complete_methods("segv") == ["segviz"]
    assert complete_organ("kidney_l") == ["kidney_left"]
    assert complete_data_set("acd") == ["acdc"]
    assert complete_method("nothing") == []
    assert set(complete_method("")) == {n for n, m in methods().items() if m.__module__.startswith("panorgan.")}
    monkeypatch.setattr("panorgan.methods.about.stored.stored_methods", lambda: None)
    assert complete_method("segv") == ["segviz"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("panorgan methods segv", "segviz"),
        ("panorgan fetch acd", "acdc"),
        ("panorgan organs kidney_l", "kidney_left"),
        ("panorgan train x.yaml --baselines fedavg,segv", "fedavg,segviz"),
        ("panorgan ablate x.yaml --method segv", "segviz"),
    ],
)
def test_the_shell_gets_them_without_torch(line, expected, tmp_path):
    environment = {**os.environ, "_PANORGAN_COMPLETE": "complete_bash", "COMP_WORDS": line}
    environment["COMP_CWORD"] = str(len(line.split()) - 1)
    (tmp_path / "torch.py").write_text("raise AssertionError('imported')")  # torch would be too slow
    environment["PYTHONPATH"] = str(tmp_path)
    code = "from panorgan.cli.main import main; import sys; sys.argv = ['panorgan']; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [expected], done.stderr


@pytest.mark.parametrize("command", [[], ["train"], ["federation"], ["federation", "init"]])
def test_help_has_a_short_form(capfd, monkeypatch, command):
    short = invoke(capfd, monkeypatch, *command, "-h")
    assert short == invoke(capfd, monkeypatch, *command, "--help")
    assert short[0] == 0
    assert "Usage" in short[1]
