"""The front door: what `import panorgan` offers, and the snippets of docs/library.md, run for real."""

from __future__ import annotations

import ast
import csv
import importlib
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

import panorgan
from panorgan.anatomy import Vocabulary
from panorgan.data.volume import read_scan
from panorgan.methods import registry
from panorgan.methods.protocol import Federation, RoundInfo, SiteInfo

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the snippets of the page leave behind, run one after the other in a folder of their own."""
    text = (ROOT / "docs" / "library.md").read_text()
    names: dict[str, Any] = {"__name__": "library_page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry.methods()))
        patch.chdir(tmp_path_factory.mktemp("library"))
        for snippet in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(compile(snippet, "docs/library.md", "exec"), names)
        names["folder"] = Path.cwd()
        names["run"] = panorgan.Run(Path("runs/tiny").resolve())
    return names


# -- the names -----------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, panorgan; print(*sorted({'torch', 'monai', 'nvflare'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_every_name_leads_to_what_type_checkers_see() -> None:
    tree = ast.parse(Path(panorgan.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: str(line.module) for line in block.body for alias in line.names}  # type: ignore[attr-defined]
    assert {*seen, "PanorganError", "__version__"} == set(panorgan.__all__)
    for name, module in seen.items():
        assert getattr(panorgan, name) is getattr(importlib.import_module(module), name)
    assert set(panorgan.__all__) <= set(dir(panorgan))
    with pytest.raises(AttributeError):
        _ = panorgan.trane


def test_every_name_is_documented() -> None:
    names = [name for name in panorgan.__all__ if not name.startswith("_")]
    assert [name for name in names if not (getattr(panorgan, name).__doc__ or "").strip()] == []


# -- the page ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_tells_its_listeners(page: dict[str, Any]) -> None:
    assert [sorted(losses) for losses in page["losses"]] == [["north", "south"]] * 2
    assert page["refused"][:2] == ("run-exists", str(Path("runs/tiny")))


@pytest.mark.slow
def test_the_tables_of_a_run(page: dict[str, Any]) -> None:
    run = page["run"]
    assert page["losses_at_north"] == [losses["north"] for losses in page["losses"]]
    assert page["mean"] == pytest.approx(np.mean([row["dice"] for row in page["liver"]]))
    assert page["refusals"] == []
    assert [row["event"] for row in run.events][-1] == "finished"
    assert {row["missed"] for row in run.scores} <= {True, False}
    with (page["folder"] / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["dice"]) for row in rows] == run.scores.column("dice")
    assert [row["organ"] for row in rows] == run.scores.column("organ")
    assert run.report_file.is_file()


@pytest.mark.slow
def test_predicting_an_array(page: dict[str, Any]) -> None:
    prediction, written = page["prediction"], page["folder"] / "labels" / "scan.nii.gz"
    assert prediction.labels.shape == page["voxels"].shape
    saved = read_scan(written)
    np.testing.assert_array_equal(saved.voxels, prediction.labels)
    np.testing.assert_array_equal(saved.affine, page["affine"])
    with pytest.raises(panorgan.PanorganError) as caught:
        prediction.save(page["folder"] / "labels" / "scan.mha")
    assert caught.value.code == "not-a-nifti-name"
    kidneys = {prediction.names[f"kidney_{side}"] for side in ("left", "right")}
    np.testing.assert_array_equal(page["both_kidneys"], np.isin(prediction.labels, list(kidneys)))


@pytest.mark.slow
def test_a_file_and_its_array_give_the_same_labels(page: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti1Image(page["voxels"], page["affine"]), path)
    from_file = panorgan.predict(str(page["run"].path), str(path), device="cpu")
    np.testing.assert_array_equal(from_file.labels, page["prediction"].labels)
    assert from_file.about["scan"] == "scan.nii.gz"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("voxels", "affine", "code"),
    [
        (np.zeros((8, 8, 8)), None, "affine-missing"),
        ("scan.nii.gz", np.eye(4), "affine-not-needed"),
        (np.zeros((8, 8, 8)), np.eye(3), "bad-affine"),
        (np.zeros((8, 8, 8)), np.zeros((4, 4)), "bad-affine"),
        (np.zeros((8, 8, 8, 2)), np.eye(4), "not-3d"),
        (np.full((8, 8, 8), math.nan), np.eye(4), "not-finite"),
        (np.zeros((8, 8, 8), complex), np.eye(4), "not-greyscale"),
    ],
)
def test_what_is_no_scan(page: dict[str, Any], voxels: Any, affine: Any, code: str) -> None:
    with pytest.raises(panorgan.PanorganError) as caught:
        page["model"].predict(voxels, affine)
    assert caught.value.code == code
    assert caught.value.fix


@pytest.mark.slow
def test_comparing(page: dict[str, Any]) -> None:
    assert page["overall"].column("method") == ["solo", "fedavg"]
    assert (page["folder"] / page["page"]).is_file()
    assert not page["results"].failures
    assert page["results"].runs["solo"][0].experiment.method["name"] == "solo"


@pytest.mark.slow
def test_a_registered_method_trains(page: dict[str, Any]) -> None:
    run, method = panorgan.Run(page["folder"] / "runs" / "half_way"), page["HalfWay"]
    assert run.complete
    assert run.manifest["experiment"]["method"]["name"] == "half_way"
    federation = Federation(Vocabulary(["liver"]), {"a": SiteInfo("a", 1, {"liver": 1})})
    rule = method.Server(method.Config(server_step=1), federation, {"w": torch.tensor([1.0])})
    rule.round_info = RoundInfo("train", 1, 1)
    rule.aggregate(SimpleNamespace(mean=lambda weight: {"w": torch.tensor([3.0])}))
    assert rule.weights["w"].item() == 2.0


@pytest.mark.slow
def test_a_run_in_another_process_reads_for_itself(page: dict[str, Any]) -> None:
    run = page["run"]
    _ = run.scores, run.model
    again = pickle.loads(pickle.dumps(run))
    assert again == run
    assert vars(again) == {"path": run.path}


# -- what the page does not show -----------------------------------------------------------------------------------


def test_the_library_is_silent(tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = panorgan.train(tiny(training={"rounds": 1, "local_steps": 1}), tmp_path / "run")
    panorgan.evaluate(run)
    panorgan.write_report(run)
    assert capfd.readouterr().out == ""


def test_an_experiment_from_a_file_a_text_or_a_dict(tiny_content, tmp_path: Path) -> None:
    import yaml

    content = tiny_content()
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    overrides = {"training.rounds": 7, "training.optimizer.learning_rate": 1e-5}
    found = [panorgan.load_experiment(source, overrides) for source in (tmp_path / "tiny.yaml", content)]
    found.append(panorgan.load_experiment(str(tmp_path / "tiny.yaml"), ["training.rounds=7"]))
    assert [experiment.training.rounds for experiment in found] == [7, 7, 7]
    assert found[0] == found[1]
    assert found[0].training.optimizer.learning_rate == 1e-5
    assert content == tiny_content(), "the dict was changed"


def test_folders_of_a_dict_are_those_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sites = {"north": {"folder": "data/north"}, "south": {"folder": Path("data/south")}}
    experiment = panorgan.load_experiment({"vocabulary": ["liver"], "sites": sites})
    assert [site.folder for site in experiment.sites.values()] == [tmp_path / "data" / name for name in sites]


def test_the_doctor_takes_experiments_and_folders(tiny, cache: Path) -> None:
    from panorgan.workflows.site_cases import site_settings

    experiment = tiny()
    seen: list[str] = []
    whole = panorgan.doctor(experiment, workers=1, on_progress=lambda what, done, total: seen.append(what))
    assert [source.site for source in whole.sources] == ["island", "north", "south"]
    assert "reading cases" in seen
    north = site_settings(experiment, cache, lambda *_: None)["north"].folder
    one = panorgan.doctor(str(north), workers=1)
    assert [source.folder for source in one.sources] == [north]


def test_a_table(tmp_path: Path) -> None:
    table = panorgan.Table([{"site": "a", "dice": 0.1}, {"site": "=b", "dice": np.float64(0.25), "note": "x"}])
    assert table.columns == ("site", "dice", "note")
    assert table.where(site="a") == [{"site": "a", "dice": 0.1}]
    assert table.column("note") == [None, "x"]
    text = table.to_csv(str(tmp_path / "table.csv")).read_text()
    assert text == "site,dice,note\na,0.1,\n'=b,0.25,x\n"
