"""The command line as a user meets it: what it prints, where errors go, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK
import torch
import yaml
from dicom_files import write_series
from invoking import invoke
from typer.testing import CliRunner

from panorgan.checksums import read_json, sealed_json
from panorgan.cli import main as cli
from panorgan.errors import PanorganError
from panorgan.workflows.model_bundle import load_model
from panorgan.workflows.prepare import prepare
from panorgan.workflows.run import Run

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def experiment_file(tiny_content, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experiment") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content()))
    return path


@pytest.fixture(scope="module")
def finished(experiment_file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    result = CliRunner().invoke(
        cli.app, ["train", str(experiment_file), "--run", str(folder), "--set", "training.rounds=2"]
    )
    assert result.exit_code == 0, result.output
    return folder


def test_help_is_quick_to_import():
    """`--help` must not wait for torch."""
    code = "import sys, panorgan.cli.main; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_python_dash_m_is_the_command():
    shown = subprocess.run([sys.executable, "-m", "panorgan", "--version"], capture_output=True, text=True, timeout=60)
    assert shown.stdout.startswith("panorgan 0.")


def test_train_prints_plain_lines_and_writes_a_report(experiment_file, tmp_path, capfd, monkeypatch):
    folder = tmp_path / "run"
    code, out, _ = invoke(capfd, monkeypatch, "train", str(experiment_file), "--run", str(folder))
    assert code == 0
    assert "round 3/3" in out
    assert "validation Dice" in out
    assert re.search(r"^Delivered: round [1-3] of 3$", out, re.MULTILINE)
    assert "liver" in out
    assert "\x1b[" not in out, "control codes in a pipe"
    assert (folder / "report.html").is_file()


def test_train_json_is_one_object_per_line(experiment_file, tmp_path, capfd, monkeypatch):
    code, out, _ = invoke(
        capfd,
        monkeypatch,
        "train",
        str(experiment_file),
        "--run",
        str(tmp_path / "run"),
        "--json",
        "--set",
        "training.rounds=1",
    )
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["result"]["dice"]["n"] > 0
    assert (lines[-1]["result"]["delivered_round"], lines[-1]["result"]["rounds"]) == (1, 1)
    assert any(line.get("event") == "round" for line in lines)


def test_errors_go_to_stderr_with_where_and_fix(experiment_file, tmp_path, capfd, monkeypatch):
    target = tmp_path / "run"
    code, out, err = invoke(
        capfd, monkeypatch, "train", str(experiment_file), "--run", str(target), "--set", "training.roundz=3"
    )
    assert code == 2
    assert out == ""
    assert err.splitlines()[0].startswith("Error: ")
    assert err.splitlines()[0].endswith(" [unknown-setting]")
    assert "--set training.roundz" in err
    assert "'rounds'" in err
    assert "Traceback" not in err
    assert not target.exists()


def test_a_program_gets_the_code_of_an_error(experiment_file, capfd, monkeypatch):
    arguments = ("train", str(experiment_file), "--set", "network.dimensions=2", "--json")
    code, out, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 2
    reported = json.loads(out)
    assert reported["code"] == "network-needs-slices"
    assert "--set network.dimensions" in reported["where"]
    assert {"error", "why", "fix"} < reported.keys()
    assert "[network-needs-slices]" in err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("train", "absent.yaml"), "[settings-file-missing]"),
        (("evaluate", "nowhere"), "nowhere"),
        (("report", "nowhere"), "nowhere"),
        (("predict", "nowhere", "absent.nii.gz", "--out", "x"), "[run-missing]"),
        (("predict", ".", "absent.nii.gz", "--out", "x"), "[image-missing]"),
    ],
)
def test_missing_things(arguments, names, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 2
    assert names in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_json_too_when_asked(capfd, monkeypatch):
    code, out, _ = invoke(capfd, monkeypatch, "evaluate", "nowhere", "--json")
    assert code == 2
    assert json.loads(out)["fix"]


def test_predict_writes_labels_on_the_input_grid_with_names_beside(finished, tiny, tmp_path, capfd, monkeypatch):
    case = prepare(tiny()).sites[0].test[0]
    out = tmp_path / "labels"
    code, _, _ = invoke(capfd, monkeypatch, "predict", str(finished), str(case.image), "--out", str(out))
    assert code == 0
    stem = case.image.name.removesuffix(".nii.gz")
    scan, labels = nib.load(case.image), nib.load(out / f"{stem}.nii.gz")
    assert labels.shape == scan.shape
    np.testing.assert_array_equal(labels.affine, scan.affine)
    saved = np.asarray(nib.load(finished / "predictions" / case.site / f"{case.id}.nii.gz").dataobj)
    np.testing.assert_array_equal(np.asarray(labels.dataobj), saved)
    names = json.loads((out / f"{stem}.json").read_text())
    assert names["labels"] == {"liver": 1, "spleen": 2, "kidney_left": 3, "kidney_right": 4}
    assert names["snomed"]["liver"]["value"]


def test_predict_takes_a_folder_and_refuses_a_damaged_scan(finished, tiny, tmp_path, capfd, monkeypatch):
    case = prepare(tiny()).sites[0].test[0]
    scans = tmp_path / "scans"
    scans.mkdir()
    (scans / "good.nii.gz").write_bytes(case.image.read_bytes())
    predict = ("predict", str(finished), str(scans), "--out")
    code, out, _ = invoke(capfd, monkeypatch, *predict, str(tmp_path / "o"), "--json")
    assert code == 0
    assert json.loads(out)["labels"].endswith("good.nii.gz")
    (scans / "bad.nii.gz").write_bytes(case.image.read_bytes()[:300])
    code, _, err = invoke(capfd, monkeypatch, *predict, str(tmp_path / "p"))
    assert code == 2
    assert "[file-unreadable]" in err
    assert "bad.nii.gz" in err
    assert not list((tmp_path / "p").glob("*bad*"))


def test_predict_goes_on_after_a_damaged_scan_and_names_all_of_them(finished, tiny, tmp_path, capfd, monkeypatch):
    case = prepare(tiny()).sites[0].test[0]
    scans = tmp_path / "scans"
    scans.mkdir()
    (scans / "a.nii.gz").write_bytes(b"")
    (scans / "b.nii.gz").write_bytes(case.image.read_bytes())
    image = nib.load(case.image)
    holes = np.full(image.shape, np.nan, dtype=np.float32)
    nib.save(nib.Nifti1Image(holes, image.affine), scans / "c.nii.gz")
    code, _, err = invoke(capfd, monkeypatch, "predict", str(finished), str(scans), "--out", str(tmp_path / "o"))
    assert code == 2
    assert "[scans-failed]" in err
    assert "2 of 3 scans" in err
    assert "a.nii.gz" in err
    assert "c.nii.gz" in err
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["b.json", "b.nii.gz", "volumes.csv"]


def test_predict_takes_every_format_that_a_site_may_have(finished, tiny, tmp_path, capfd, monkeypatch):
    case = prepare(tiny()).sites[0].test[0]
    scans = tmp_path / "scans"
    scans.mkdir()
    image = SimpleITK.ReadImage(str(case.image))
    SimpleITK.WriteImage(image, str(scans / "meta.mha"))
    (scans / "notes.txt").write_text("not a scan")
    series = tmp_path / "1.2.840.7"
    series.mkdir()
    (series / "slice.1").write_bytes(bytes(128) + b"DICM and then nothing")
    arguments = ("predict", str(finished), str(scans), str(series), "--out", str(tmp_path / "o"))
    code, _, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 2
    assert "1.2.840.7" in err, "a folder of slices is taken for one scan"
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["meta.json", "meta.nii.gz", "volumes.csv"]


def test_predict_finds_the_series_in_a_dicom_tree(finished, tmp_path, capfd, monkeypatch):
    """As archives write it: a folder per patient, and in it one called CT."""
    voxels = np.random.default_rng(0).integers(-100, 200, (12, 14, 6)).astype(np.int16)
    for patient in ("anna", "bert"):
        write_series(tmp_path / "archive" / patient / "CT", voxels, spacing=(12.0, 12.0, 12.0), PatientID=patient)
    out = tmp_path / "out"
    code, _, err = invoke(capfd, monkeypatch, "predict", str(finished), str(tmp_path / "archive"), "--out", str(out))
    assert code == 0, err
    assert sorted(path.name for path in out.glob("*.nii.gz")) == ["anna_CT.nii.gz", "bert_CT.nii.gz"]
    series = [str(tmp_path / "archive" / patient / "CT") for patient in ("anna", "bert")]
    code, _, err = invoke(capfd, monkeypatch, "predict", str(finished), *series, "--out", str(tmp_path / "two"))
    assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "two").glob("*.nii.gz")) == ["anna_CT.nii.gz", "bert_CT.nii.gz"]
    names = json.loads((out / "anna_CT.json").read_text())
    assert names["laterality"]["kidney_left"]["meaning"] == "Left"
    assert set(names["laterality"]) == {"kidney_left", "kidney_right"}


def test_predict_tells_its_doubts_in_words_and_in_json(finished, tiny, tmp_path, capfd, monkeypatch):
    """A folder with a CT, its label map, and what is no CT, segmented twice by a model of CT."""
    case, scans, out = prepare(tiny()).sites[0].test[0], tmp_path / "scans", tmp_path / "o"
    scans.mkdir()
    image = nib.load(case.image)
    hu = np.asarray(image.dataobj)
    made = {"ct": hu, "seg": (hu > 0).astype(np.uint8), "mr": np.abs(hu).astype(np.int16) * 3}
    for name, voxels in made.items():
        nib.save(nib.Nifti1Image(voxels, image.affine), scans / f"scan_{name}.nii.gz")
    predict = ("predict", str(finished), str(scans), "--out", str(out))
    code, printed, err = invoke(capfd, monkeypatch, *predict, "--json")
    assert code == 0, err
    lines = {Path(line["scan"]).name: line for line in map(json.loads, printed.splitlines())}
    assert {doubt["code"] for doubt in lines["scan_ct.nii.gz"]["doubts"]} <= {"nothing-found"}
    assert lines["scan_seg.nii.gz"]["skipped"] == "looks-like-labels"
    assert lines["scan_mr.nii.gz"]["doubts"][0]["code"] == "modality-mismatch"
    beside = json.loads((out / "scan_mr.json").read_text())
    assert beside["doubts"] == lines["scan_mr.nii.gz"]["doubts"]
    assert not (out / "scan_seg.nii.gz").exists()
    code, printed, err = invoke(capfd, monkeypatch, *predict)
    assert code == 0
    assert "scan_mr.nii.gz" in printed
    assert err.count("[output-replaced]") == len(list(out.glob("*.nii.gz")))
    assert err.count("[looks-like-labels]") == err.count("[modality-mismatch]") == 1


def test_predict_overwrites_nothing_that_it_has_not_written(finished, tiny, tmp_path, capfd, monkeypatch):
    case, out = prepare(tiny()).sites[0].test[0], tmp_path / "o"
    out.mkdir()
    mine = out / f"{case.image.name.removesuffix('.nii.gz')}.nii.gz"
    mine.write_bytes(b"drawn by hand")
    code, _, err = invoke(capfd, monkeypatch, "predict", str(finished), str(case.image), "--out", str(out))
    assert (code, "[overwrites-file]" in err) == (2, True)
    assert mine.read_bytes() == b"drawn by hand"


def test_predict_names_what_it_reads_where_it_gets_a_picture(tmp_path, capfd, monkeypatch):
    (tmp_path / "slice.PNG").touch()
    code, _, err = invoke(
        capfd, monkeypatch, "predict", str(tmp_path), str(tmp_path / "slice.PNG"), "--out", str(tmp_path / "o")
    )
    assert code == 2
    assert "[not-a-scan]" in err
    assert "NIfTI" in err


def test_a_run_of_an_unknown_method_says_where_that_is(finished, tmp_path, capfd, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(finished / "model", folder)
    card = read_json((folder / "model.json").read_bytes())
    (folder / "model.json").write_text(sealed_json({**card, "method": {**card["method"], "name": "of_a_script"}}))
    with pytest.raises(PanorganError) as error:
        load_model(folder)
    assert (error.value.code, "add-a-method" in error.value.fix) == ("unknown-method", True)


def test_the_folder_of_a_comparison_names_its_runs(tmp_path):
    for name in ("fedavg", "solo"):
        (tmp_path / name / "seed-0").mkdir(parents=True)
        (tmp_path / name / "seed-0" / "manifest.json").touch()
    with pytest.raises(PanorganError) as error:
        _ = Run(tmp_path).manifest
    assert error.value.code == "not-a-run"
    assert "fedavg/seed-0, solo/seed-0" in error.value.why


def test_predict_refuses_two_scans_of_one_name(tmp_path, capfd, monkeypatch):
    scans = [tmp_path / patient / "ct" / "scan.nii.gz" for patient in ("anna", "bert")]
    for scan in scans:
        scan.parent.mkdir(parents=True)
        scan.touch()
    code, _, err = invoke(capfd, monkeypatch, "predict", str(tmp_path), *map(str, scans), "--out", str(tmp_path / "o"))
    assert code == 2
    assert "ct_scan. [scan-names-clash]" in err


def test_predict_never_overwrites_a_scan(finished, tiny, tmp_path, capfd, monkeypatch):
    case = prepare(tiny()).sites[0].test[0]
    scan = tmp_path / "scan.nii.gz"
    scan.write_bytes(case.image.read_bytes())
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(capfd, monkeypatch, "predict", str(finished), str(scan), "--out", ".")
    assert code == 2
    assert "[overwrites-scan]" in err
    assert scan.read_bytes() == case.image.read_bytes()


@pytest.mark.parametrize("device", ["gpu", pytest.param("cuda", marks=pytest.mark.skipif(HAS_CUDA, reason="has CUDA"))])
def test_predict_refuses_a_device_that_is_not_there(finished, tiny, device, tmp_path, capfd, monkeypatch):
    scan = str(prepare(tiny()).sites[0].test[0].image)
    arguments = ("predict", str(finished), scan, "--out", str(tmp_path / "o"), "--device", device)
    code, _, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 2
    assert "--device" in err


def test_a_folder_that_cannot_be_made_is_an_error_with_a_fix(experiment_file, capfd, monkeypatch):
    code, _, err = invoke(capfd, monkeypatch, "train", str(experiment_file), "--run", str(experiment_file / "run"))
    assert code == 2
    assert "[file-refused]" in err
    assert "fix:" in err
    assert "Traceback" not in err


def test_brackets_in_a_name_are_not_markup(finished, tmp_path, capfd, monkeypatch):
    copy = tmp_path / "run [red] 1"
    shutil.copytree(finished, copy)
    _, out, _ = invoke(capfd, monkeypatch, "evaluate", str(copy))
    assert f"Report: {copy}/report.html" in out


@pytest.mark.parametrize(("command", "says"), [("train", "--resume"), ("predict", "Stopped.\n")])
def test_ctrl_c_says_how_to_go_on(command, says, capfd, monkeypatch):
    def interrupted():
        raise SystemExit(130)  # what typer makes of it

    monkeypatch.setattr(cli, "app", interrupted)
    code, _, err = invoke(capfd, monkeypatch, command)
    assert code == 130
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("federation", "start", "kit"), ""),  # it has said itself that the rounds go on
        (("federation", "status", "--watch"), "watching"),
        (("federation", "watch"), "watching"),
        (("watch", "runs/a"), "watching"),
        (("federation", "preflight"), "Stopped."),
    ],
)
def test_ctrl_c_does_not_say_that_a_run_has_stopped_which_goes_on(arguments, says, capfd, monkeypatch):
    def interrupted():
        raise SystemExit(130)

    monkeypatch.setattr(cli, "app", interrupted)
    code, _, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 130
    assert says in err
    assert bool(err) == bool(says)


def test_typer_turns_ctrl_c_into_130(capfd, monkeypatch):
    def interrupted(as_json, text=""):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "print_organs", interrupted)
    code, _, err = invoke(capfd, monkeypatch, "organs")
    assert code == 130
    assert err.strip() == "Stopped."


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (MemoryError(), "out-of-memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out-of-memory"),
        (OSError(28, "No space left", "x"), "file-refused"),
    ],
)
def test_trouble_with_the_machine_is_explained(error, named, capfd, monkeypatch):
    def troubled(as_json, text=""):
        raise error

    monkeypatch.setattr(cli, "print_organs", troubled)
    code, _, err = invoke(capfd, monkeypatch, "organs")
    assert code == 2
    assert f"[{named}]" in err
    assert "fix:" in err


def test_a_defect_keeps_its_traceback(capfd, monkeypatch):
    def broken(as_json, text=""):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(cli, "print_organs", broken)
    monkeypatch.setattr(sys, "argv", ["panorgan", "organs"])
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main()


def test_plain_lines_say_who_trains_on_what(experiment_file, tmp_path, capfd, monkeypatch):
    arguments = ("train", str(experiment_file), "--run", str(tmp_path / "run"), "--set", "training.rounds=1")
    _, out, _ = invoke(capfd, monkeypatch, *arguments)
    assert re.search(r"training on \w+ \(\d+ cases: \w+", out)


def test_the_live_view_shows_the_mean_over_sites():
    from panorgan.workflows.event_words import mean_per_structure

    assert mean_per_structure({"a": {"liver": 0.5, "spleen": 0.25}, "b": {"liver": 1.0}}) == {
        "liver": 0.75,
        "spleen": 0.25,
    }


def test_one_case_has_no_interval():
    from panorgan.cli.train import in_words
    from panorgan.evaluation.statistics import Summary

    assert in_words(Summary(0.5, 0.1, 4, 0.5, 0.5, 0)) == "0.500 (too few cases for an interval)"
    assert in_words(Summary(0.5, 0.1, 4, 0.4, 0.6, 0)) == "0.500 (95 % interval 0.400–0.600)"


def test_narrow_terminals_get_organs_without_codes(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = invoke(capfd, monkeypatch, "organs")
    assert "SNOMED" not in out
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = invoke(capfd, monkeypatch, "organs")
    assert "SNOMED" in out


def test_evaluate_and_report_on_a_finished_run(finished, capfd, monkeypatch):
    before = (finished / "metrics.csv").read_bytes()
    code, out, _ = invoke(capfd, monkeypatch, "evaluate", str(finished))
    assert code == 0
    assert "liver" in out
    assert (finished / "metrics.csv").read_bytes() == before
    (finished / "report.html").unlink()
    code, out, _ = invoke(capfd, monkeypatch, "report", str(finished), "--json")
    assert code == 0
    assert Path(json.loads(out)["report"]).is_file()


def test_organs_of_an_unknown_name_are_an_error(capfd, monkeypatch):
    code, _, err = invoke(capfd, monkeypatch, "organs", "liverr")
    assert code == 2
    assert "[no-organ-found]" in err
    assert "'liver'" in err


def test_methods_and_organs_come_from_the_registries(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = invoke(capfd, monkeypatch, "methods")
    assert "fedprox" in out
    _, out, _ = invoke(capfd, monkeypatch, "methods", "--json")
    described = {entry["name"]: entry for entry in json.loads(out)}
    assert described["fedprox"]["settings"]["mu"]["default"] == 0.01
    assert described["central_full"]["pooled"]
    _, out, _ = invoke(capfd, monkeypatch, "organs")
    assert "kidney_left" in out
    _, out, _ = invoke(capfd, monkeypatch, "organs", "--json")
    assert {"liver", "heart_left_ventricle"} <= {entry["name"] for entry in json.loads(out)}


def test_demo_compares_the_federation_with_sites_alone_and_naive_pooling(tiny, tmp_path, capfd, monkeypatch):
    from panorgan.cli import demo

    monkeypatch.setattr(demo, "demo_experiment", lambda seed: tiny(training={"rounds": 1}))
    monkeypatch.setenv("COLUMNS", "140")
    code, out, _ = invoke(capfd, monkeypatch, "demo", "--run", str(tmp_path / "demo"))
    assert code == 0
    assert "federated" in out
    assert "naive" in out
    assert (tmp_path / "demo" / "chorus" / "report.html").is_file()
    code, out, _ = invoke(capfd, monkeypatch, "demo", "--run", str(tmp_path / "demo"), "--resume", "--json")
    result = json.loads(out.splitlines()[-1])["result"]
    assert set(result["all organs"]) == {"chorus", "solo", "central_naive"}
    page = (tmp_path / "demo" / "chorus" / "report.html").read_text()
    opening = page[: page.index("<nav")]  # the point comes before everything else
    assert re.findall(r'data-beside="([^"]+)"', opening) == ["north alone", "south alone", "central_naive", "solo"]


def test_compare_separates_own_organs_from_foreign_ones():
    from panorgan.cli.demo import compare

    rows = [
        {"site": "a", "organ": "liver", "dice": 0.9},
        {"site": "a", "organ": "spleen", "dice": 0.1},
        {"site": "b", "organ": "liver", "dice": 0.5},
    ]
    compared = compare({"m": rows}, {"a": {"liver"}, "b": set()})
    assert compared["liver"]["m"] == {"labelled_here": 0.9, "not_labelled_here": 0.5, "all": 0.7}
    assert compared["all organs"]["m"]["not_labelled_here"] == pytest.approx(0.3)
    assert compared["spleen"]["m"]["labelled_here"] is None


def test_a_terminal_gets_the_live_view(experiment_file, tmp_path):
    """Run under a pseudo-terminal: the view is drawn, then replaced by one closing line."""
    import pty

    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "panorgan", "train", str(experiment_file), "--run", str(tmp_path / "run")]
    child = subprocess.Popen(command, stdout=other, stderr=other, env=environment)
    os.close(other)
    shown = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # the other end was closed
            break
        if not chunk:
            break
        shown += chunk
    assert child.wait(timeout=60) == 0
    text = shown.decode()
    assert "rounds" in text
    assert "tiny · fedavg" in text
    assert "best validation Dice" in text
