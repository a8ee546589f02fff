"""A MONAI Bundle gives panorgan's label maps, in a process that cannot import panorgan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from made_models import ORGANS, SMALL_TRANSFORMER, make_model, write_scans

import panorgan
from panorgan.exporting import bundle_scripts
from panorgan.federation.start_settings import StartSettings
from panorgan.methods.registry import methods

# Runs `python -m monai.bundle`, once for each list of arguments, where panorgan cannot be imported. Most of the time
# goes into importing MONAI.
WITHOUT_PANORGAN = """
import json, os, runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "panorgan":
            raise ImportError("panorgan must not be needed")
sys.meta_path.insert(0, Refuse())
for folder, arguments in json.loads(sys.stdin.read()):
    os.chdir(folder)
    sys.argv[:] = ["monai.bundle", *arguments]
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]
    try:
        runpy.run_module("monai.bundle", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, end.code
"""

KINDS = {
    "softmax, cropped to the body, cubic, cleaned of pieces": {
        "plan": {"crop": "body", "image_interpolation": "cubic"},
        "postprocess": "pieces",
    },
    "softmax, cleaned as FLKD does": {"postprocess": "flkd", "plan": {"spacing_mm": (4, 4, 4)}, "overlap": 0.0},
    "a head per organ, z-score, cleaned as UFPS does": {
        "method": {"name": "flkd"},
        "network": {"organs": "heads"},
        "plan": {"intensity": "zscore"},
        "postprocess": "ufps",
    },
    "2D slices, FedIOD's transformer": {
        "method": {"name": "fediod", **SMALL_TRANSFORMER},
        "network": {"dimensions": 2, "organs": "decoders"},
        "patch": (12, 8, 1),
    },
}


def run_bundles(bundles: Iterable[Path], scans: Path) -> None:
    """Each writes into its own folder `out`."""
    arguments = ("run", "inference", "--config_file", "configs/inference.json", "--dataset_dir", str(scans))
    places = {folder: ("--output_dir", str(folder / "out"), "--device", "cpu") for folder in bundles}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_PANORGAN],
        input=json.dumps([(str(folder), (*arguments, *place)) for folder, place in places.items()]),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> dict[str, Path]:
    """Of every kind the model and, in its `bundle`, the bundle with what it made of the scans."""
    place = tmp_path_factory.mktemp("bundles")
    models = {kind: make_model(place / str(n) / "model", **KINDS[kind]) for n, kind in enumerate(KINDS)}
    for folder in models.values():
        made = panorgan.export(folder, "bundle", folder.parent / "bundle")
        assert made.check["decided_otherwise"] == 0
    write_scans(place / "scans")
    run_bundles([folder.parent / "bundle" for folder in models.values()], place / "scans")
    return models


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_the_same_label_maps_without_panorgan(kind, bundles):
    folder = bundles[kind]
    model = panorgan.load_model(folder, "cpu")
    for scan in sorted((folder.parents[1] / "scans").iterdir()):
        written = nib.load(folder.parent / "bundle" / "out" / scan.name.replace(".nii.gz", "_seg.nii.gz"))
        expected = model.predict(scan)
        found = np.asarray(written.dataobj)
        assert len(np.unique(expected.labels)) > 2, "a map of one label would prove little"
        assert np.count_nonzero(found != expected.labels) == 0
        assert written.affine == pytest.approx(expected.affine, abs=1e-5)


@pytest.mark.slow
def test_the_network_of_every_method_is_the_same_as_torchscript(tmp_path):
    seen: set[type] = set()
    for name in methods():
        method = {"name": name, **(SMALL_TRANSFORMER if name == "fediod" else {})}
        folder = make_model(tmp_path / name, method=method)
        network = type(panorgan.load_model(folder, "cpu").network)
        if network in seen:
            continue
        seen.add(network)
        check = panorgan.export(folder, "bundle", tmp_path / f"{name}-bundle").check
        assert check["max_difference"] < 1e-5, name
        assert check["decided_otherwise"] == 0, name
    assert len(seen) > 10


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    return panorgan.export(make_model(folder / "model"), "bundle", folder / "bundle").folder


def test_its_files_are_where_monai_looks_for_them(bundle):
    names = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert {
        "LICENSE",
        "configs/inference.json",
        "configs/metadata.json",
        "docs/README.md",
        "models/model.ts",
        "scripts/__init__.py",
        "scripts/transforms.py",
    } <= names


def test_a_network_that_makes_tensors_itself_stays_on_the_cpu(bundle, tmp_path):
    folder = make_model(tmp_path / "model", method={"name": "fediod", **SMALL_TRANSFORMER})
    transformer = panorgan.export(folder, "bundle", tmp_path / "bundle").folder
    devices = [
        json.loads((place / "configs" / "inference.json").read_text())["device"] for place in (bundle, transformer)
    ]
    assert ["cuda" in device for device in devices] == [True, False]


def test_its_metadata_names_channels_and_labels(bundle):
    content = json.loads((bundle / "configs" / "metadata.json").read_text())
    output = content["network_data_format"]["outputs"]["pred"]
    assert output["channel_def"] == dict(zip("01234", ("background", *ORGANS), strict=True))
    assert output["num_channels"] == 5
    assert content["label_classes"]["2"] == ORGANS[1]
    image = content["network_data_format"]["inputs"]["image"]
    assert (image["spatial_shape"], image["modality"], image["value_range"]) == ([8, 8, 8], "CT", [-1, 1])


def test_monai_finds_every_property_that_it_asks_for(bundle):
    from monai.bundle import ConfigWorkflow

    workflow = ConfigWorkflow(
        config_file=str(bundle / "configs" / "inference.json"), logging_file=False, workflow_type="infer"
    )
    missing = [
        name
        for name, facts in workflow.properties.items()
        if facts["required"]
        and facts["id"].replace("_meta_::", "") not in workflow.parser
        and name not in workflow.parser["_meta_"]
    ]
    assert missing == []


def test_no_script_imports_panorgan(bundle):
    for script in (bundle / "scripts").glob("*.py"):
        assert re.findall(r"^\s*(?:from|import) panorgan.*$", script.read_text(), flags=re.MULTILINE) == [], script.name


def test_an_import_without_a_place_in_the_bundle_is_noticed():
    with pytest.raises(KeyError):
        bundle_scripts.standing_alone("from panorgan.federation.site import SiteWorker\n")


@pytest.mark.slow
def test_several_channels_come_in_one_file_or_in_one_for_each(tmp_path):
    kinds = {"volumes": ((8, 8, 8), 3), "slices": ((12, 8, 1), 2)}
    stored = write_scans(tmp_path / "one")
    scans = tmp_path / "scans"
    scans.mkdir()
    for number, path in enumerate(stored):
        image = nib.load(path)
        first = np.asarray(image.dataobj, dtype=np.float32)
        other = np.roll(first, 3, axis=1) * 2 + 40
        if number:
            for place, channel in enumerate((first, other)):
                nib.save(nib.Nifti1Image(channel, image.affine), scans / path.name.replace(".", f"_{place:04d}.", 1))
        else:
            nib.save(nib.Nifti1Image(np.stack((first, other), axis=-1), image.affine), scans / path.name)
    models = {}
    for kind, (patch, dimensions) in kinds.items():
        network = {"input_channels": 2, "dimensions": dimensions}
        folder = make_model(
            tmp_path / kind / "model", network=network, channels=("t1", "t2"), patch=patch, plan={"intensity": "zscore"}
        )
        made = panorgan.export(folder, "bundle", tmp_path / kind / "bundle")
        assert made.check["decided_otherwise"] == 0
        models[kind] = panorgan.load_model(folder, "cpu")
    run_bundles([tmp_path / kind / "bundle" for kind in kinds], scans)
    for kind, model in models.items():
        for number, path in enumerate(stored):
            name = path.name.removesuffix(".nii.gz")
            files = [scans / f"{name}_{place:04d}.nii.gz" for place in range(2)] if number else scans / path.name
            expected = model.predict(files)
            suffix = "_0000_seg.nii.gz" if number else "_seg.nii.gz"
            written = nib.load(tmp_path / kind / "bundle" / "out" / f"{name}{suffix}")
            assert len(np.unique(expected.labels)) > 2
            assert np.count_nonzero(np.asarray(written.dataobj) != expected.labels) == 0, (kind, name)
            assert written.affine == pytest.approx(expected.affine, abs=1e-5)
    about = json.loads((tmp_path / "volumes" / "bundle" / "configs" / "metadata.json").read_text())
    image = about["network_data_format"]["inputs"]["image"]
    assert (image["num_channels"], image["channel_def"]) == (2, {"0": "t1", "1": "t2"})


def test_panorgan_reads_its_own_bundle(tmp_path):
    folder = make_model(tmp_path / "model")
    panorgan.export(folder, "bundle", tmp_path / "bundle")
    scan = write_scans(tmp_path / "scans")[0]
    first, second = (panorgan.predict(place, scan, device="cpu").labels for place in (folder, tmp_path / "bundle"))
    np.testing.assert_array_equal(first, second)
    started = StartSettings.model_validate(tmp_path / "bundle")
    assert (started.sha256, started.organs) == (StartSettings.model_validate(folder).sha256, ("background", *ORGANS))
