"""`panorgan analyze` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from invoking import invoke

from panorgan.workflows.execute import train

QUICK = ("--eigenvalues", "1", "--probes", "2", "--grid", "3", "--batches", "1", "--batch-size", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    train(tiny(training={"rounds": 1, "sampling": {"patch_size": [8, 8, 8]}}), folder)
    return folder


def test_it_prints_a_table_and_puts_the_section_into_the_report(finished, capfd, monkeypatch):
    code, out, err = invoke(capfd, monkeypatch, "analyze", str(finished), "--against", str(finished), *QUICK)
    assert code == 0, err
    assert "Curvature of the loss" in out
    assert re.search(r"all sites\W+\d\.\d{3}", out)
    assert re.search(r"bottleneck\W+1\.000", out)
    assert "loss landscape: 3 done" in out
    page = (finished / "report.html").read_text()
    assert 'id="analyses"' in page
    assert '<a href="#analyses">' in page
    assert "of its validation cases" in page
    assert "Every layer with every layer of fedavg (tiny)" in page
    assert (finished / "analysis" / "landscape_north.svg").is_file()


def test_json_is_one_object_per_line(finished, capfd, monkeypatch):
    quiet = (*QUICK, "--grid", "0", "--eigenvalues", "0")
    code, out, err = invoke(capfd, monkeypatch, "analyze", str(finished), *quiet, "--json")
    assert code == 0, err
    *events, last = (json.loads(line) for line in out.splitlines())
    assert {"event": "analyze", "what": "trace of the Hessian", "done": 4, "total": 4}.items() <= events[-1].items()
    result = last["result"]
    assert list(result["curvature"]) == ["all sites", "north", "south"]
    assert result["curvature"]["north"]["largest_over_fifth"] is None
    assert (
        result["curvature"]["north"]["trace"]
        == json.loads(Path(result["analysis"]).read_text())["curvature"][1]["trace"]
    )
    assert [Path(path).name for path in result["files"]] == ["hessian.csv"]
    assert all(Path(path).is_file() for path in (*result["files"], result["report"]))


def test_a_report_of_a_run_that_was_not_analysed_has_no_such_section(tiny, tmp_path, capfd, monkeypatch):
    train(tiny(training={"rounds": 1}), tmp_path / "run")
    assert invoke(capfd, monkeypatch, "report", str(tmp_path / "run"))[0] == 0
    assert "analyses" not in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grid", "4"), "Use 5"),
        (("--grid", "1"), "Use 3 or more"),
        (("--eigenvalues", "100000", "--probes", "0", "--grid", "0", "--batches", "1"), "Ask for fewer"),
        (("--radius", "0"), "radius"),
        (("--split", "test"), "'validation' or 'train'"),
        (("--device", "abacus"), "no device called 'abacus'"),
        (("--against", "nowhere"), "[run-missing]"),
    ],
)
def test_bad_input_is_told_with_a_way_out(finished, capfd, monkeypatch, arguments, message):
    code, _, err = invoke(capfd, monkeypatch, "analyze", str(finished), *arguments)
    assert code == 2
    assert message in err
    assert "fix:" in err
