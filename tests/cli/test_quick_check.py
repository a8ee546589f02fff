"""Simple mistakes are reported before torch is imported, with the codes of the full check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from panorgan.cli import quick_check
from panorgan.cli.quick_check import check_experiment_file, check_method_names, check_run_exists
from panorgan.config import Experiment, load_experiment
from panorgan.errors import PanorganError, RunError
from panorgan.federation.start_settings import model_folder

GOOD = {
    "vocabulary": ["liver", "spleen"],
    "sites": {"north": {"folder": "north"}, "south": {"folder": "south"}},
    "method": {"name": "fedprox", "mu": 0.1},
    "training": {"rounds": 2, "sampling": {"patch_size": [32, 32, 32]}},
    "network": {"features": [4, 8]},
}
MISTAKES = {
    "unknown-setting": {"training": {"rouns": 3}},
    "unknown-method": {"method": {"name": "fedproxx"}},
    "unknown-organ": {"vocabulary": ["livver"]},
}


def written(folder: Path, **changes: object) -> Path:
    for site in ("north", "south"):
        (folder / site).mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


def code_of(path: Path, *overrides: str, data: bool = True) -> tuple[str, str]:
    with pytest.raises(PanorganError) as error:
        check_experiment_file(path, overrides, data)
    return error.value.code, error.value.where


def without_torch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "torch.py").write_text("raise AssertionError('imported')")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    code = "from panorgan.cli.main import main; import sys; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_names_are_fresh():
    stored = quick_check.FILE.read_text(encoding="utf-8")
    assert stored == quick_check.file_content(Experiment), "stale: run python scripts/describe_methods.py"


@pytest.mark.parametrize("code", MISTAKES)
def test_it_finds_what_the_full_check_finds(code, tmp_path):
    path = written(tmp_path, **MISTAKES[code])
    with pytest.raises(PanorganError) as full:
        load_experiment(path)
    found = code_of(path)
    assert found == (full.value.code, full.value.where)
    assert found[0] == code


def test_a_methods_own_settings(tmp_path):
    path = written(tmp_path)
    check_experiment_file(path)
    assert code_of(path, "method.muu=1") == ("unknown-setting", "--set method.muu")
    assert code_of(path, "training.round=1") == ("unknown-setting", "--set training.round")
    assert code_of(path, "method=fedproxx")[0] == "unknown-method"
    check_experiment_file(path, ["training.start_from=somewhere", "sites.north.labels={a: b}", "method=fedavg"])


def test_folders_of_data(tmp_path):
    path = written(tmp_path, sites={"north": {"folder": "nroth"}})
    assert code_of(path) == ("folder-missing", str(tmp_path / "nroth"))
    check_experiment_file(path, data=False)


def test_settings_that_changed_since_are_left_to_the_full_check(tmp_path, monkeypatch):
    path = written(tmp_path, training={"rouns": 3})
    stale = tmp_path / "names.json"
    stale.write_text(quick_check.FILE.read_text().replace('"hash": "', '"hash": "0'))
    monkeypatch.setattr(quick_check, "FILE", stale)
    check_experiment_file(path)


def test_methods_of_the_command_line():
    check_method_names("solo,fedprox+mu=0.1,even=fedavg+weighting=uniform", "--methods")
    check_method_names("fedavg+network.features=[8,16]", "--methods")
    with pytest.raises(PanorganError) as error:
        check_method_names("solo,even=fedavgg+weighting=uniform", "--methods")
    assert (error.value.code, error.value.where) == (
        "unknown-method",
        "--methods even=fedavgg+weighting=uniform: method.name",
    )


def test_a_file_is_no_run(tmp_path):
    """Such as a scan, where model and scans were swapped, or a run's own file."""
    scan, manifest = tmp_path / "scan.nii.gz", tmp_path / "run" / "manifest.json"
    manifest.parent.mkdir()
    for path in (scan, manifest):
        path.touch()
    for path, way_out in ((scan, "model comes first"), (manifest, str(manifest.parent))):
        with pytest.raises(RunError) as error:
            check_run_exists(path)
        assert (error.value.code, error.value.where) == ("run-is-a-file", str(path))
        assert way_out in error.value.fix


def test_a_folder_of_runs_names_them(tmp_path):
    (tmp_path / "first" / "model").mkdir(parents=True)
    (tmp_path / "first" / "model" / "model.json").touch()
    with pytest.raises(RunError) as error:
        model_folder(tmp_path)
    assert error.value.code == "no-model"
    assert "first" in error.value.why


def test_a_run_that_is_not_there_names_those_that_are(tmp_path):
    (tmp_path / "abdomen").mkdir()
    check_run_exists(tmp_path / "abdomen")
    with pytest.raises(PanorganError) as error:
        check_run_exists(tmp_path / "abdomn")
    assert error.value.code == "run-missing"
    assert "'abdomen'" in error.value.why


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["train", "missing.yaml"], "settings-file-missing"),
        (["compare", "experiment.yaml", "--methods", "solos"], "unknown-method"),
        (["train", "experiment.yaml", "--set", "rouns=1"], "unknown-setting"),
        (["predict", "runs/missing", "scan.nii.gz", "--out", "p"], "run-missing"),
        (["federation", "preflight", "missing"], "kit-missing"),
        (["federation", "approve", "missing"], "kit-missing"),
    ],
)
def test_commands_do_not_wait_for_torch(arguments, code, tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = without_torch(tmp_path, *arguments)
    assert done.returncode == 2
    assert f"[{code}]" in done.stderr
