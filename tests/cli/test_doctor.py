"""`panorgan doctor` as a user meets it: what it prints at which width, exit codes, JSON, and what it writes."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkups
import nibabel as nib
import numpy as np
import pytest
import yaml
from refusing import refused
from rich.console import Console

from panorgan.cli import main as cli
from panorgan.cli.doctor import DoctorRequest, exit_code
from panorgan.cli.doctor_view import as_json, next_steps, places_in_words, show, verdict
from panorgan.config import Experiment
from panorgan.data_doctor import Checkup, Severity, Source
from panorgan.data_doctor.codes import CODES
from panorgan.data_doctor.summary import Place, group_findings
from panorgan.errors import DataError
from panorgan.workflows.doctor import find_sources
from panorgan.workflows.site_cases import site_settings

PAGE = Path("doctor.html")


def shown(checkup: Checkup, width: int = 80, colour: bool = False, **request) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colour, color_system="standard" if colour else None)
    show(console, checkup, DoctorRequest((Path("/data/north"),), **request), PAGE, None)
    return file.getvalue()


def one_line(text: str) -> str:
    return " ".join(text.split())


def with_severities(*severities: Severity) -> Checkup:
    finding = checkups.sick().findings[0]
    return replace(checkups.healthy(), findings=tuple(replace(finding, severity=s) for s in severities))


# -- what is shown -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_nothing_is_wider_than_the_terminal_and_no_word_is_cut(width: int) -> None:
    text = shown(checkups.sick(), width)
    table = text[: text.index("Page with pictures")]  # what may be copied from the lines after it never breaks
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in text
    for finding in checkups.sick().findings:
        assert finding.code in text
        assert finding.fix in one_line(text)
    assert "\x1b[" not in text, "control codes in a pipe"


def test_findings_are_grouped_by_code_worst_first() -> None:
    lines = [line.split() for line in shown(checkups.sick()).splitlines()]
    heads = [words[:2] for words in lines if words and words[0] in ("error", "warning", "note")]
    assert heads == [
        ["error", "shape-mismatch"],
        ["error", "stray-label"],
        ["warning", "spacing-outlier"],
        ["note", "few-patients"],
    ]


def test_many_cases_with_one_finding_are_named_briefly() -> None:
    text = one_line(shown(checkups.sick()))
    assert "north: north_005, north_006, north_007 and 12 more" in text
    assert text.count("the label has 512 × 512 × 80 voxels") == 3  # once for 15 cases, once for each stray id
    assert text.count("--fix-headers") == 2, "a fix that all cases share is shown once"
    assert "north: north_000 The label holds the undeclared id 7." in text
    assert text.count(CODES["stray-label"].meaning) == 1, "they differ, so the code's meaning says what they share"
    assert "south: the whole folder" in text


def test_findings_that_all_differ_are_cut_short_with_a_hint() -> None:
    finding = checkups.sick().findings[0]
    findings = tuple(replace(finding, case=f"case_{n}", why=f"reason {n}") for n in range(9))
    text = shown(replace(checkups.healthy(), findings=findings))
    assert "reason 2" in text
    assert "reason 3" not in text
    assert "case_3, case_4, case_5 and 3 more" in text
    assert "and 6 more like these (on doctor.html)" in text


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        (["a"], "a"),
        (["a", "b", "c", "d"], "a, b, c, d"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
        ([""], "the whole folder"),
    ],
)
def test_places_in_words(cases: list[str], words: str) -> None:
    places = [Place("north", case) for case in cases]
    assert places_in_words(places, several_sites=False) == words
    assert places_in_words([*places, Place("south", "z")], several_sites=True) == f"north: {words}; south: z"


def test_severities_have_a_colour_and_a_word() -> None:
    text = shown(checkups.sick(), colour=True)
    assert "\x1b[1;31merror" in text
    assert "\x1b[1;33mwarning" in text
    assert "\x1b[1;36mnote" in text


def test_summary_tells_layout_ranges_and_cases_per_organ() -> None:
    text = one_line(shown(checkups.sick()))
    for words in (
        "layout nnunet",
        "holds 20 cases of 20 patients, CT",
        "spacing 0.75 × 0.75 × 2.5 mm",
        "size 512 × 512 × 80–99 voxels",
        "organs liver 19, spleen 19 (1 empty)",
        "organs kidney 3",
    ):
        assert words in text
    assert "17 errors, 3 warnings, 1 note in 23 cases." in text
    assert "holds 1 case of 1 patient, CT" in one_line(shown(checkups.healthy(1)))


def test_splits_of_an_experiment_are_counted() -> None:
    cases = [replace(case, split=split) for case, split in zip(checkups.healthy().cases, "aabbb", strict=True)]
    cases = [replace(case, split={"a": "test", "b": "train"}[case.split]) for case in cases]
    assert "5 cases of 5 patients (3 train, 2 test), CT" in shown(replace(checkups.healthy(), cases=tuple(cases)))


def test_names_with_square_brackets_are_shown_as_they_are() -> None:
    finding = replace(checkups.sick().findings[0], case="[red]case[/]", what="Look at [bold]this[/].")
    text = shown(replace(checkups.healthy(), findings=(finding,)))
    assert "[red]case[/]" in text
    assert "Look at [bold]this[/]." in text


def test_healthy_folder_gets_a_short_answer_and_the_line_for_the_experiment_file() -> None:
    text = shown(checkups.healthy())
    assert "Nothing found in 5 cases." in text
    assert "Checked: every file opens" in text
    assert "error" not in text
    after = text[text.index("  sites:") :]
    assert yaml.safe_load(after) == {"sites": {"north": {"folder": str(Path("/data/north").resolve())}}}


def test_site_names_in_the_proposed_lines_are_allowed_ones() -> None:
    source = Source("Fälle 2024 (neu)", Path("/data/x"), layout="nnunet")
    lines = next_steps(replace(checkups.healthy(), sources=(source,)), (), DoctorRequest((Path("/data/x"),)))
    sites = yaml.safe_load("\n".join(lines[1:]))["sites"]
    made = Experiment(vocabulary=("liver",), sites=sites)
    assert made.sites["F_lle_2024__neu"].layout == "nnunet"


def test_next_step_depends_on_what_was_found() -> None:
    def steps(checkup: Checkup, path: str = "data") -> str:
        return "\n".join(next_steps(checkup, group_findings(checkup.findings), DoctorRequest((Path(path),))))

    assert steps(checkups.sick()) == "Next: fix shape-mismatch and stray-label, then run the same command again."
    assert steps(checkups.healthy(), "my.yaml") == "Next: train.\n  panorgan train my.yaml"
    warned = steps(with_severities(Severity.warning), "my.yaml")
    assert warned.startswith("Next: look at shape-mismatch; if all is well, train.")
    assert warned.endswith("panorgan train my.yaml")
    bare = tuple(replace(case, structures=()) for case in checkups.healthy().cases)
    assert "add labels" in steps(replace(checkups.healthy(), cases=bare))


def test_a_copy_that_was_not_written_is_no_next_step(tmp_path) -> None:
    sick = checkups.sick()
    request = DoctorRequest((Path("data"),), fix_headers=tmp_path / "copy")
    assert str(tmp_path / "copy") not in "\n".join(next_steps(sick, group_findings(sick.findings), request))
    (tmp_path / "copy").mkdir()
    assert str(tmp_path / "copy") in "\n".join(next_steps(sick, group_findings(sick.findings), request))


def test_verdict_counts_findings() -> None:
    assert verdict(checkups.healthy(1)).plain == "Nothing found in 1 case."
    assert verdict(with_severities(Severity.note, Severity.error)).plain == "1 error, 1 note in 5 cases."


# -- exit codes and JSON -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severities", "strict", "code"),
    [
        ((), False, 0),
        ((Severity.note,), True, 0),
        ((Severity.warning,), False, 0),
        ((Severity.warning, Severity.note), True, 1),
        ((Severity.warning, Severity.error), False, DataError.exit_code),
        ((Severity.error,), True, DataError.exit_code),
    ],
)
def test_exit_code_by_severity(severities: tuple[Severity, ...], strict: bool, code: int) -> None:
    assert exit_code(with_severities(*severities), strict) == code


def test_every_code_and_option_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = [f"| `{code}` | {about.severity.name} | {about.meaning} |" for code, about in CODES.items()]
    assert [row for row in rows if row not in page] == []
    (command,) = (command for command in cli.app.registered_commands if command.callback is cli.doctor)
    options = set(inspect.signature(command.callback).parameters) - {"paths", "as_json"}
    assert [name for name in (*options, "json") if f"| `--{name.replace('_', '-')}" not in page] == []


def test_json_holds_everything_but_pictures_and_no_nan() -> None:
    text = as_json(checkups.sick(), None, None)
    assert "NaN" not in text
    content = json.loads(text)
    assert list(content) == ["sources", "cases", "findings", "worst", "html"]
    assert content["worst"] == "error"
    assert content["html"] is None
    assert content["sources"][0]["structures"]["spleen"] == {"cases": 19, "empty": 1}
    assert content["findings"][0]["severity"] == "error"
    empty = next(case for case in content["cases"] if case["case"] == "north_004")["structures"]["spleen"]
    assert empty["centre_mm"] == [None, None, None]
    assert math.isnan(checkups.sick().cases[4].structures[1].centre_mm[0])
    assert json.loads(as_json(checkups.healthy(), PAGE, None))["worst"] is None


# -- paths ---------------------------------------------------------------------------------------------------


def test_paths_become_sources_with_names_of_their_own(tmp_path: Path, tiny_content) -> None:
    for name in ("a/liver", "b/liver"):
        (tmp_path / name).mkdir(parents=True)
    table = tmp_path / "a" / "cases.csv"
    table.touch()
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(yaml.safe_dump(tiny_content()))
    sources = find_sources([tmp_path / "a/liver", tmp_path / "b/liver", table, experiment], "nnunet")
    assert [source.site for source in sources] == ["liver", "liver-2", "a", "island", "north", "south"]
    assert [source.folder for source in sources[:3]] == [tmp_path / "a/liver", tmp_path / "b/liver", table]
    assert {source.layout for source in sources[:3]} == {"nnunet"}
    assert sources[0].vocabulary is None
    assert set(sources[4].splits.values()) == {"train", "validation", "test"}


def test_missing_path_and_single_scan_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with refused("path-missing"):
        find_sources([tmp_path / "nowhere"])
    scan = tmp_path / "scan.nii.gz"
    scan.touch()
    with refused("not-examinable") as error:
        find_sources([scan])
    assert error.value.fix


# -- the command ---------------------------------------------------------------------------------------------


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(capfd, monkeypatch, tmp_path: Path) -> Command:
    """Run `panorgan doctor` in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["panorgan", "doctor", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capfd.readouterr()
        return int(left.value.code or 0), out, err

    return call


@pytest.fixture
def made_up(monkeypatch) -> Callable[[Checkup], None]:
    """Let the doctor find what a test says, without reading anything."""

    def use(checkup: Checkup) -> None:
        def examine(sources, workers=None, on_progress=None):
            on_progress(len(checkup.cases), len(checkup.cases))
            return checkup

        monkeypatch.setattr(importlib.import_module("panorgan.workflows.doctor"), "examine", examine)

    return use


@pytest.fixture
def folder(tiny, cache: Path, tmp_path: Path) -> Path:
    """A phantom site, copied so that a test may damage it."""
    settings = site_settings(tiny(), cache, lambda what, done, total: None)
    return Path(shutil.copytree(settings["north"].folder, tmp_path / "data" / "north"))


def test_page_is_written_here_or_where_asked_or_not_at_all(doctor: Command, made_up, tmp_path: Path) -> None:
    made_up(checkups.healthy())
    data = tmp_path / "data"
    data.mkdir()
    assert doctor(data)[1].count("doctor.html") == 1
    assert (tmp_path / "doctor.html").is_file()
    doctor(data, "--html", "pages/north.html")
    assert (tmp_path / "pages" / "north.html").is_file()
    doctor(data, "--html", "pages")
    assert (tmp_path / "pages" / "doctor.html").is_file()
    assert "doctor.html" in doctor(data)[2], "an earlier page is not replaced in silence"
    (tmp_path / "doctor.html").write_text("<title>mine</title>")
    code, _, err = doctor(data)
    assert (code, "[page-overwrites]" in err) == (2, True)
    assert (tmp_path / "doctor.html").read_text() == "<title>mine</title>"
    (tmp_path / "doctor.html").unlink()
    _, out, _ = doctor(data, "--no-html")
    assert not (tmp_path / "doctor.html").exists()
    assert "doctor.html" not in out
    assert list(data.iterdir()) == []


def test_json_is_the_only_thing_on_standard_output(doctor: Command, made_up, tmp_path: Path) -> None:
    made_up(checkups.sick())
    code, out, err = doctor(tmp_path, "--json")
    assert json.loads(out)["html"] == "doctor.html"
    assert len(out.splitlines()) == 1
    assert code == DataError.exit_code
    assert "reading cases: 23 of 23" in err
    assert doctor(tmp_path, "--json", "--no-html")[1].count('"html": null') == 1


def test_exit_codes_of_the_command(doctor: Command, made_up, tmp_path: Path) -> None:
    made_up(with_severities(Severity.warning))
    assert doctor(tmp_path, "--no-html")[0] == 0
    assert doctor(tmp_path, "--no-html", "--strict")[0] == 1
    made_up(with_severities(Severity.error))
    assert doctor(tmp_path, "--no-html")[0] == 2
    assert doctor(tmp_path / "nowhere")[0] == 2


def test_page_that_cannot_be_written_is_told_before_reading(doctor: Command, monkeypatch, tmp_path: Path) -> None:
    read = []
    module = importlib.import_module("panorgan.workflows.doctor")
    monkeypatch.setattr(module, "examine", lambda *_: read.append(1))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    code, _, err = doctor(tmp_path)
    assert code == 2
    assert "[page-not-writable]" in err
    assert "--no-html" in err
    assert read == []


def test_healthy_phantom_folder_from_end_to_end(doctor: Command, folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, err = doctor(folder, "--workers", "1")
    assert code == 0, out
    assert "holds 5 cases of 5 patients, CT" in one_line(out)
    assert "liver 5" in out
    assert "reading cases: 5 of 5" in err
    assert (tmp_path / "doctor.html").read_text(encoding="utf-8").count('class="thumb"') >= 5
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_damaged_phantom_folder_from_end_to_end(doctor: Command, folder: Path) -> None:
    path = sorted((folder / "labelsTr").iterdir())[0]
    label = nib.load(path)
    voxels = np.asanyarray(label.dataobj).copy()
    voxels[0, 0, 0] = 9
    nib.save(nib.Nifti1Image(voxels, label.affine), path)
    code, out, _ = doctor(folder, "--workers", "1", "--json")
    assert code == 2
    found = [finding for finding in json.loads(out)["findings"] if finding["severity"] == "error"]
    assert [(finding["code"], finding["case"]) for finding in found] == [("stray-label", path.name.split(".")[0])]


def test_experiment_checks_all_of_its_sites(doctor: Command, tiny_content, tmp_path: Path) -> None:
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(yaml.safe_dump(tiny_content()))
    _, out, _ = doctor(experiment, "--workers", "1", "--json", "--no-html")
    content = json.loads(out)
    assert [source["site"] for source in content["sources"]] == ["island", "north", "south"]
    assert {case["split"] for case in content["cases"]} == {"train", "validation", "test"}


# -- corrected copies ----------------------------------------------------------------------------------------


def shift_a_label(folder: Path) -> Path:
    """Move a label by its header only; returns the file."""
    path = sorted((folder / "labelsTr").iterdir())[0]
    label = nib.load(path)
    affine = label.affine.copy()
    affine[0, 3] += 24
    nib.save(nib.Nifti1Image(np.asanyarray(label.dataobj), affine), path)
    return path


def test_corrected_copies_are_told_and_are_healthy(doctor: Command, folder: Path, tmp_path: Path) -> None:
    path = shift_a_label(folder)
    before = path.read_bytes()
    out = tmp_path / "corrected"
    code, text, err = doctor(folder, "--workers", "1", "--no-html", "--fix-headers", out)
    assert code == 2, "the folder that was asked about is still wrong"
    assert f"A copy of the data, 1 file corrected: {out}" in text
    assert f"panorgan doctor {out}" in text
    assert "writing files" in err
    assert path.read_bytes() == before
    assert doctor(out, "--workers", "1", "--no-html")[0] == 0


def test_corrected_copies_as_json(doctor: Command, folder: Path, tmp_path: Path) -> None:
    path = shift_a_label(folder)
    _, text, _ = doctor(folder, "--workers", "1", "--no-html", "--json", "--fix-headers", tmp_path / "corrected")
    (fixed,) = json.loads(text)["fixed"]
    assert Path(fixed["path"]) == path
    assert Path(fixed["copy"]).is_file()
    assert fixed["reason"]


def test_place_for_copies_is_refused_before_reading(doctor: Command, folder: Path, tmp_path: Path) -> None:
    code, _, err = doctor(folder, "--no-html", "--fix-headers", folder / "fixed")
    assert code == 2
    assert "reading cases" not in err
    assert not (folder / "fixed").exists()
