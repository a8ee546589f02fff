"""Does every method still give the same bits? Trains each on a tiny phantom federation and compares hashes.

    OMP_NUM_THREADS=1 python benchmarks/bits.py [--write] [--only NAME ...]

For each registered method: SHA-256 over the delivered weights (keys, shapes, types and values, keys sorted) and over
metrics.csv, after three rounds of two steps on one CPU thread. `--write` keeps them in results/bits.json, with `--only`
together with those of the other methods; without it they are compared with that file, and the exit code is 1 if any
differs. Bits are those of one torch version on one kind of processor: after a change of either, write the file again
from a commit that is known to be right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from panorgan.config import parse_experiment
from panorgan.methods.registry import methods
from panorgan.workflows.execute import train

RESULTS = Path(__file__).resolve().parent / "results" / "bits.json"

EXPERIMENT: dict[str, Any] = {
    "name": "bits",
    "vocabulary": ["liver", "spleen", "kidney_left", "kidney_right"],
    "hardware": {"device": "cpu", "threads": 1},
    "phantom": {
        "field_of_view_mm": [364, 320, 220],
        "sites": [
            {"name": "north", "annotated": ["liver"], "cases": 5, "spacing_mm": [12, 12, 12]},
            {"name": "south", "annotated": ["spleen", "kidney"], "cases": 4, "spacing_mm": [11, 11, 13]},
            {"name": "island", "cases": 1, "external": True, "spacing_mm": [12, 12, 12], "orientation": "RAS"},
        ],
    },
    "plan": {"spacing_mm": [12, 12, 12], "window_hu": [-160, 240]},
    "network": {"features": [4, 8, 8], "organ_prior": None},
    "training": {
        "rounds": 3,
        "local_steps": 2,
        "validate_every": 2,
        "select": "last",  # the best round might be one before a module begins
        "overlap": 0.0,
        "sampling": {"patch_size": [16, 16, 16], "batch_size": 2},
        "optimizer": {"learning_rate": 0.01},
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    # What brings every stage and module of a method into three rounds.
    "fedasam": {"swa_start": 0.3, "swa_cycle": 1},
    "fedasam_pl": {"swa_start": 0.3, "swa_cycle": 1},
    "flkd": {"pretrain": 0.7},
    "segviz": {"finetune_rounds": 1},
    "ufps": {
        "pretrain": 0.7,
        "schedule_start": 0,
        "schedule_end": 0.9,
        "reverse_ce_start": 0.6,
        "main_teacher_start": 0.6,
        "main_teacher_dice": 0,
        "uncertainty_start": 0.6,
        "sharpness_start": 0.6,
        "mask_every": 1,
    },
}
SLICES: dict[str, Any] = {
    # FedIOD stacks attention maps of slices; a volume has only one.
    "network": {"features": [4, 8, 8], "organ_prior": None, "dimensions": 2},
    "training": {**EXPERIMENT["training"], "sampling": {"patch_size": [16, 16, 1], "batch_size": 4}},
}


def experiment(method: str) -> dict[str, Any]:
    """The tiny federation's experiment under a method."""
    shape = SLICES if method == "fediod" else {}
    return {**EXPERIMENT, **shape, "method": {"name": method, **SETTINGS.get(method, {})}}


def hash_of_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over keys, types, shapes and values, keys sorted."""
    digest = hashlib.sha256()
    for key, value in sorted(tensors.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def bits_of(method: str, folder: Path) -> dict[str, str]:
    """Train a method in a folder, with a cache beside it; hashes of the model that it delivers and of its scores."""
    run = folder / method
    train(parse_experiment(experiment(method)), run, cache=folder / "cache")
    return {
        "weights": hash_of_tensors(load_file(run / "model" / "model.safetensors")),
        "metrics": hashlib.sha256((run / "metrics.csv").read_bytes()).hexdigest(),
    }


def main() -> int:
    """Compare with the file, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the hashes instead of comparing")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(methods()), help="methods; all by default")
    arguments = parser.parse_args()
    others = set(methods()) - set(arguments.only)
    kept = json.loads(RESULTS.read_text()) if others or not arguments.write else {}
    here = {"torch": torch.__version__, "processor": platform.machine()}
    if arguments.write and others and any(kept[key] != here[key] for key in here):
        parser.error(f"kept: torch {kept['torch']} on {kept['processor']}; write all methods here, without --only")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: bits_of(name, Path(folder)) for name in arguments.only}
    if arguments.write:
        whole = found | {name: value for name, value in kept.get("methods", {}).items() if name in others}
        content = {**here, "methods": dict(sorted(whole.items()))}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n")
        return 0
    if kept["torch"] != torch.__version__:
        print(f"The kept hashes are those of torch {kept['torch']}, this is {torch.__version__}.")
    differ = [name for name in found if found[name] != kept["methods"].get(name)]
    missing = sorted(set(kept["methods"]) - set(methods()))
    print(f"{len(found) - len(differ)} of {len(found)} methods give the kept bits.")
    print("\n".join([*(f"differs: {name}" for name in differ), *(f"gone: {name}" for name in missing)]))
    return 1 if differ or missing else 0


if __name__ == "__main__":
    sys.exit(main())
