"""The command line as a user meets it: what it prints, where errors go, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from panorgan.cli import main as cli
from panorgan.runs.prepare import prepare


def invoke(capfd, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["panorgan", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capfd.readouterr()
    return int(left.value.code or 0), out, err


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
    assert any(line.get("event") == "round" for line in lines)


def test_errors_go_to_stderr_with_where_and_fix(experiment_file, tmp_path, capfd, monkeypatch):
    target = tmp_path / "run"
    code, out, err = invoke(
        capfd, monkeypatch, "train", str(experiment_file), "--run", str(target), "--set", "training.roundz=3"
    )
    assert code == 2
    assert out == ""
    assert "no setting called 'roundz'" in err
    assert "did you mean 'rounds'" in err
    assert "Traceback" not in err
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "absent.yaml"), "no such experiment"),
        (("evaluate", "nowhere"), "not a run folder"),
        (("report", "nowhere"), "run folder"),
        (("predict", "nowhere", "absent.nii.gz", "--out", "x"), "missing"),
    ],
)
def test_missing_things(arguments, says, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 2
    assert says in err
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
    assert "bad.nii.gz" in err
    assert not list((tmp_path / "p").glob("*bad*"))


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


def test_demo_compares_the_federation_with_naive_pooling(tiny, tmp_path, capfd, monkeypatch):
    from panorgan.cli import demo

    monkeypatch.setattr(demo, "demo_experiment", lambda seed: tiny(training={"rounds": 1}))
    monkeypatch.setenv("COLUMNS", "140")
    code, out, _ = invoke(capfd, monkeypatch, "demo", "--run", str(tmp_path / "demo"))
    assert code == 0
    assert "federated" in out
    assert "naive" in out
    assert (tmp_path / "demo" / "fedavg" / "report.html").is_file()
    code, out, _ = invoke(capfd, monkeypatch, "demo", "--run", str(tmp_path / "demo"), "--resume", "--json")
    result = json.loads(out.splitlines()[-1])["result"]
    assert set(result["all organs"]) == {"fedavg", "central_naive"}


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
