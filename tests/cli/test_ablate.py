"""`panorgan ablate` as a user meets it: FLKD's table on the tiny federation, and tables of any width."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from made_ablation import made_ablation
from rich.console import Console
from typer.testing import CliRunner, Result

from panorgan.cli.ablate import module_tables
from panorgan.cli.main import app
from panorgan.errors import ConfigError, RunError

QUICK = ["--set", "training.rounds=1", "--set", "training.local_steps=1", "--set", "training.validate_every=1"]


@pytest.fixture(scope="module")
def experiment_file(tiny_content, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content(method={"name": "flkd"})))
    return path


def run_ablate(experiment: Path, folder: Path, *options: str) -> Result:
    command = ["ablate", str(experiment), "--run", str(folder), "--rows", "no KD,global KD", "--seeds", "0,1", *QUICK]
    return CliRunner().invoke(app, [*command, *options], env={**os.environ, "COLUMNS": "120"})


@pytest.fixture(scope="module")
def ablated(experiment_file: Path, tmp_path_factory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("ablate") / "ablated"
    return folder, run_ablate(experiment_file, folder)


def test_it_runs_the_rows_and_shows_the_table(ablated) -> None:
    folder, result = ablated
    assert result.exit_code == 0, result.output
    assert "run 2 of 4 · global KD · seed 0: round 1/1" in result.output
    table = result.output[result.output.index("Modules of flkd") :]
    assert re.search(r"^no KD( +0\.\d{3} ± 0\.\d{3}){4} +reference +– +66\.58", table, re.MULTILINE)
    assert re.search(r"^global KD +✓( +0\.\d{3} ± 0\.\d{3}){4} +[+−]0\.\d{3} +– +69\.55", table, re.MULTILINE)
    assert "Average surface distance in mm" in table
    assert "Delivered: the last round of every run." in table
    for name in (
        "ablation.html",
        "ablation.md",
        "ablation.csv",
        "ablation_costs.csv",
        "ablation.json",
        "ablation_distances.csv",
    ):
        assert str(folder / name) in result.output
        assert (folder / name).is_file()
    assert (folder / "global_KD" / "seed-1" / "metrics.csv").is_file()


def test_the_files_say_what_is_on(ablated) -> None:
    folder, _ = ablated
    page = (folder / "ablation.html").read_text()
    assert "panorgan ablation" in page
    assert '<th scope="col" class="tick">global KD</th>' in page
    assert page.count('<span class="hidden">on</span>') == 1
    assert page.count('<span class="hidden">off</span>') == 1
    assert "Two rows of flkd’s module table on the same data" in page
    assert "Mean Dice by row" in page
    assert "Dice by round" in page  # the comparison's curves
    assert "comparison.csv" not in page
    text = (folder / "ablation.md").read_text()
    assert text.startswith("# tiny: modules of flkd\n")
    assert "| global KD | ✓ | 0." in text
    rows = list(csv.DictReader((folder / "ablation.csv").open()))
    assert {(row["method"], row["module_global KD"]) for row in rows} == {("no KD", "0"), ("global KD", "1")}
    assert {(row["rounds"], row["delivered_rounds"]) for row in rows} == {("1", "1 1")}
    assert "| delivered round |" in text
    assert page.count("1, 1 of 1</td>") == 2
    content = json.loads((folder / "ablation.json").read_text())
    assert content["ablation"]["rows"][1] == {"label": "global KD", "modules": ["global KD"], "paper": "69.55"}
    assert content["methods"]["global KD"] == {"method": "flkd", "settings": {"local_weight": 0}}


def test_a_second_time_nothing_is_trained(ablated, experiment_file, monkeypatch) -> None:
    from panorgan.workflows import execute

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a finished run was prepared again")

    folder, _ = ablated
    monkeypatch.setattr(execute, "prepare", never)
    before = (folder / "ablation.html").read_bytes()
    result = run_ablate(experiment_file, folder, "--json", "--reference", "no KD")
    assert result.exit_code == 0, result.output
    (line,) = result.output.splitlines()
    shown = json.loads(line)["result"]
    assert (shown["method"], shown["reference"], shown["missing"]) == ("flkd", "no KD", [])
    assert shown["rows"]["global KD"]["modules"] == ["global KD"]
    assert shown["rows"]["global KD"]["dice"]["seeds"] == 2
    assert "methods" not in shown
    assert (folder / "ablation.html").read_bytes() == before  # what was measured is kept


def test_more_rows_later_and_a_report_of_what_there_is(ablated, experiment_file, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(ablated[0], folder)
    result = run_ablate(experiment_file, folder, "--rows", "no KD,both", "--report-only")
    assert result.exit_code == 0, result.output
    assert "Not finished: both · seed 1" in result.output
    assert re.search(r"^both +✓ +✓ +– ", result.output, re.MULTILINE)
    assert not (folder / "both").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "fedavg"], "Choose one that has a table: "),
        (["--rows", "globalKD"], "did you mean 'global KD'"),
        (["--set", "method.local_weight=0", "--rows", "global KD,both"], "are the same"),
    ],
)
def test_what_is_wrong_shows_before_anything_is_trained(experiment_file, tmp_path, options, says) -> None:
    result = run_ablate(experiment_file, tmp_path / "new", *options)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert not (tmp_path / "new").exists()


def test_nothing_to_report(experiment_file, tmp_path) -> None:
    result = run_ablate(experiment_file, tmp_path / "new", "--report-only")
    assert isinstance(result.exception, RunError)
    assert "Not one run of this ablation" in str(result.exception)


def drawn(width: int, **made: object) -> list[str]:
    ablation, results = made_ablation(**made)
    console = Console(file=io.StringIO(), width=width)
    for table in module_tables(ablation, results, width):
        console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def words(line: str) -> str:
    return " ".join(line.split())


def test_where_there_is_room_it_is_one_table() -> None:
    lines = drawn(150)
    (row,) = [line for line in lines if line.startswith("PL+aRCE+WS+UA ")]
    sites = 3 * "0.710 ± 0.014 " + "0.610 ± 0.014"
    assert words(row) == f"PL+aRCE+WS+UA ✓ ✓ ✓ ✓ {sites} 0.710 ± 0.014 +0.100 ▲ < 0.001 –"
    assert sum(line.startswith("PL+WS ") for line in lines) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_where_there_is_not_the_sites_follow(width: int) -> None:
    """Eleven rows, six modules, four places: every row on one line of each table, nothing cut."""
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    modules, sites = (line for line in lines if line.startswith("PL+aRCE+WS+UA+GMT "))
    assert words(modules) == "PL+aRCE+WS+UA+GMT ✓ ✓ ✓ ✓ ✓ 0.710 ± 0.014 +0.100 ▲ < 0.001 –"
    assert sites.count("0.710 ± 0.014") == 3
    assert "…" not in "".join(lines)


def test_many_sites_on_a_narrow_terminal_lose_their_spread_first() -> None:
    lines = drawn(80, external=("island", "coast", "hill"))
    assert max(map(len, lines)) <= 80
    _, sites = (line for line in lines if line.startswith("PL+WS "))
    assert words(sites) == "PL+WS 0.710 0.710 0.710 0.610 0.610 0.610 0.610"
