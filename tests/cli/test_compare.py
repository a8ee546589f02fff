"""`panorgan compare` as a user meets it: progress, table, files, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from made_comparison import made_results
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

from panorgan.cli import compare as cli_compare
from panorgan.cli.main import app
from panorgan.errors import ConfigError, RunError
from panorgan.workflows import compare, train_comparison

QUICK = ["--set", "training.rounds=1", "--set", "training.local_steps=1", "--set", "training.validate_every=0"]


@pytest.fixture(scope="module")
def experiment_file(tiny_content, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content()))
    return path


def run_compare(experiment: Path, folder: Path, *options: str) -> Result:
    command = ["compare", str(experiment), "--run", str(folder), "--methods", "solo,fedavg", "--seeds", "0,1", *QUICK]
    return CliRunner().invoke(app, [*command, *options], env={**os.environ, "COLUMNS": "100"})


@pytest.fixture(scope="module")
def compared(experiment_file: Path, tmp_path_factory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("compare") / "compared"
    return folder, run_compare(experiment_file, folder)


def test_it_tells_what_it_does_and_where_everything_lies(compared) -> None:
    folder, result = compared
    assert result.exit_code == 0, result.output
    assert "run 2 of 4 · fedavg · seed 0: round 1/1" in result.output
    assert "run 4 of 4 · fedavg · seed 1: round 1/1" in result.output
    table = result.output[result.output.index("Test Dice (own") :]
    assert re.search(r"│ solo +│ 0\.\d{3} ± 0\.\d{3} │", table)
    assert "kidney left" in table
    assert "Delivered: the last round of every run." in table
    assert "step" in table
    assert table.index("Test Dice per organ") < table.index("Average surface distance in mm")
    assert all(len(line) <= 100 for line in table.splitlines() if not line.startswith(str(folder)))
    for name in (
        "comparison.html",
        "comparison.md",
        "comparison.csv",
        "comparison.tex",
        "comparison_costs.csv",
        "comparison.json",
        "comparison_distances.csv",
    ):
        assert str(folder / name) in result.output
        assert (folder / name).is_file()
    assert (folder / "fedavg" / "seed-1" / "metrics.csv").is_file()


def test_a_second_time_nothing_is_prepared_or_trained(compared, experiment_file, monkeypatch) -> None:
    from panorgan.workflows import execute

    folder, _ = compared

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a finished run was prepared again")

    monkeypatch.setattr(execute, "prepare", never)
    result = run_compare(experiment_file, folder, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.output.splitlines()  # one object, and no progress before it
    shown = json.loads(line)["result"]
    assert shown["reference"] == "fedavg"
    assert shown["missing"] == []
    assert set(shown["methods"]) == {"solo", "fedavg"}
    assert shown["methods"]["solo"]["dice"]["seeds"] == 2
    assert shown["methods"]["fedavg"]["dice"]["difference"] is None
    assert str(folder / "comparison.html") in shown["files"]
    assert shown["delivered"] == dict.fromkeys(("solo", "fedavg"), [{"delivered_round": 1, "rounds": 1}] * 2)


def test_what_is_missing_is_added(compared, experiment_file) -> None:
    """Another method and another reference later; the finished runs stay as they are."""
    folder, _ = compared
    before = (folder / "solo" / "seed-0" / "metrics.csv").stat().st_mtime_ns
    command = ["compare", str(experiment_file), "--run", str(folder), *QUICK, "--reference", "solo"]
    more = ["--methods", "solo,tight=fedprox+mu=1", "--seeds", "0"]
    result = CliRunner().invoke(app, [*command, *more])
    assert result.exit_code == 0, result.output
    assert "1 of 2 runs are already finished" in result.output
    assert (folder / "tight" / "seed-0" / "metrics.csv").is_file()
    assert (folder / "solo" / "seed-0" / "metrics.csv").stat().st_mtime_ns == before
    assert json.loads((folder / "comparison.json").read_text())["reference"] == "solo"


def test_a_failed_run_is_told_and_the_others_go_on(experiment_file, tmp_path, monkeypatch) -> None:
    real = compare.train

    def train(experiment, folder, *rest, **options):
        if "solo" in folder.parts:
            raise RunError("Out of luck.", fix="Try again.")
        return real(experiment, folder, *rest, **options)

    monkeypatch.setattr(compare, "train", train)
    result = run_compare(experiment_file, tmp_path / "new", "--seeds", "0")
    assert result.exit_code == 2
    assert "solo · seed 0 failed: Out of luck." in result.stderr
    assert "Not finished: solo · seed 0: Out of luck." in result.stdout
    assert "fedavg" in (tmp_path / "new" / "comparison.md").read_text()
    monkeypatch.undo()
    again = run_compare(experiment_file, tmp_path / "new", "--seeds", "0", "--report-only")
    assert again.exit_code == 0, again.output
    assert "Not finished: solo · seed 0" in again.stdout
    assert not (tmp_path / "new" / "solo" / "seed-0").exists()


def test_nothing_to_report(experiment_file, tmp_path) -> None:
    result = run_compare(experiment_file, tmp_path / "new", "--report-only")
    assert isinstance(result.exception, RunError)
    assert "Not one run" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--methods", "solo,fedavgg"], "did you mean 'fedavg'"),
        (["--methods", "solo", "--reference", "fedavg"], "not among the methods"),
        (["--seeds", "a"], "--seeds"),
        (["--set", "training.roundz=1"], "'rounds'"),
    ],
)
def test_what_is_wrong_shows_before_anything_is_trained(experiment_file, tmp_path, options, says) -> None:
    result = run_compare(experiment_file, tmp_path / "new", *options)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert not (tmp_path / "new").exists()


def test_the_commands_of_the_page_are_valid(tiny) -> None:
    """Options exist, and the methods with their settings can be planned."""
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    commands = [re.sub(r"\\\n", " ", text) for text in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert words[:2] == ["panorgan", "compare"]
        options = dict(zip(words[3::2], words[4::2], strict=True))
        assert set(options) <= {"--methods", "--seeds", "--reference"}
        plan = compare.plan_comparison(
            tiny(), options["--methods"], options.get("--seeds", "0,1,2"), options.get("--reference")
        )
        assert len(plan.runs) == 15


class Started:
    """A stand-in for the runs: tells that two are under way and that one of them failed."""

    def __call__(self, plan, at_once, on_start, on_end, cache):
        for run in plan.runs[:2]:
            on_start(run)
        on_end(plan.runs[0], None)
        on_end(plan.runs[1], RunError("Out of luck."))
        return []


def test_runs_at_once_are_told_line_by_line(experiment_file, compared, tmp_path, monkeypatch) -> None:
    folder, _ = compared
    shutil.copytree(folder / "fedavg", tmp_path / "new" / "fedavg")
    monkeypatch.setattr(train_comparison, "run_missing_at_once", Started())
    result = run_compare(experiment_file, tmp_path / "new", "--at-once", "2")
    assert result.exit_code == 0, result.output
    assert "1 run left: about " in result.output
    assert [line for line in result.output.splitlines() if " left: about " not in line][1:6] == [
        "2 runs, 2 at once",
        "solo · seed 0: started",
        "fedavg · seed 0: started",
        "3 of 4 · solo · seed 0: finished",
        "4 of 4 · fedavg · seed 0: failed",
    ]
    result = run_compare(experiment_file, tmp_path / "new", "--at-once", "2", "--json")
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [line["event"] for line in lines[:-1]] == ["run_started", "run_started", "run_finished", "run_failed"]


def test_a_terminal_shows_which_runs_are_under_way(tiny, tmp_path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    plan = compare.plan_comparison(tiny(), "solo,fedavg x=fedavg", "0", folder=tmp_path)
    view = cli_compare.ComparisonView(console, as_json=False)
    with view.begin(plan, at_once=2):
        assert "preparing cases" in drawn(view, console)
        for run in plan.runs:
            view.started(run)
        assert "running: solo · seed 0, fedavg x · seed 0" in drawn(view, console)
        view.ended(plan.runs[0], None)
        assert "running: fedavg x · seed 0" in drawn(view, console)
    assert "1 of 2 · solo · seed 0: finished" in console.file.getvalue()
    assert "started" not in console.file.getvalue()  # the line at the bottom says it


def test_the_time_left_follows_from_the_runs_before(tiny, tmp_path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(cli_compare.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=100)
    plan = compare.plan_comparison(tiny(), "solo,fedavg,fedprox", "0", folder=tmp_path)
    view = cli_compare.ComparisonView(console, as_json=False)
    with view.begin(plan, at_once=1):
        for number, run in enumerate(plan.runs, start=1):
            with view.watch(run, number, 3):
                now[0] += 40.0 * number  # 40 s, then 80 s
    lines = [line for line in console.file.getvalue().splitlines() if " left: about " in line]
    assert lines == ["2 runs left: about 80 s", "1 run left: about 60 s"]


def test_an_empty_p_is_explained() -> None:
    results = made_results()  # two patients, and a test needs six
    words = cli_compare.few_pairs(results)
    assert "needs 6 patients" in words
    assert "there are 2" in words
    assert cli_compare.few_pairs(made_results(external=False, inside=False, organs=())) == ""


def drawn(view, console) -> str:
    with console.capture() as capture:
        console.print(view._status.renderable)
    return capture.get()


@pytest.mark.parametrize(
    ("width", "organs", "blind"),
    [
        (80, ("liver", "spleen"), ["blind 1.00 ± 0.00 – 1.00 ± 0.00", "4 missed 4 missed"]),
        (45, ("liver", "spleen"), ["blind 1.00 – 1.00", "4 missed 4 missed"]),
        (30, ("liver", "spleen"), ["blind 1.00 ± 0.00", "4 missed"]),
        (100, ("liver", "spleen", *(f"organ_{n}" for n in range(12))), ["blind 1.00 ± 0.00", "4 missed"]),
    ],
)
def test_distances_show_as_much_as_fits(width, organs, blind) -> None:
    """With spread, without, and at last all organs together only; never without what was missed."""
    console = Console(file=io.StringIO(), width=width)
    (table,) = cli_compare.metric_tables(made_results(organs=organs), width)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    rows = [" ".join(line.replace("│", " ").split()) for line in lines if line.startswith("│")]
    assert rows[-2:] == blind


def shown(table: Table) -> tuple[str, list[str]]:
    """The title of a table and the words of its rows."""
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    return str(table.title), [" ".join(line.replace("│", " ").split()) for line in lines if line.startswith("│")]


def test_tables_tell_external_sites_where_these_alone_were_scored() -> None:
    results = made_results(inside=False, organs=("liver",))
    (distances,) = cli_compare.metric_tables(results, 100)
    title, rows = shown(distances)
    assert title == "Average surface distance in mm, external sites (lower is better)"
    assert rows == ["care_ful 11.00 ± 1.41 11.00 ± 1.41", "blind 20.00 20.00", "1 missed 1 missed"]
    title, rows = shown(cli_compare.organ_table(results, 100))
    assert title == "Test Dice per organ, external sites"
    assert rows == ["liver 0.500 0.250"]


def test_where_nothing_was_scored_there_are_no_distances() -> None:
    results = made_results(external=False, inside=False, organs=())
    assert cli_compare.metric_tables(results, 100) == []
    assert cli_compare.organ_table(results, 100) is None
    _, rows = shown(cli_compare.summary_table(results, 80))
    assert rows == ["care_ful – –", "blind – –"]
