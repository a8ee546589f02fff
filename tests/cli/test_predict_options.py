"""`panorgan predict` with volumes.csv, --organs and --preview."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from invoking import invoke
from made_models import make_model, write_scans
from PIL import Image


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> list[Path]:
    return write_scans(tmp_path_factory.mktemp("scans") / "scans")


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "volumes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_volumes_are_those_of_the_label_maps(model, scans, tmp_path, capfd, monkeypatch):
    out = tmp_path / "out"
    code, _, _ = invoke(capfd, monkeypatch, "predict", str(model), str(scans[0].parent), "--out", str(out))
    assert code == 0
    rows = table(out)
    assert len(rows) == 3 * 4
    for row in rows:
        image = nib.load(out / row["labels"])
        scan = nib.load(scans[0].parent / row["labels"]).get_fdata()
        ids = {"liver": [1, 2], "liver_tumour": [2], "spleen": [3], "kidney_left": [4]}[row["organ"]]
        mask = np.isin(np.asarray(image.dataobj), ids)
        assert int(row["voxels"]) == mask.sum() > 0
        assert float(row["volume_ml"]) == pytest.approx(mask.sum() * np.prod(image.header.get_zooms()) / 1000, abs=1e-3)
        assert float(row["mean_intensity"]) == pytest.approx(scan[mask].mean(), abs=0.02)
        beside = json.loads((out / row["labels"].replace(".nii.gz", ".json")).read_text())["organs"][row["organ"]]
        assert [str(beside[name]) for name in ("volume_ml", "mean_intensity")] == [
            row[name] for name in ("volume_ml", "mean_intensity")
        ]
        assert len(row["volume_ml"].partition(".")[2]) <= 3
        assert abs(float(row["mean_intensity"])) < 1 or len(row["mean_intensity"].partition(".")[2]) <= 2
        assert beside["cut_off"] == row["cut_off"].split()


def test_a_scan_that_is_predicted_again_has_its_rows_once(model, scans, tmp_path, capfd, monkeypatch):
    for scan, options in ((scans[0], ()), (scans[1], ()), (scans[0], ("--organs", "spleen"))):
        arguments = ("predict", str(model), str(scan), "--out", str(tmp_path), *options)
        assert invoke(capfd, monkeypatch, *arguments)[0] == 0
    rows = [(row["labels"], row["organ"]) for row in table(tmp_path)]
    assert rows == [
        *((scans[1].name, organ) for organ in ("liver", "liver_tumour", "spleen", "kidney_left")),
        (scans[0].name, "spleen"),
    ]


def test_a_table_of_another_kind_is_not_overwritten(model, scans, tmp_path, capfd, monkeypatch):
    (tmp_path / "volumes.csv").write_text("patient,age\n")
    code, _, err = invoke(capfd, monkeypatch, "predict", str(model), str(scans[0]), "--out", str(tmp_path))
    assert code == 2
    assert "[overwrites-file]" in err
    assert [path.name for path in tmp_path.iterdir()] == ["volumes.csv"]


def test_unknown_organs_are_refused_before_anything_is_written(model, scans, tmp_path, capfd, monkeypatch):
    arguments = ("predict", str(model), str(scans[0]), "--out", str(tmp_path / "o"), "--organs", "spleen, livr")
    code, _, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 2
    assert "[organ-not-in-model]" in err
    assert "'liver'" in err
    assert not (tmp_path / "o").exists()


def test_the_preview_shows_the_organs_in_their_colours(model, scans, tmp_path, capfd, monkeypatch):
    predict = ("predict", str(model), str(scans[0]), "--out", str(tmp_path), "--preview", "--json")
    code, out, _ = invoke(capfd, monkeypatch, *predict)
    assert code == 0
    shown = json.loads(out.splitlines()[-1])
    assert shown["preview"] == str(tmp_path / "slope.png")
    picture = np.asarray(Image.open(shown["preview"]).convert("RGB")).astype(int)
    coloured = np.ptp(picture, axis=2) > 30
    assert coloured.mean() > 0.05
    assert invoke(capfd, monkeypatch, *predict)[0] == 0, "a picture of ours is replaced"


def test_a_picture_of_somebody_else_is_not_overwritten(model, scans, tmp_path, capfd, monkeypatch):
    shutil.copy(scans[1], tmp_path / "slope.png")
    arguments = ("predict", str(model), str(scans[0]), "--out", str(tmp_path), "--preview")
    code, _, err = invoke(capfd, monkeypatch, *arguments)
    assert code == 2
    assert "[overwrites-file]" in err
