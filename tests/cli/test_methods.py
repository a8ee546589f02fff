"""`panorgan methods`: the overview, all about one method, Markdown and JSON."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from panorgan.cli.main import app
from panorgan.cli.methods import print_methods
from panorgan.errors import ConfigError
from panorgan.methods.about.words import GROUPS, by_group
from panorgan.methods.base import Method
from panorgan.methods.registry import methods
from panorgan.report.methods_page import methods_page

ROOT = Path(__file__).resolve().parents[2]


def shown(monkeypatch, capsys, name: str | None) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    print_methods(name, as_json=False, as_markdown=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [None, *methods()])
def test_it_fits_a_terminal_of_80_columns(monkeypatch, capsys, name):
    out = shown(monkeypatch, capsys, name)
    assert out.strip()
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert "…" not in out, "nothing is cut off"


def test_the_overview_names_every_method_once_under_its_group(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, None).splitlines()
    at = {title: lines.index(title) for title in GROUPS.values()}
    assert list(at.values()) == sorted(at.values()), "in the order of the table"
    for name, method in methods().items():
        places = [number for number, line in enumerate(lines) if line.split()[:1] == [name] and line.startswith("  ")]
        assert len(places) == 1, name
        below = max((start for start in at.values() if start < places[0]), default=-1)
        assert lines[below] == GROUPS[method.group], name
    assert any("panorgan methods NAME" in line for line in lines)


def test_a_group_that_a_plugin_brings_comes_last():
    @dataclass
    class Listed:
        group: str

    described = [Listed("theirs"), Listed("bounds"), Listed("systems")]
    assert list(by_group(described)) == [GROUPS["systems"], GROUPS["bounds"], "theirs"]


def test_all_about_one(monkeypatch, capsys):
    words = " ".join(shown(monkeypatch, capsys, "flkd").split())
    assert words.startswith("FLKD (flkd) The global model and the other sites' teachers")
    assert "Published Kim et al." in words
    assert "eq. 7 Site.global_distillation" in words
    assert "pretrain last round teacher/* 1.00" in words
    assert "`" not in words
    assert "*global" not in words
    words = " ".join(shown(monkeypatch, capsys, "central_full").split())
    assert "Nothing is sent: this is not a federation." in words


def test_points_of_a_list_begin_lines(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, "fediod").splitlines()
    points = [line[:6] for line in lines if line.startswith("- ")]
    assert points[:3] == ["- T: a", "- Reg:", "- DA: "]
    assert points[3:5] == ["- eq. ", "- unde"], "what is settled follows, point by point"


def test_a_tensor_and_a_number_of_one_name_are_both_told(monkeypatch, capsys):
    words = " ".join(shown(monkeypatch, capsys, "fediod").split())
    assert "attention/* for every pair of places" in words
    assert "attention/* (a number) how attention behaves: the largest factor" in words


def test_an_unknown_method_suggests_one():
    result = CliRunner().invoke(app, ["methods", "fedprocks"])
    assert isinstance(result.exception, ConfigError)
    assert "fedprox" in result.exception.why


def test_markdown_is_the_page_or_a_section():
    whole = CliRunner().invoke(app, ["methods", "--markdown"]).stdout
    assert whole == methods_page()
    section = CliRunner().invoke(app, ["methods", "segviz", "--markdown"]).stdout
    assert section.startswith("## SegViz (`segviz`)")
    assert section in whole


def test_json_says_the_same():
    listed = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert [entry["name"] for entry in listed] == list(methods())
    one = json.loads(CliRunner().invoke(app, ["methods", "segviz", "--json"]).stdout)
    assert one == next(entry for entry in listed if entry["name"] == "segviz")
    assert one["settings"]["finetune_rounds"] == {
        "type": "whole number ≥ 0",
        "default": 0,
        "meaning": "rounds at the end in which only task blocks train, on the frozen representation block",
        "paper": "0",
    }
    assert one["numbers"]["cases"] == Method.numbers["cases"]
    assert one["stages"] == ["train"]
    assert one["network"] == "task_blocks"
    assert one["variants"]["method.finetune_rounds: 2"][1]["relative_to_fedavg"] < 0.01


def test_a_page_or_json_but_not_both():
    result = CliRunner().invoke(app, ["methods", "--json", "--markdown"])
    assert result.exit_code == 2
    assert "--json" in result.output


# -- stored descriptions -----------------------------------------------------------------------------------------------


def test_stored_descriptions_are_fresh():
    from panorgan.methods.about.stored import FILE

    spec = importlib.util.spec_from_file_location("describe_methods", ROOT / "scripts" / "describe_methods.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert FILE.read_text() == script.content(), "run: python scripts/describe_methods.py"


@pytest.mark.parametrize("name", [None, "fediod", "central_full"])
def test_stored_or_described_it_reads_the_same(monkeypatch, capsys, name):
    stored = shown(monkeypatch, capsys, name)
    monkeypatch.setattr("panorgan.cli.methods.stored_methods", lambda: None)
    assert shown(monkeypatch, capsys, name) == stored


def test_changed_sources_are_described_again(monkeypatch):
    from panorgan.methods.about import stored

    assert stored.stored_methods() is not None
    stored.stored_methods.cache_clear()
    monkeypatch.setattr(stored, "sources_hash", lambda: "another")
    assert stored.stored_methods() is None
    stored.stored_methods.cache_clear()


def test_methods_of_other_packages_are_described_again(monkeypatch):
    from panorgan.methods.about import stored

    stored.stored_methods.cache_clear()
    monkeypatch.setattr(stored, "entry_points", lambda group: ["theirs"])
    assert stored.stored_methods() is None
    stored.stored_methods.cache_clear()


@pytest.mark.parametrize("arguments", [["methods"], ["methods", "flkd"], ["methods", "--json"], ["--help"]])
def test_torch_is_not_imported(arguments):
    code = f"import sys; sys.argv[1:] = {arguments}\nfrom panorgan.cli.main import app\n"
    code += "try:\n app()\nexcept SystemExit:\n pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
