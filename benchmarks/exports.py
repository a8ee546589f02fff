"""Do exported models give panorgan's label maps, how large are they, and how long do they take?

    python benchmarks/exports.py [--data ../shared/data] [--methods NAME,…]
        [--out benchmarks/results/exports.md]

Trains each method for a few rounds on generated hospitals, exports its model as MONAI Bundle and to ONNX, and segments
generated scans and, where the folder of public data is there, a CT and two MR scans of it. The bundle runs in a process
that cannot import panorgan. ONNX replaces the network in panorgan's own pipeline. How good a label map is does not
matter here: a model of few rounds is unsure in many voxels, in which a small difference would show.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import onnxruntime
import torch

import panorgan
from panorgan.data.volume import read_scan
from panorgan.networks import SegmentationNetwork
from panorgan.workflows.model_bundle import Model

REAL = {
    "CT (TotalSegmentator)": "totalsegmentator_examples/example_ct_sm.nii.gz",
    "MR (CHAOS)": "chaos_mr/imagesTr/chaos_01.nii.gz",
    "MR (ACDC)": "acdc/patient001/patient001_frame01.nii.gz",
}
PHANTOMS = 2
EXPERIMENT: dict[str, Any] = {
    "name": "exports",
    "vocabulary": ["liver", "spleen", "kidney_left", "kidney_right"],
    "phantom": {
        "field_of_view_mm": [364, 320, 220],
        "sites": [
            {"name": "north", "annotated": ["liver"], "cases": 4, "spacing_mm": [4, 4, 5]},
            {"name": "south", "annotated": ["spleen", "kidney"], "cases": 4, "spacing_mm": [3, 3, 6]},
        ],
    },
    "plan": {"spacing_mm": [4, 4, 4], "window_hu": [-160, 240], "crop": "body"},
    "network": {"features": [16, 32, 64]},
    "training": {
        "rounds": 3,
        "local_steps": 6,
        "validate_every": 0,
        "overlap": 0.5,
        "sampling": {"patch_size": [32, 32, 32], "batch_size": 2},
    },
}
# A smaller transformer than the paper's, which would take most of the time.
SETTINGS: dict[str, dict[str, Any]] = {"fediod": {"layers": 2, "heads": 4, "head_width": 32, "mlp_width": 128}}
# Runs `python -m monai.bundle` where panorgan cannot be imported.
WITHOUT_PANORGAN = """
import runpy, sys, time
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "panorgan":
            raise ImportError("panorgan must not be needed")
sys.meta_path.insert(0, Refuse())
sys.argv[0] = "monai.bundle"
runpy.run_module("monai.bundle", run_name="__main__", alter_sys=True)
"""


class OnnxNetwork(SegmentationNetwork):
    """An ONNX file in the place of a network: it answers with logits whose activation gives the file's answer."""

    def __init__(self, path: Path, like: SegmentationNetwork) -> None:
        super().__init__(like.vocabulary, like.activation)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Images → logits."""
        (found,) = self.session.run(None, {"image": image.numpy()})
        probabilities = torch.from_numpy(found).double()
        return probabilities.log() if self.activation == "softmax" else probabilities.logit()


def main() -> int:
    """Measure and write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, default=Path("../shared/data"))
    options.add_argument("--methods", default="fedavg,flkd,segviz-2d,fediod,multidecoder,dodnet")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| Model | Form | Size (MB) | Export (s) | Label maps (s) | panorgan (s) | Largest difference | Other voxels |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for method in chosen.methods.split(","):
            lines += measured(method, chosen.data, Path(scratch) / method)
            print("\n".join(lines[-2:]), flush=True)
    if chosen.out:
        chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def measured(method: str, data: Path, folder: Path) -> list[str]:
    """The rows of one method: a bundle and an ONNX file."""
    name, _, flat = method.partition("-")
    content = {**EXPERIMENT, "method": {"name": name, **SETTINGS.get(name, {})}}
    if flat:
        content["network"] = {**content["network"], "dimensions": 2}
        sampling = {**content["training"]["sampling"], "patch_size": [64, 64, 1], "batch_size": 8}
        content["training"] = {**content["training"], "sampling": sampling}
    run = panorgan.train(panorgan.load_experiment(content), folder / "run", cache=folder / "cache")
    model = panorgan.load_model(run, "cpu")
    scans = collected(data, folder / "cache", folder / "scans")
    started = time.perf_counter()
    wanted = {scan.name: model.predict(scan).labels for scan in scans}
    own = time.perf_counter() - started
    rows: list[str] = []
    for to, predict in (("bundle", with_bundle), ("onnx", with_onnx)):
        started = time.perf_counter()
        made = panorgan.export(run, to)
        took = time.perf_counter() - started
        size = sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file()) / 1e6
        started = time.perf_counter()
        found = predict(model, made.folder, scans, folder)
        seconds = time.perf_counter() - started
        differ = sum(int(np.count_nonzero(found[scan] != labels)) for scan, labels in wanted.items())
        voxels = sum(labels.size for labels in wanted.values())
        shown = f"{differ:,} of {voxels:,}"
        difference = f"{made.check['max_difference']:.1e}"
        words = f"{name}{' (2D)' if flat else ''}, {model.card['parameters']:,} parameters"
        rows.append(
            f"| {words} | {to} | {size:.2f} | {took:.1f} | {seconds:.1f} | {own:.1f} | {difference} | {shown} |"
        )
    return rows


def collected(data: Path, cache: Path, folder: Path) -> list[Path]:
    """Links to the scans: generated test cases, and the public ones that are there."""
    folder.mkdir(parents=True)
    sources = sorted(cache.rglob("*.nii.gz"))
    phantoms = [path for path in sources if "image" in str(path).lower()][:PHANTOMS]
    real = [next(iter(sorted(data.glob(pattern))), None) for pattern in REAL.values()]
    found = []
    for source in (*phantoms, *real):
        if source is None:
            continue
        link = folder / f"{len(found)}_{source.name}"
        link.symlink_to(source.resolve())
        found.append(link)
    return found


def with_bundle(model: Model, bundle: Path, scans: list[Path], folder: Path) -> dict[str, np.ndarray]:
    """Label maps by `python -m monai.bundle run`, the start of Python and torch included."""
    out = folder / "bundle-out"
    arguments = ("run", "inference", "--config_file", "configs/inference.json", "--device", "cpu")
    places = ("--dataset_dir", str(scans[0].parent.absolute()), "--output_dir", str(out.absolute()))
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_PANORGAN, *arguments, *places],
        cwd=bundle,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    names = {scan.name: scan.name.replace(".nii.gz", "_seg.nii.gz") for scan in scans}
    return {scan: np.asarray(nib.load(out / written).dataobj) for scan, written in names.items()}


def with_onnx(model: Model, file: Path, scans: list[Path], folder: Path) -> dict[str, np.ndarray]:
    """Label maps by panorgan with the network of the file."""
    other = replace(model, network=OnnxNetwork(file / "model.onnx", model.network))
    return {scan.name: other.label_map(read_scan(scan)) for scan in scans}


if __name__ == "__main__":
    sys.exit(main())
