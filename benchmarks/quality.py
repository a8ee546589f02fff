"""Every method on every example, several seeds, equal budgets: is an organ lost, and who is better off alone?

    python benchmarks/quality.py [--sets phantom,chaos] [--methods all] [--seeds 0,1,2] [--at-once 24] \
        [--minutes 9] [--runs runs/quality] [--json FILE]

Each data set is one `panorgan compare`, which resumes: call it again until nothing is missing. `--minutes` ends the
calls in time to collect what is there (finished runs only). Prints, per data set and method, the mean Dice of each
seed, the difference to solo, the organ that does worst against solo in any seed, and the delivered rounds; writes the
same and the figures per organ as JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from scipy.stats import wilcoxon

from panorgan.methods.registry import methods as all_methods

ROOT = Path(__file__).resolve().parent.parent
ALONE = "solo"
# Data sets that lie beside the repository, unless it is said where they are.
os.environ.setdefault("PANORGAN_DATA", str(ROOT.parent / "shared" / "data"))

BUDGET = {
    "training.rounds": 40,
    "training.local_steps": 20,
    "training.validate_every": 10,
    "training.precision": "bfloat16",
    "training.optimizer.learning_rate": 0.002,
    "network.features": [16, 32, 64, 128],
    "splits.seed": 0,
    "local_models": 0,
}
"""The same at every site, for every method; teachers come on top."""


@dataclass(frozen=True)
class DataSet:
    """An experiment file, and what differs from `BUDGET` on it."""

    file: str
    settings: Mapping[str, object]


SETS = {
    "phantom": DataSet("benchmarks/experiments/phantom_three_sites.yaml", {}),
    "chaos": DataSet("examples/chaos.yaml", {"training.sampling.patch_size": [64, 64, 24]}),
    "acdc_2d": DataSet("examples/acdc_2d.yaml", {}),
    "acdc_3d": DataSet("examples/acdc.yaml", {}),
    "hippocampus": DataSet("examples/hippocampus.yaml", {}),
    **{
        f"hard_{sites}": DataSet(f"benchmarks/experiments/phantom_hard_{sites}.yaml", {})
        for sites in ("3", "7", "21", "overlap", "twins")
    },
}


def main() -> None:
    """Run what is missing, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default="all", help="names, or all registered ones")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the runs after so long; resumable")
    parser.add_argument("--set", action="append", default=[], help="a setting on top, for a trial at a tiny size")
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    methods = sorted(all_methods()) if asked.methods == "all" else asked.methods.split(",")
    methods = [ALONE, *(name for name in methods if name != ALONE)]
    until = time.monotonic() + asked.minutes * 60
    found = {}
    for name in asked.sets.split(","):
        _compare(SETS[name], methods, asked, asked.runs / name, until)
        found[name] = {
            "file": SETS[name].file,
            "set": [*_settings(SETS[name]), *asked.set],
            "methods": collect(asked.runs / name),
        }
        print(f"\n{name}\n{table(found[name]['methods'])}", flush=True)
    if asked.json:
        result = {"command": "python " + " ".join(sys.argv), "manifest": _manifest(), "sets": found}
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def _compare(data: DataSet, methods: Sequence[str], asked: argparse.Namespace, folder: Path, until: float) -> None:
    """One `panorgan compare`, ended when the time is up."""
    command = [sys.executable, "-m", "panorgan", "compare", str(ROOT / data.file), "--methods", ",".join(methods)]
    command += ["--seeds", asked.seeds, "--reference", ALONE, "--run", str(folder), "--at-once", str(asked.at_once)]
    command += [word for setting in (*_settings(data), *asked.set) for word in ("--set", setting)]
    left = until - time.monotonic()
    if left <= 0:
        return
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        process.wait(None if math.isinf(left) else left)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _settings(data: DataSet) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in (BUDGET | dict(data.settings)).items()]


def collect(folder: Path) -> dict[str, dict[str, Any]]:
    """Method → seed → mean, organs, delivered round; and against solo: difference, p, worst organ."""
    methods: dict[str, dict[str, Any]] = {}
    for metrics in sorted(folder.glob("*/seed-*/metrics.csv")):
        run = metrics.parent
        seeds = methods.setdefault(run.parent.name, {"seeds": {}})["seeds"]
        seeds[run.name.removeprefix("seed-")] = _read(run)
    alone = methods.get(ALONE, {"seeds": {}})["seeds"]
    for name, method in methods.items():
        method |= against(method["seeds"], alone) if name != ALONE else {}
    for method in methods.values():
        for seed in method["seeds"].values():
            del seed["cells"]
    return methods


def _read(run: Path) -> dict[str, Any]:
    """Mean Dice over organs, of the test cases within the federation; `cells` by organ, site and case."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    inside = [row for row in rows if row["split"] == "test"]
    cells = {(row["organ"], row["site"], row["case"]): float(row["dice"]) for row in inside}
    organs = {organ: fmean(v for key, v in cells.items() if key[0] == organ) for organ in sorted({k[0] for k in cells})}
    outside = [float(row["dice"]) for row in rows if row["split"] == "external"]
    card = json.loads((run / "model" / "model.json").read_text())
    return {
        "mean": round(fmean(organs.values()), 4),
        "organs": {organ: round(value, 4) for organ, value in organs.items()},
        "delivered_round": card.get("round"),
        "cells": cells,
    } | ({"external": round(fmean(outside), 4)} if outside else {})


def against(seeds: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
    """What a method gains over every site alone, in the seeds that both have."""
    both = sorted(seeds.keys() & alone.keys())
    if not both:
        return {}
    ratios = [
        (seeds[seed]["organs"][organ] / max(value, 1e-9), organ, seed)
        for seed in both
        for organ, value in alone[seed]["organs"].items()
        if organ in seeds[seed]["organs"]
    ]
    ratio, organ, seed = min(ratios)
    cells = sorted(set.intersection(*(set(one[s]["cells"]) for one in (seeds, alone) for s in both)))
    differences = [fmean(seeds[s]["cells"][cell] - alone[s]["cells"][cell] for s in both) for cell in cells]
    return {
        "difference": round(fmean(seeds[s]["mean"] - alone[s]["mean"] for s in both), 4),
        "p": float(wilcoxon(differences).pvalue) if any(differences) else 1.0,
        "worst_organ": {"organ": organ, "seed": seed, "ratio": round(ratio, 4)},
    }


def table(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """A line per method, the best mean first."""
    lines = []
    for name, one in sorted(methods.items(), key=lambda item: -fmean(s["mean"] for s in item[1]["seeds"].values())):
        seeds = " / ".join(f"{seed['mean']:.3f}" for seed in one["seeds"].values())
        rounds = ", ".join(str(seed["delivered_round"]) for seed in one["seeds"].values())
        worst = one.get("worst_organ")
        against_solo = (
            f"{one['difference']:+.3f}  p {one['p']:.3f}  {worst['organ']} {worst['ratio']:.2f}" if worst else ""
        )
        lines.append(f"  {name:16} {seeds:24} {against_solo:52} round {rounds}")
    return "\n".join(lines)


def _manifest() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "machine": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "code": commit.stdout.strip() or "unknown",
    }


if __name__ == "__main__":
    main()
